"""What a host can tell about itself before a worker is started there, and a guard of its memory."""

import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ds41jax
from ds41jax.config import load_config
from ds41jax.fabric.identity import model_revision
from ds41jax.fabric.topology import Placement

MEMINFO = Path("/proc/meminfo")
INFINIBAND = Path("/sys/class/infiniband")
GUARD_SECONDS = 1.0
FP4_BITS = 4.25  # a code and its share of a scale


@dataclass(frozen=True)
class HostReport:
    """What `launch` compares before it starts anything.

    Attributes:
      engine, model: versions; see `handshake.Identity`.
      available: bytes of memory that programs can get; needed: that the slice takes.
      port_free: whether the port can be listened on.
      rdma_ports: active RoCE and InfiniBand ports, as UCX_NET_DEVICES names them.
    """

    engine: str
    model: str
    available: int
    needed: int
    port_free: bool
    rdma_ports: tuple[str, ...]


def available_memory(meminfo: Path = MEMINFO) -> int:
    """MemAvailable in bytes.

    On hosts whose GPU shares the memory, clean pages of files count as used by the device: drop
    them before a start (`echo 1 > /proc/sys/vm/drop_caches`).
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{meminfo} has no MemAvailable line")
    return int(found[1]) * 1024


def active_rdma_ports(root: Path = INFINIBAND) -> tuple[str, ...]:
    """Ports whose link is up, such as ("rocep1s0f0:1",)."""
    ports = []
    for state in sorted(root.glob("*/ports/*/state")):
        if state.read_text().strip().endswith("ACTIVE"):
            ports.append(f"{state.parts[-4]}:{state.parts[-2]}")
    return tuple(ports)


def slice_bytes(placement: Placement) -> int:
    """Bytes of one rank's experts, as the checkpoint stores them."""
    layers = placement.layers - placement.first_layer
    values = 3 * placement.hidden * placement.width // placement.topology.tp
    return int(layers * placement.experts * values * FP4_BITS / 8)


def port_is_free(host: str, port: int) -> bool:
    """Whether a worker could listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def host_report(path: Path, placement: Placement, host: str, port: int) -> HostReport:
    """Of this host."""
    return HostReport(
        engine=ds41jax.__version__,
        model=model_revision(path, load_config(path)),
        available=available_memory(),
        needed=slice_bytes(placement),
        port_free=port_is_free(host, port),
        rdma_ports=active_rdma_ports(),
    )


class MemoryGuard:
    """Calls `stop` once when the host's available memory falls below `least` bytes."""

    def __init__(self, least: int, stop: Callable[[], None], meminfo: Path = MEMINFO):
        self.tripped = False
        self._least, self._stop, self._meminfo = least, stop, meminfo

    def start(self, every: float = GUARD_SECONDS) -> None:
        """Looks every `every` seconds, on a thread that ends with the process."""
        threading.Thread(target=self._watch, args=(every,), daemon=True).start()

    def _watch(self, every: float) -> None:
        pause = threading.Event()
        while available_memory(self._meminfo) >= self._least:
            pause.wait(every)
        self.tripped = True
        self._stop()
