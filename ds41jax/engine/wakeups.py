"""Waking tasks of an event loop from the engine's thread, many of them with one call.

A round emits tokens of every request within microseconds. A call into the loop for each would write
to its pipe sixteen times, and both threads would fight for the interpreter at every write.
"""

import asyncio
import contextlib
import weakref
from collections import deque

_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]" = (
    weakref.WeakKeyDictionary()
)


class LoopWaker:
    """Sets events of one loop from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._due: deque[asyncio.Event] = deque()
        self._called = False

    def wake(self, event: asyncio.Event) -> None:
        """Sets the event soon; never blocks. Does nothing once the loop is gone."""
        self._due.append(event)
        if self._called:
            return
        self._called = True
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: a reader that is gone
                loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._called = False  # first: an event that comes while these are set calls again
        while self._due:
            self._due.popleft().set()


def waker_of(loop: asyncio.AbstractEventLoop) -> LoopWaker:
    """The loop's own waker; called on that loop."""
    waker = _wakers.get(loop)
    if waker is None:
        waker = _wakers[loop] = LoopWaker(loop)
    return waker
