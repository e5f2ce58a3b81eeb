"""What is going on, for the console and the statistics: cheap to write, read when looked at."""

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

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


class Activity:
    """Requests in flight, the last ones, totals, and events for whoever looks."""

    def __init__(self, with_text: bool):
        self.with_text = with_text
        self.active: dict[str, Watched] = {}
        self.recent: deque[Watched] = deque(maxlen=RECENT)
        self.totals = Totals()
        self._viewers: list[deque[dict[str, Any]]] = []

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    def watch(self) -> deque[dict[str, Any]]:
        """A new viewer's queue of events. It is full when events were lost: then start afresh."""
        events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._viewers.append(events)
        return events

    def unwatch(self, events: deque[dict[str, Any]]) -> None:
        """Ends what `watch` began."""
        self._viewers = [viewer for viewer in self._viewers if viewer is not events]

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
        if not self._viewers:
            return
        event = {"k": kind, "t": time.time(), **asdict(watched)}
        for events in self._viewers:
            events.append(event)
