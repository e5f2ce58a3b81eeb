"""An engine without a model: it plays a script for each request and keeps a record.

A script is a function of the request that yields token ids, `TokenLogprobs` pairs, seconds to wait,
or an `EngineError` to fail with.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds41jax.checkpoint.presets import small_config
from ds41jax.config import ModelConfig, parse_config
from ds41jax.engine.observer import DecodeRound, Observer, PrefillStep, RequestRound, StepTimes
from ds41jax.engine.request import (
    EngineError,
    Event,
    Failed,
    Finished,
    Request,
    Started,
    Token,
    TokenLogprobs,
)
from ds41jax.tokenizer import Tokenizer

Step = int | float | tuple[int, TokenLogprobs] | EngineError
Script = Callable[[Request], Iterable[Step]]


def script_of(tokenizer: Tokenizer, text: str, delay: float = 0.0) -> Script:
    """Plays a text in which special tokens are meant, and the end token."""
    ids = tokenizer.encode_special(text)

    def play(request: Request) -> Iterable[Step]:
        for id in [*ids, 1]:
            if delay:
                yield delay
            if request.top_logprobs is None:
                yield id
            else:
                yield id, TokenLogprobs(-0.5, ((id, -0.5), (7, -2.0))[: request.top_logprobs])

    return play


@dataclass
class FakeModel:
    """What the server reads of a model."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    path: Path = Path("/nowhere")


@dataclass
class FakeStats:
    """A snapshot with a field of each kind."""

    active: int = 0
    waiting: int = 0
    pool: dict[str, int] = field(default_factory=lambda: {"pages": 64, "free": 60})
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 2})
    accepted_by_position: list[int] = field(default_factory=lambda: [5, 3, 1])
    policy: dict[str, Any] = field(default_factory=dict)


class FakeEngine:
    """Follows the face of `ds41jax.engine.engine.Engine`."""

    def __init__(self, tokenizer: Tokenizer, script: Script, capacity: int = 32):
        self.model = FakeModel(parse_config(small_config()), tokenizer)
        self.script = script
        self.capacity = capacity
        self.healthy = True
        self.refusal: EngineError | None = None
        self.policy: dict[str, Any] = {"mode": "off"}
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.open: set[str] = set()
        self.observer: Observer | None = None
        self._ids = itertools.count()

    def submit(self, request: Request) -> "FakeHandle":
        """A handle that plays the script."""
        if self.refusal is not None:
            raise self.refusal
        if len(self.open) >= self.capacity:
            raise EngineError("queue_full", "the queue is full")
        self.requests.append(request)
        handle = FakeHandle(self, f"request-{next(self._ids)}", request)
        self.open.add(handle.id)
        return handle

    def observe(self, observer: Observer | None) -> None:
        """Tells of a prefill step and a round for each token."""
        self.observer = observer

    def stats(self) -> FakeStats:
        """A snapshot."""
        return FakeStats(active=len(self.open), policy=self.policy)


class FakeHandle:
    """A request being played."""

    def __init__(self, engine: FakeEngine, id: str, request: Request):
        self.id = id
        self._engine = engine
        self._request = request
        self._cancelled = False

    @property
    def ready(self) -> bool:
        """Whether an event is there already: the script says so step by step."""
        return False

    def cancel(self) -> None:
        """Records that the request was given up."""
        if self.id in self._engine.open:
            self._engine.cancelled.append(self.id)
            self._engine.open.discard(self.id)
        self._cancelled = True

    async def __aiter__(self) -> AsyncIterator[Event]:
        request, emitted = self._request, 0
        yield Started(len(request.token_ids), 3)
        if self._engine.observer is not None:
            total, times = len(request.token_ids), StepTimes(build=0.001, wait=0.004)
            self._engine.observer.prefilled(PrefillStep(self.id, total, total, total, times))
        reason = "length"
        for step in self._engine.script(request):
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            if isinstance(step, EngineError):
                self._engine.open.discard(self.id)
                yield Failed(step)
                return
            id, logprobs = step if isinstance(step, tuple) else (step, None)
            emitted += 1
            self._tell(id, len(request.token_ids) + emitted)
            yield Token(id, logprobs)
            if id == 1 and not request.ignore_eos:
                reason = "stop"
                break
            if emitted >= request.max_tokens:
                break
        self._engine.open.discard(self.id)
        yield Finished(reason, len(request.token_ids), emitted, 3, 0, 0)

    def _tell(self, id: int, position: int) -> None:
        """A round that accepted nothing of two drafts."""
        if self._engine.observer is None:
            return
        drafts = (id + 1, id + 2, id + 3)
        request = RequestRound(self.id, position, drafts, verified=2, accepted=0, emitted=(id,))
        times = StepTimes(0.0001, 0.0005, 0.001, 0.008, 0.0004)
        self._engine.observer.decoded(DecodeRound((request,), 3, 6, times, {"mode": "fixed"}))


def arguments_of(chunks: list[Any]) -> str:
    """The arguments of a stream's first tool call."""
    calls = (c.choices[0].delta.tool_calls for c in chunks if c.choices)
    return "".join(call[0].function.arguments or "" for call in calls if call)
