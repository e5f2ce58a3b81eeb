"""The console: one page, a snapshot, and a WebSocket that keeps the page up to date.

Nothing is sampled while nobody looks: the engine has an observer only as long as there is a viewer.
A viewer gets events in at most 20 frames a second, and gauges in four of them; one that falls
behind gets a fresh snapshot instead.
"""

import asyncio
import functools
import importlib.resources
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import msgspec
from litestar import Request, Response, WebSocket, get, websocket
from litestar.datastructures import State
from litestar.exceptions import WebSocketDisconnect

from ds41jax.serving.activity import Viewer
from ds41jax.serving.info_routes import statistics
from ds41jax.serving.server import Server

FRAME_SECONDS = 1 / 20
GAUGE_SECONDS = 0.25
MAX_VIEWERS = 32
Send = Callable[[str], Awaitable[None]]
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
)


@get("/")
async def page() -> Response[str]:
    """The console's page, with everything that it needs in it."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(_page(), media_type="text/html", headers=headers)


@functools.cache
def _page() -> str:
    """The page with its style and its scripts inside."""
    folder = importlib.resources.files("ds41jax.serving") / "console_page"
    text = (folder / "page.html").read_text("utf-8")
    for part in ("style.css", "charts.js", "panels.js"):
        text = text.replace(f"/* {part} */", (folder / part).read_text("utf-8"))
    return text


@get("/v1/console/snapshot")
async def snapshot(request: Request[Any, Any, State]) -> dict[str, Any]:
    """What a new viewer gets, for clients without a WebSocket."""
    return make_snapshot(request.app.state.server)


@websocket("/v1/console")
async def stream(socket: WebSocket[Any, Any, State]) -> None:
    """Sends a snapshot, then frames, until the viewer leaves."""
    server: Server = socket.app.state.server
    if not _same_origin(socket) or server.activity.viewers >= MAX_VIEWERS:
        await socket.close(code=1008)
        return
    await socket.accept()
    viewer = server.activity.watch()
    sender = asyncio.create_task(send_frames(socket.send_text, server, viewer))
    try:
        while True:
            await socket.receive_data(mode="text")  # a viewer has nothing to say but good-bye
    except WebSocketDisconnect:
        pass
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        server.activity.unwatch(viewer)


async def send_frames(send: Send, server: Server, viewer: Viewer) -> None:
    """Sends a snapshot, then frames, until it is cancelled."""
    await send(_text(make_snapshot(server)))
    gauges_due = 0.0
    while True:
        await asyncio.sleep(FRAME_SECONDS)
        now = time.time()
        events = viewer.take()
        if events is None:
            await send(_text(make_snapshot(server)))
            continue
        frame: dict[str, Any] = {"type": "frame", "now": now}
        if events:
            frame["ev"] = server.activity.plain(events, server.tokenizer)
        if now >= gauges_due:
            gauges_due = now + GAUGE_SECONDS
            frame["g"] = statistics(server)
            frame["active"] = _active(server)
        if len(frame) > 2:
            await send(_text(frame))


def _text(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()


def make_snapshot(server: Server) -> dict[str, Any]:
    """Everything that a viewer needs to begin with."""
    options = server.options
    config = {
        "model": options.model_name,
        "context": options.context,
        "max_output_tokens": options.max_output_tokens,
        "queue_depth": options.queue_depth,
        "fingerprint": server.fingerprint,
    }
    return {
        "type": "snapshot",
        "now": time.time(),
        "text": options.console_text,
        "config": config,
        "requests": _active(server),
        "recent": [asdict(watched) for watched in server.activity.recent],
        "g": statistics(server),
    }


def _active(server: Server) -> list[dict[str, Any]]:
    return [asdict(watched) for watched in server.activity.active.values()]


def _same_origin(socket: WebSocket[Any, Any, State]) -> bool:
    """Whether the page that opens the socket is ours; programs send no origin."""
    origin = socket.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == socket.headers.get("host")
