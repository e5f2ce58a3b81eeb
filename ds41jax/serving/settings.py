"""How an answer is to be generated: the protocols' fields in one form, and the defaults."""

import secrets
from dataclasses import dataclass

from ds41jax.engine.sampling import SamplingParams
from ds41jax.serving.errors import invalid
from ds41jax.serving.fields import SamplingFields

GREEDY_BELOW = 1e-5
# The hosted API's limits for a request that states none.
DEFAULT_MAX_TOKENS = 8192
DEFAULT_MAX_TOKENS_THINKING = 65536
DEFAULT_MAX_TOKENS_MAX_EFFORT = 131072


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Settings:
    """Everything a request says about its answer besides the conversation; None is not said.

    Attributes:
      top_logprobs: how many alternatives come with each token; None for no log probabilities.
    """

    model: str
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The engine's parameters. A missing seed is drawn afresh; -1 and 0 are real seeds."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        top_k = defaults.top_k if self.top_k is None else max(self.top_k, 0)
        seed = secrets.randbits(64) if self.seed is None else self.seed % (1 << 64)
        return SamplingParams(
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=top_k,
            min_p=self.min_p or 0.0,
            seed=seed,
        )


def common_settings(fields: SamplingFields) -> dict[str, object]:
    """The settings that every protocol spells alike."""
    return {
        "model": fields.model,
        "stream": bool(fields.stream),
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "seed": fields.seed,
        "ignore_eos": bool(fields.ignore_eos),
        "min_tokens": fields.min_tokens or 0,
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
    }


def resolve_max_tokens(
    wanted: int | None, prompt_tokens: int, context: int, output_limit: int, default: int
) -> int:
    """Tokens that may be emitted: what was asked for, within the context and the server's limit.

    Raises:
      ApiError: 400 if the prompt leaves no room.
    """
    room = context - prompt_tokens
    if room < 1:
        message = f"The prompt has {prompt_tokens} tokens; the context holds {context} in all."
        raise invalid("messages", message, "context_length_exceeded")
    return min(default if wanted is None else wanted, output_limit, room)


def default_max_tokens(thinking: bool, max_effort: bool) -> int:
    """The limit of a request that states none."""
    if not thinking:
        return DEFAULT_MAX_TOKENS
    return DEFAULT_MAX_TOKENS_MAX_EFFORT if max_effort else DEFAULT_MAX_TOKENS_THINKING
