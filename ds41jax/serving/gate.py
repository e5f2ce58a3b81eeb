"""The way into the engine: a bounded number of requests may wait there, for a bounded time."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds41jax.engine.request import EngineError, Request
from ds41jax.serving.errors import ApiError, from_engine

RETRY_SECONDS = 0.05  # a place may also fall free without a word from us


@dataclass
class GateCounters:
    """What has happened at the gate."""

    waits: int = 0
    wait_ms_sum: float = 0.0
    rejects: int = 0


class Gate:
    """Submits requests; those that find the engine's queue full wait here in line."""

    def __init__(self, submit: Callable[[Request], Any], depth: int, seconds: float):
        self._submit = submit
        self._depth = depth
        self._seconds = seconds
        self._waiting: deque[asyncio.Event] = deque()
        self.counters = GateCounters()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in the engine's queue."""
        return len(self._waiting)

    def released(self) -> None:
        """Says that a request has left the engine."""
        if self._waiting:
            self._waiting[0].set()

    async def submit(self, request: Request) -> Any:
        """The request's handle.

        Raises:
          ApiError: 429 if there is no room within the time allowed, or what the engine refuses.
        """
        if not self._waiting:
            handle = await self._try(request)
            if handle is not None:
                return handle
        if self._seconds <= 0 or len(self._waiting) >= self._depth:
            raise self._full()
        return await self._wait(request)

    async def _wait(self, request: Request) -> Any:
        loop = asyncio.get_running_loop()
        began = loop.time()
        ticket = asyncio.Event()
        self._waiting.append(ticket)
        self.counters.waits += 1
        try:
            while (left := began + self._seconds - loop.time()) > 0:
                if self._waiting[0] is ticket:
                    handle = await self._try(request)
                    if handle is not None:
                        return handle
                try:
                    async with asyncio.timeout(min(left, RETRY_SECONDS)):
                        await ticket.wait()
                except TimeoutError:
                    continue
                ticket.clear()
            raise self._full()
        finally:
            self._waiting.remove(ticket)
            self.counters.wait_ms_sum += (loop.time() - began) * 1000
            self.released()

    async def _try(self, request: Request) -> Any:
        """The handle, or None if the engine's queue is full.

        Compiling a grammar may take a tenth of a second, which the other requests must not feel.
        """
        try:
            if request.constraint is None:
                return self._submit(request)
            return await self._in_thread(request)
        except EngineError as error:
            if error.kind == "queue_full":
                return None
            raise from_engine(error) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    async def _in_thread(self, request: Request) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(None, self._submit, request)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_abandon)
            raise

    def _full(self) -> ApiError:
        self.counters.rejects += 1
        return ApiError(429, "The server is busy; try again later.", None, "queue_full")


def _abandon(future: asyncio.Future[Any]) -> None:
    """Cancels a request that nobody waits for any more."""
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()
