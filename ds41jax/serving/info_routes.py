"""The routes that tell about the server: health, models, statistics, metrics."""

import dataclasses
import time
from typing import Any

from litestar import Request, Response, get
from litestar.datastructures import State

from ds41jax.serving.auth import OPEN
from ds41jax.serving.errors import ApiError
from ds41jax.serving.metrics import render_metrics
from ds41jax.serving.server import Server

HttpRequest = Request[Any, Any, State]


@get("/health", opt={OPEN: True})
async def health(request: HttpRequest) -> Response[dict[str, str]]:
    """200 while requests are taken, 503 once the engine has died or the server drains."""
    server: Server = request.app.state.server
    if not server.engine.healthy:
        return Response({"status": "engine failed"}, status_code=503)
    if server.draining:
        return Response({"status": "draining"}, status_code=503)
    return Response({"status": "ok"})


@get("/v1/models")
async def models(request: HttpRequest) -> dict[str, Any]:
    """The served model under its names; the limits are those configured."""
    options = request.app.state.server.options
    entries = [
        _model(request.app.state.server, id) for id in (options.model_name, *options.aliases)
    ]
    return {"object": "list", "data": entries}


@get("/v1/models/{id:path}")
async def model(request: HttpRequest) -> dict[str, Any]:
    """One of them."""
    options, id = request.app.state.server.options, request.path_params["id"].lstrip("/")
    if id not in (options.model_name, *options.aliases):
        message = f"The model is not served here; use {options.model_name}."
        raise ApiError(404, message, "model", "model_not_found")
    return _model(request.app.state.server, id)


def _model(server: Server, id: str) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "created": int(server.started),
        "owned_by": "deepseek-ai",
        "max_context_tokens": server.options.context,
        "max_output_tokens": min(server.options.max_output_tokens, server.options.context),
    }


@get("/v1/stats")
async def stats(request: HttpRequest) -> dict[str, Any]:
    """Counters and gauges, made when asked for, so that differences between two calls are exact."""
    return statistics(request.app.state.server)


def statistics(server: Server) -> dict[str, Any]:
    """What `/v1/stats` answers."""
    counters, engine = server.gate.counters, engine_statistics(server)
    return {
        "uptime_seconds": time.time() - server.started,
        "http_queue_waits": counters.waits,
        "http_queue_wait_ms_sum": counters.wait_ms_sum,
        "http_queue_rejects": counters.rejects,
        "http_queue_len": server.gate.waiting,
        "http_active": len(server.activity.active),
        "totals": _totals(server, engine.get("totals", {})),
        "engine": engine,
    }


def _totals(server: Server, engine: dict[str, Any]) -> dict[str, Any]:
    """Counts since the start: of requests as the clients see them, of tokens as the engine does."""
    totals = dataclasses.asdict(server.activity.totals)
    prompt, cached = engine.get("prompt_tokens", 0), engine.get("cached_tokens", 0)
    return {
        **totals,
        "prefill_tokens": prompt - cached,
        "verification_rounds": engine.get("rounds", 0),
        "drafted_tokens": engine.get("drafted", 0),
        "accepted_drafts": engine.get("accepted", 0),
    }


def engine_statistics(server: Server) -> dict[str, Any]:
    """The engine's snapshot as JSON."""
    values: dict[str, Any] = _plain(vars(server.engine.stats()))
    return values


def _plain(value: Any) -> Any:
    """The value with names for keys, as JSON has them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@get("/metrics", media_type="text/plain; version=1.0.0")
async def metrics(request: HttpRequest) -> bytes:
    """The statistics for Prometheus."""
    return render_metrics(statistics(request.app.state.server))
