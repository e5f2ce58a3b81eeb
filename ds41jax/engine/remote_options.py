"""The options by which a server reaches expert workers, and the fabric that follows from them."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds41jax.config import ModelConfig
from ds41jax.engine.options import EngineOptions
from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.topology import OWNERS, TOPOLOGIES, Placement, find_topology, make_placement

READY_SECONDS = 600.0  # a worker may still be loading


@dataclass(frozen=True)
class RemoteExperts:
    """Where the routed experts are that are not here."""

    placement: Placement
    workers: tuple[str, ...]
    options: FabricOptions

    @property
    def summary(self) -> str:
        """One line for people."""
        place = self.placement
        return (
            f"layers {place.first_layer} to {place.layers - 1} at {len(self.workers)} workers, "
            f"{place.topology.name}"
        )


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares the options."""
    add = group.add_argument
    names = ", ".join(sorted(TOPOLOGIES))
    add(
        "--expert-worker",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="again for every rank, in order; none: all experts are here",
    )
    add("--expert-topology", metavar="NAME", help=f"of the workers: one of {names}")
    add(
        "--expert-first-layer",
        type=int,
        default=0,
        metavar="N",
        help="experts of the layers below are here",
    )
    add("--expert-owners", choices=OWNERS, default="balanced")
    add("--expert-deadline", type=float, default=10.0, metavar="S", help="of a layer's exchange")
    add("--expert-transports", metavar="LIST", help="UCX_TLS; UCX's own choice if left out")
    add(
        "--expert-lanes",
        type=int,
        choices=(1, 2),
        default=2,
        help="2: one half of a step's rows is computed while the other half's experts are away",
    )
    add("--expert-spin", action=argparse.BooleanOptionalAction, default=False)


def remote_experts(
    args: argparse.Namespace, config: ModelConfig, engine: EngineOptions
) -> RemoteExperts | None:
    """What the options ask for; None without workers.

    Raises:
      ValueError: naming the option that does not fit.
    """
    if not args.expert_worker:
        if args.expert_topology:
            raise ValueError("--expert-topology needs an --expert-worker for every rank")
        return None
    if args.expert_topology is None:
        raise ValueError("--expert-worker needs --expert-topology")
    topology = find_topology(args.expert_topology)
    if len(args.expert_worker) != topology.ranks:
        raise ValueError(
            f"--expert-topology {topology.name} needs {topology.ranks} of --expert-worker, not "
            f"{len(args.expert_worker)}"
        )
    block = config.dspark_block_size if engine.dspark else 0
    options = FabricOptions(
        rows=max(engine.prefill_chunk, engine.max_active * (1 + block)),
        deadline=args.expert_deadline,
        transports=args.expert_transports,
        spin=args.expert_spin,
        lanes=args.expert_lanes,
    )
    first, owners = args.expert_first_layer, args.expert_owners
    placement = make_placement(config, topology, first, owners)
    return RemoteExperts(placement, tuple(args.expert_worker), options)


@contextlib.contextmanager
def open_fabric(
    folder: Path, remote: RemoteExperts | None, engine: EngineOptions
) -> Iterator[tuple[EngineOptions, Fabric | None]]:
    """Begins to connect, and gives the engine's options that use the fabric.

    Raises:
      FabricError: if UCX or a compiler is missing.
    """
    if remote is None:
        yield engine, None
        return
    with Fabric(folder, remote.placement, remote.workers, remote.options) as fabric:
        yield dataclasses.replace(engine, compute=fabric.compute(engine.compute)), fabric
