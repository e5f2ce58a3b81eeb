"""A request's events gathered into one result."""

from collections.abc import Iterable
from dataclasses import dataclass

from ds41jax.engine.request import EngineError, Event, Failed, Finished, Token, TokenLogprobs
from ds41jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Output:
    """What a finished request gave.

    Attributes:
      token_ids: all emitted tokens, an end or stop token included.
      text: of them, without the token that ended it; None if the model has no tokenizer.
      logprobs: one entry a token, if the request wanted them.
      finished: why it ended, and what it cost.
    """

    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


def gather(events: Iterable[Event], tokenizer: Tokenizer | None, ends: set[int]) -> Output:
    """Reads a request's events to the last one.

    Args:
      ends: tokens that end the request and are no part of its text.

    Raises:
      EngineError: why it failed.
    """
    tokens: list[Token] = []
    for event in events:
        if isinstance(event, Token):
            tokens.append(event)
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Finished):
            ids = [token.token_id for token in tokens]
            shown = ids[:-1] if event.reason == "stop" and ids and ids[-1] in ends else ids
            text = None if tokenizer is None else tokenizer.decode(shown)
            logprobs = tuple(t.logprobs for t in tokens if t.logprobs is not None)
            return Output(tuple(ids), text, logprobs, event)
    raise EngineError("internal", "the request's events ended without a last one")
