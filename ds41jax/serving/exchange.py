"""One HTTP exchange of a generating route, as an ASGI application.

The work and the client's connection race each other: when the client goes away, streaming or not,
waiting for a place or already answered in part, the work is cancelled and the engine with it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from ds41jax.serving.errors import ApiError
from ds41jax.serving.generation import Generation
from ds41jax.serving.replies import Reply

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Begin = Callable[[], Awaitable[tuple[Generation, Reply, bool]]]
Envelope = Callable[[ApiError], dict[str, Any]]


class Exchange:
    """Answers one request; `begin` prepares it and says whether the answer is streamed."""

    def __init__(self, begin: Begin, envelope: Envelope):
        """envelope: the protocol's form of an error."""
        self._begin = begin
        self._envelope = envelope
        self._generation: Generation | None = None
        self._headers_sent = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await work
            if self._generation is not None:
                self._generation.close()

    async def _answer(self, send: Send) -> None:
        try:
            self._generation, reply, stream = await self._begin()
            await self._generation.open()
            if stream:
                await self._stream(self._generation, reply, send)
            else:
                async for chunks in self._generation.chunks():
                    for chunk in chunks:
                        reply.add(chunk)
                await self._send_whole(send, 200, reply.body(), {})
        except Exception as error:
            known = _known(error)
            if not self._headers_sent:
                body = msgspec.json.encode(self._envelope(known))
                await self._send_whole(send, known.status, body, known.headers)

    async def _stream(self, generation: Generation, reply: Reply, send: Send) -> None:
        """Sends the stream; one that fails says so and ends without its final marker."""
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._send_head(send, 200, {**headers, "x-accel-buffering": "no"})
        try:
            async for chunks in generation.chunks():
                frames = b"".join(map(reply.frames, chunks))
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            last = reply.done()
        except Exception as error:
            last = reply.failed(_known(error))
        await send({"type": "http.response.body", "body": last})

    async def _send_whole(
        self, send: Send, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        headers = {**headers, "content-type": "application/json", "content-length": str(len(body))}
        await self._send_head(send, status, headers)
        await send({"type": "http.response.body", "body": body})

    async def _send_head(self, send: Send, status: int, headers: dict[str, str]) -> None:
        raw = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
        self._headers_sent = True
        await send({"type": "http.response.start", "status": status, "headers": raw})


def _known(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed on this request.", None, "internal")


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
