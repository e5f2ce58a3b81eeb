"""`ds41jax serve`: loads a model, plans, and serves it over HTTP."""

import argparse
import os
import socket
import sys
from pathlib import Path

import jax
import uvicorn

from ds41jax.cache.planner import PlanOptions, plan_memory, split_placements
from ds41jax.compute_arguments import described
from ds41jax.config import ModelConfig, load_config
from ds41jax.engine.default_model import default_model_path
from ds41jax.engine.engine import Engine
from ds41jax.engine.loading import load_model
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.remote_options import (
    READY_SECONDS,
    RemoteExperts,
    open_fabric,
    remote_experts,
)
from ds41jax.serving.app import make_app
from ds41jax.serving.arguments import engine_options, server_options
from ds41jax.serving.lifecycle import DrainingServer
from ds41jax.serving.server import ServerOptions
from ds41jax.tokenizer import FILE_NAME

KEEP_ALIVE_SECONDS = 75
MAX_CONNECTIONS = 1024
# The engine's thread and the server's share the interpreter. At Python's own 5 ms, a token that is
# ready could wait as long for the other thread's work between two rounds.
SWITCH_SECONDS = 0.0001
MAX_VIEWER_MESSAGE = 4096  # a viewer of the console has nothing to say


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; the first one lets running requests finish."""
    folder = Path(args.model) if args.model else default_model_path()
    config = load_config(folder)
    engine_choice = engine_options(args, config)
    speculative = engine_choice.dspark and config.num_nextn_predict_layers > 0
    remote = remote_experts(args, config, engine_choice)
    options = server_options(args, engine_choice, folder, speculative)
    listener = _listener(args.listen)
    with listener:
        _print_plan(folder, config, engine_choice, options, args.memory_reservation, remote)
        if args.dry_run:
            print("Every check passed; nothing was loaded.")
            return 0
        with open_fabric(folder, remote, engine_choice) as (engine_choice, fabric):
            local = None if remote is None else remote.placement.first_layer
            model = load_model(folder, cards=engine_choice.find_cards(), local_layers=local)
            if fabric is not None:
                fabric.wait_ready(READY_SECONDS)
            with Engine(model, engine_choice, progress=True) as engine:
                _serve(engine, options, listener, args.drain_seconds)
    return 0


def _serve(
    engine: Engine, options: ServerOptions, listener: socket.socket, drain_seconds: float
) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    app = make_app(engine, options)
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
        ws_max_size=MAX_VIEWER_MESSAGE,
    )
    host, port = listener.getsockname()[:2]
    shown = "localhost" if host in ("0.0.0.0", "::") else host
    server = DrainingServer(config, app.state.server, drain_seconds)
    server.ready_message = f"Ready: http://{shown}:{port} (console), http://{shown}:{port}/v1 (API)"
    server.run(sockets=[listener])


def _listener(address: str) -> socket.socket:
    """A socket bound before anything is loaded, so that a taken port costs no time."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen must be HOST:PORT, not {address!r}")
    host = host.strip("[]") or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise OSError(f"--listen {address}: {error.strerror or error}") from error
    return listener


def _print_plan(
    folder: Path,
    config: ModelConfig,
    engine: EngineOptions,
    options: ServerOptions,
    reservation: int | None,
    remote: RemoteExperts | None,
) -> None:
    """What is about to be loaded, as a table; raises `ValueError` if it does not fit."""
    if not (folder / FILE_NAME).exists():
        raise ValueError(f"{folder} has no {FILE_NAME}: without one nothing can be served")
    sampling = options.sampling
    drafts = f"{engine.policy.name}, {engine.policy.limit} at most"
    rows = [
        ("model", f"{folder}"),
        ("served as", ", ".join((options.model_name, *options.aliases))),
        ("layers", f"{config.num_hidden_layers}, {config.n_routed_experts} experts each"),
        ("experts", "all here" if remote is None else remote.summary),
        ("vision", "yes" if config.vision is not None else "no"),
        ("drafts", drafts if options.speculative else "off"),
        ("requests", f"{engine.max_active} run, {engine.max_queue + options.queue_depth} may wait"),
        ("context", f"{engine.context} tokens; cache of {engine.pool_tokens} tokens in all"),
        ("grammars", "yes" if options.guided else "no: xgrammar is not installed"),
        ("sampling", f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g} by default"),
        ("API key", "needed" if options.api_key else "none: open to everyone who reaches the port"),
        ("devices", f"{jax.device_count()}"),
        ("computes", described(engine.compute)),
    ]
    for name, value in rows:
        print(f"{name:<12}{value}")
    wanted = PlanOptions(
        slots=engine.max_active,
        retained=engine.retained,
        context=engine.context,
        pool_tokens=engine.pool_tokens,
        rows=engine.prefill_chunk,
        reservation_bytes=reservation,
        routed_layers=None if remote is None else remote.placement.first_layer,
        headroom_bytes=0 if jax.default_backend() == "cpu" else None,
    )
    cards = engine.find_cards()
    placements = None if cards is None else split_placements(config, cards)
    memory = [_device_memory()] * engine.cards
    plan = plan_memory(config, memory, wanted, placements=placements, compute=engine.compute)
    print(plan.table())
    sys.stdout.flush()


def _device_memory() -> int:
    """Bytes that the device can give: its own limit, or the host's memory where it is the CPU."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
