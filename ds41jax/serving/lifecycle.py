"""A server that ends well: new requests are refused, running ones finish, then it stops."""

import asyncio
import socket
from types import FrameType

import uvicorn

from ds41jax.serving.server import Server

POLL_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """Uvicorn whose first signal drains and whose second one stops at once."""

    def __init__(self, config: uvicorn.Config, state: Server, drain_seconds: float):
        """drain_seconds: how long running requests may take to finish."""
        super().__init__(config)
        self._state = state
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self.ready_message = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's start, and the word that it is done."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.ready_message:
            print(self.ready_message, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second one is uvicorn's own."""
        if self._state.draining or self._loop is None:
            super().handle_exit(sig, frame)
        else:
            self.begin_drain()

    def begin_drain(self) -> None:
        """Refuses new requests and stops once the running ones have finished."""
        assert self._loop is not None
        self._state.draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        busy = lambda: self._state.activity.active or self._state.gate.waiting  # noqa: E731
        while busy() and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True
