"""`ds41jax worker`: one rank's experts, served until a signal ends it."""

import argparse
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax

from ds41jax.config import load_config
from ds41jax.fabric.handshake import parse_endpoint
from ds41jax.fabric.host import MemoryGuard, host_report
from ds41jax.fabric.topology import OWNERS, TOPOLOGIES, find_topology, make_placement
from ds41jax.fabric.worker import Worker
from ds41jax.kernels.compute import Compute, Kernels
from ds41jax.plan_command import size_in_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(sorted(TOPOLOGIES))
    parser.add_argument("--model", metavar="DIR", required=True, type=Path)
    parser.add_argument("--topology", required=True, metavar="NAME", help=f"one of {names}")
    parser.add_argument("--rank", required=True, type=int, metavar="R", help="counted from 0")
    parser.add_argument(
        "--first-layer", type=int, default=0, metavar="N", help="layers below are the coordinator's"
    )
    parser.add_argument("--owners", choices=OWNERS, default="balanced")
    parser.add_argument(
        "--listen", default="0.0.0.0:7341", metavar="HOST:PORT", help="port 0 for any free one"
    )
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="of the largest step")
    parser.add_argument(
        "--transports", metavar="LIST", help="UCX_TLS, for example rc,tcp,self; UCX's choice if not"
    )
    parser.add_argument(
        "--memory-guard",
        type=size_in_bytes,
        default=0,
        metavar="SIZE",
        help="end when the host's available memory falls below, such as 1GiB: on unified memory",
    )
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="end when standard input does: over SSH"
    )
    parser.add_argument(
        "--check", action="store_true", help="print what is known of this host as JSON, then end"
    )
    parser.add_argument("--spin", action="store_true", help="poll without sleeping: takes a core")


def run(args: argparse.Namespace) -> int:
    """Loads, says that it is ready, serves; the first SIGTERM or SIGINT ends it."""
    config = load_config(args.model)
    placement = make_placement(config, find_topology(args.topology), args.first_layer, args.owners)
    host, port = parse_endpoint(args.listen)
    if args.check:
        print(json.dumps(asdict(host_report(args.model, placement, host, port))))
        return 0
    on_gpu = jax.default_backend() == "gpu"
    # Bound before anything is loaded, so that a taken port costs no time.
    with socket.create_server((host, port)) as listener:
        worker = Worker(
            args.model,
            placement,
            args.rank,
            args.rows,
            transports=args.transports,
            spin=args.spin,
            compute=Compute(kernels=Kernels.PALLAS if on_gpu else Kernels.JNP),
            progress=True,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        guard = MemoryGuard(args.memory_guard, worker.stop)
        if args.memory_guard:
            guard.start()
        if args.stop_with_stdin:
            threading.Thread(target=_stop_at_end, args=(worker.stop,), daemon=True).start()
        bound = listener.getsockname()[1]
        print(
            f"Ready: rank {args.rank} of {placement.topology.name}, layers {placement.first_layer} "
            f"to {placement.layers - 1}, at {host}:{bound}, process {os.getpid()}",
            flush=True,
        )
        answered, refused, why = worker.run(listener)
    print(f"Answered {answered} frames" + (f", refused {refused}: {why}" if refused else ""))
    if guard.tripped:
        print(f"ended: less than {args.memory_guard} bytes of memory were left", file=sys.stderr)
        return 3
    return 0


def _stop_at_end(stop: Callable[[], None]) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    stop()
