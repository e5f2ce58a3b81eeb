"""What an engine tells about its steps to whoever watches: prefill progress, rounds, times.

Give an object with the two methods of `Observer` to `Engine.observe`, and None when nobody looks
any more: without an observer nothing of this is made. Requests are named by `RequestHandle.id`.

    class Printer:
        def prefilled(self, step: PrefillStep) -> None:
            print(step.request_id, step.done, "of", step.total)

        def decoded(self, round: DecodeRound) -> None:
            print(round.rows, "rows in", round.times.total, "s")

    engine.observe(Printer())
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

_log = logging.getLogger(__name__)


@dataclass
class StepTimes:
    """Where the wall time of a step went, in seconds. The parts do not overlap.

    Attributes:
      choose: drafts walked through the grammar, and the policy's choice of their number.
      build: the batch and the sampling parameters made as arrays, Engram rows read.
      dispatch: the compiled programs called. On a CPU a program may run inside its call.
      wait: for the device's results.
      emit: tokens taken and given out, requests ended, the policy told.
    """

    choose: float = 0.0
    build: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    emit: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.choose + self.build + self.dispatch + self.wait + self.emit

    def add(self, other: "StepTimes") -> None:
        """Adds another step's times to these."""
        self.choose += other.choose
        self.build += other.build
        self.dispatch += other.dispatch
        self.wait += other.wait
        self.emit += other.emit


@dataclass
class Stopwatch:
    """Splits a step's time into its parts: each `lap` takes all since the one before."""

    times: StepTimes = field(default_factory=StepTimes)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, part: str) -> None:
        """Counts the time since the last lap as `part`, a field of `StepTimes`."""
        now = time.perf_counter()
        setattr(self.times, part, getattr(self.times, part) + now - self._last)
        self._last = now


@dataclass(frozen=True)
class PrefillStep:
    """One step of one prompt.

    Attributes:
      done: rows of the prompt that need no further work, those taken from earlier prompts included.
        In a bounded prefill a prompt that is encoded whole still has its last window to run again.
      total: rows of the prompt, and that window's. `done == total` ends the prefill.
      rows: of this step.
    """

    request_id: str
    done: int
    total: int
    rows: int
    times: StepTimes


@dataclass(frozen=True)
class RequestRound:
    """What a decode round did for one request.

    Attributes:
      position: of the first emitted token, and of the first drafted one, in prompt and output.
      drafted: tokens of the block that the drafter made, within the request's budget and grammar.
      verified: how many of them the policy let the target verify; the others were declined.
      accepted: how many of those the target agreed with and that were emitted.
      emitted: the tokens given out: the accepted drafts, then the target's own.
    """

    request_id: str
    position: int
    drafted: tuple[int, ...]
    verified: int
    accepted: int
    emitted: tuple[int, ...]

    @property
    def accepted_ids(self) -> tuple[int, ...]:
        """Drafts that were emitted, from `position` on."""
        return self.drafted[: self.accepted]

    @property
    def rejected_ids(self) -> tuple[int, ...]:
        """Drafts that were verified in vain, from `position + accepted` on."""
        return self.drafted[self.accepted : self.verified]


@dataclass(frozen=True)
class DecodeRound:
    """One decode round of all running requests.

    Attributes:
      rows: anchors and drafts that were verified; padded_rows: of the program that ran.
      policy: the drafting policy's statistics after the round, fits included; {"mode": "off"}
        without a drafter.
    """

    requests: tuple[RequestRound, ...]
    rows: int
    padded_rows: int
    times: StepTimes
    policy: dict[str, Any]


class Observer(Protocol):
    """Called on the engine's loop thread after a step: return at once, and keep what you need."""

    def prefilled(self, step: PrefillStep) -> None:
        """A step of a prompt is done."""

    def decoded(self, round: DecodeRound) -> None:
        """A decode round is done."""


class Watched:
    """Holds the observer. One that raises is let go, and logged: no request may suffer from it."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    def tell(self, event: PrefillStep | DecodeRound) -> None:
        """Hands an event to the observer."""
        observer = self.observer
        if observer is None:
            return
        try:
            if isinstance(event, PrefillStep):
                observer.prefilled(event)
            else:
                observer.decoded(event)
        except Exception:
            self.observer = None
            _log.exception("an engine observer raised; it is not called any more")
