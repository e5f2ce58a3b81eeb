"""What is going on, for the console and the statistics: cheap to write, read when looked at."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ds41jax.engine.observer import DecodeRound, Observer, PrefillStep
from ds41jax.serving.step_events import step_event
from ds41jax.tokenizer import Tokenizer

RECENT = 16
MAX_TEXT = 4000
MAX_EVENTS = 8192


@dataclass
class Watched:
    """A request as the console shows it."""

    id: str
    route: str
    prompt: int
    cached: int = 0
    max: int = 0
    grammar: bool = False
    images: int = 0
    gen: int = 0
    state: str = "queued"
    admitted: float = field(default_factory=time.time)
    first: float | None = None
    retired: float | None = None
    reason: str = ""
    prompt_text: str = ""
    text: str = ""


@dataclass
class Totals:
    """Counts since the start."""

    requests_admitted: int = 0
    requests_retired: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0


class Viewer:
    """One viewer's queue of events, bounded: what does not fit is lost, and noticed.

    The engine's thread and the server's loop add to it; the loop alone takes from it.
    """

    def __init__(self) -> None:
        self._events: deque[Any] = deque(maxlen=MAX_EVENTS)

    def put(self, event: Any) -> None:
        """Adds an event; never blocks."""
        self._events.append(event)

    def take(self) -> list[Any] | None:
        """All events since the last call; None if some were lost, so that one must start afresh."""
        if len(self._events) >= MAX_EVENTS:
            self._events.clear()
            return None
        return [self._events.popleft() for _ in range(len(self._events))]


class Activity:
    """Requests in flight, the last ones, totals, and events for whoever looks.

    It is an `Observer` of the engine's steps, attached only while somebody looks.
    """

    def __init__(self, with_text: bool, observe: Callable[[Observer | None], None]):
        """observe: attaches an observer to the engine, or none."""
        self.with_text = with_text
        self._observe = observe
        self.active: dict[str, Watched] = {}
        self.recent: deque[Watched] = deque(maxlen=RECENT)
        self.totals = Totals()
        self._viewers: tuple[Viewer, ...] = ()

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    def watch(self) -> Viewer:
        """A new viewer."""
        viewer = Viewer()
        self._viewers = (*self._viewers, viewer)
        if len(self._viewers) == 1:
            self._observe(self)
        return viewer

    def unwatch(self, viewer: Viewer) -> None:
        """Ends what `watch` began."""
        self._viewers = tuple(other for other in self._viewers if other is not viewer)
        if not self._viewers:
            self._observe(None)

    def prefilled(self, step: PrefillStep) -> None:
        """A step of a prompt is done; called on the engine's thread."""
        self._put((time.time(), step))

    def decoded(self, round: DecodeRound) -> None:
        """A decode round is done; called on the engine's thread."""
        self._put((time.time(), round))

    def _put(self, event: Any) -> None:
        for viewer in self._viewers:
            viewer.put(event)

    def admit(self, watched: Watched) -> None:
        """A request has been taken by the engine."""
        self.active[watched.id] = watched
        self.totals.requests_admitted += 1
        self._tell("admit", watched)

    def started(self, watched: Watched, prompt_tokens: int, cached: int) -> None:
        """The engine has begun with it."""
        watched.state, watched.cached = "prefill", cached
        self.totals.input_tokens += prompt_tokens
        self.totals.cached_input_tokens += cached
        self._tell("start", watched)

    def token(self, watched: Watched, text: str) -> None:
        """A token has come; `text` is what is kept of it if text is shown at all."""
        watched.gen += 1
        self.totals.output_tokens += 1
        if watched.first is None:
            watched.first, watched.state = time.time(), "decode"
            self._tell("first", watched)
        if self.with_text:
            watched.text = (watched.text + text)[-MAX_TEXT:]

    def retire(self, watched: Watched, reason: str) -> None:
        """It is over: "stop", "length", "cancelled" or "failed"."""
        if self.active.pop(watched.id, None) is None:
            return
        watched.state, watched.reason, watched.retired = "done", reason, time.time()
        self.recent.appendleft(watched)
        self.totals.requests_retired += 1
        self.totals.requests_failed += reason == "failed"
        self.totals.requests_cancelled += reason == "cancelled"
        self._tell("retire", watched)

    def _tell(self, kind: str, watched: Watched) -> None:
        if self._viewers:
            self._put({"k": kind, "t": time.time(), **asdict(watched)})

    def plain(self, events: list[Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Events of a viewer as a frame holds them."""
        words = tokenizer if self.with_text else None
        return [
            event if isinstance(event, dict) else step_event(event[1], event[0], words)
            for event in events
        ]
