"""The console: one page, a snapshot, and a WebSocket that keeps the page up to date.

Nothing is sampled while nobody looks. A viewer gets events and counts of rounds in at most 20
frames a second, and gauges in four of them; one that falls behind gets a fresh snapshot instead.
"""

import asyncio
import importlib.resources
import time
from collections import deque
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from litestar import Request, Response, WebSocket, get, websocket
from litestar.datastructures import State
from litestar.exceptions import WebSocketDisconnect

from ds41jax.serving.activity import MAX_EVENTS
from ds41jax.serving.info_routes import engine_statistics, statistics
from ds41jax.serving.server import Server

FRAME_SECONDS = 1 / 20
GAUGE_SECONDS = 0.25
MAX_VIEWERS = 32
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
)


@get("/")
async def page() -> Response[bytes]:
    """The console's page, with everything that it needs in it."""
    file = importlib.resources.files("ds41jax.serving") / "console.html"
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(file.read_bytes(), media_type="text/html", headers=headers)


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
    events = server.activity.watch()
    sender = asyncio.create_task(_send(socket, server, events))
    try:
        while True:
            await socket.receive_data(mode="text")  # a viewer has nothing to say but good-bye
    except WebSocketDisconnect:
        pass
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        server.activity.unwatch(events)


async def _send(
    socket: WebSocket[Any, Any, State], server: Server, events: deque[dict[str, Any]]
) -> None:
    await socket.send_json(make_snapshot(server))
    gauges_due, seen = 0.0, _rounds(server)
    while True:
        await asyncio.sleep(FRAME_SECONDS)
        now = time.time()
        if len(events) == MAX_EVENTS:
            events.clear()
            await socket.send_json(make_snapshot(server))
            continue
        frame: dict[str, Any] = {"type": "frame", "now": now}
        if events:
            frame["ev"] = list(events)
            events.clear()
        rounds = _rounds(server)
        if rounds != seen:
            frame["r"] = {name: rounds[name] - seen[name] for name in rounds}
            seen = rounds
        if now >= gauges_due:
            gauges_due = now + GAUGE_SECONDS
            frame["g"] = statistics(server)
            frame["active"] = _active(server)
        if len(frame) > 2:
            await socket.send_json(frame)


def _rounds(server: Server) -> dict[str, int]:
    """The engine's counts of rounds and drafts, whose growth between two frames is the ticker."""
    totals = engine_statistics(server).get("totals", {})
    names = ("rounds", "drafted", "accepted", "emitted_tokens", "prefill_steps")
    return {name: totals.get(name, 0) for name in names}


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
