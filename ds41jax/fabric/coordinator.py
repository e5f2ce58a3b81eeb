"""The coordinator's end: workers connected, watched, and connected again."""

import dataclasses
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import jax
import numpy as np

import ds41jax
from ds41jax.config import load_config
from ds41jax.fabric import handshake
from ds41jax.fabric.cuda import open_mailboxes
from ds41jax.fabric.exchange import Remote
from ds41jax.fabric.handshake import HandshakeError, Hello, Identity
from ds41jax.fabric.identity import model_revision
from ds41jax.fabric.library import CoordinatorOptions, FabricError, native
from ds41jax.fabric.topology import ROW_LIMIT, Placement
from ds41jax.fabric.worker import make_geometry
from ds41jax.kernels.compute import Compute

RETRY_SECONDS = 0.5
HEARTBEAT_SECONDS = 1.0
UNREACHABLE = "unreachable"  # in UCX's own words, though the handshake's socket got there
ROUTES = " (UCX reads the routes once a process: restart this one if that network came up since)"


@dataclass(frozen=True)
class FabricOptions:
    """How a coordinator speaks to its workers.

    Attributes:
      rows: of the largest step.
      deadline: seconds that one layer's exchange may take.
      transports: UCX_TLS, for example "tcp" or "sm,self"; None for UCX's own choice.
      spin: poll without sleeping, for the lowest latency at the price of a core.
      checksum: a CRC of every frame.
      control_seconds: bound of every wait on a control connection.
      lanes: 2 to compute one half of a step's rows while the other half's experts are away.
    """

    rows: int = 256
    deadline: float = 10.0
    transports: str | None = None
    spin: bool = False
    checksum: bool = False
    control_seconds: float = 10.0
    lanes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= ROW_LIMIT:
            raise ValueError(f"rows must be 1 to {ROW_LIMIT}, not {self.rows}")
        if not 0 < self.deadline <= 3600:
            raise ValueError(f"deadline must be above 0 and at most 3600, not {self.deadline}")


class Fabric:
    """Remote experts of one model."""

    def __init__(
        self,
        path: str | Path,
        placement: Placement,
        workers: Sequence[str],
        options: FabricOptions | None = None,
    ):
        """Opens the transport and begins to connect; `wait_ready` tells when all ranks are there.

        Args:
          path: the checkpoint's folder, for its identity.
          workers: "HOST:PORT" of every rank, in order.

        Raises:
          ValueError: if the number of workers is not the topology's.
          FabricError: if UCX or a compiler is missing.
        """
        topology = placement.topology
        if len(workers) != topology.ranks:
            raise ValueError(f"{topology.name} has {topology.ranks} workers, not {len(workers)}")
        self.endpoints = [handshake.parse_endpoint(worker) for worker in workers]
        self.placement, self.options = placement, options or FabricOptions()
        self._model = model_revision(path, load_config(path))
        self.library = native()
        native_options = CoordinatorOptions(
            geometry=make_geometry(placement, self.options.rows),
            ranks=topology.ranks,
            executor=topology.executor,
            balanced=placement.owners == "balanced",
            checksum=self.options.checksum,
            deadline_ms=max(1, round(self.options.deadline * 1000)),
        )
        self.session = self.library.open_coordinator(
            native_options, self.options.transports, self.options.spin
        )
        device = jax.local_devices()[0]
        if device.platform == "gpu":
            architecture = str(device.compute_capability).replace(".", "")
            open_mailboxes(self.library, self.session, native_options, architecture)
        self._address = self.library.address(self.session, False)
        self._closed = threading.Event()
        self._troubles = [""] * topology.ranks
        self._threads = [
            threading.Thread(target=self._keep, args=(rank,), name=f"fabric-{rank}", daemon=True)
            for rank in range(topology.ranks)
        ]
        for thread in self._threads:
            thread.start()

    def compute(self, compute: Compute | None = None) -> Compute:
        """What steps of the model must be given so that remote layers come here."""
        exchange = Remote(self.placement, self.session)
        lanes = self.options.lanes
        return dataclasses.replace(compute or Compute(), exchange=exchange, lanes=lanes)

    def up(self, rank: int) -> bool:
        """Whether a worker is connected and proven."""
        return bool(self.library.handle.ds41jax_up(self.session, rank))

    def wait_ready(self, seconds: float = 120.0) -> None:
        """Waits until every rank is up.

        Raises:
          FabricError: naming the ranks that are not, and why.
        """
        until = monotonic() + seconds
        ranks = range(self.placement.topology.ranks)
        while not all(map(self.up, ranks)):
            if monotonic() > until:
                raise FabricError(
                    f"not every worker is there after {seconds:g} s:\n{self.report()}"
                )
            self._closed.wait(0.02)

    def report(self) -> str:
        """One line a rank: where it is, and whether it is up or why not."""
        lines = []
        for rank, (host, port) in enumerate(self.endpoints):
            trouble = self._troubles[rank] or self._down_reason(rank)
            lines.append(f"  rank {rank} at {host}:{port}: {'up' if self.up(rank) else trouble}")
        return "\n".join(lines)

    def _down_reason(self, rank: int) -> str:
        return self.library.text("down_reason", self.session, rank)

    @property
    def takeovers(self) -> int:
        """Exchanges that surviving groups finished for a group that was lost."""
        return int(self.library.handle.ds41jax_takeovers(self.session))

    def timeline(self) -> np.ndarray:
        """When the last exchanges were sent, awaited and summed; see `Library.timeline`."""
        return self.library.timeline(self.session, False)

    def close(self) -> None:
        """Leaves every worker. Does nothing the second time."""
        if self._closed.is_set():
            return
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self.library.handle.ds41jax_close_mailboxes(self.session)
        self.library.handle.ds41jax_close_coordinator(self.session)

    def __enter__(self) -> "Fabric":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ one rank

    def _keep(self, rank: int) -> None:
        """Connects a rank, watches it, and begins again whenever it is lost."""
        while not self._closed.is_set():
            try:
                self._visit(rank)
            except (HandshakeError, FabricError, OSError) as error:
                self._troubles[rank] = str(error) or type(error).__name__
                if UNREACHABLE in self._troubles[rank]:
                    self._troubles[rank] += ROUTES
                reason = f"{self._troubles[rank]}".encode()
                self.library.handle.ds41jax_detach(self.session, rank, reason)
            self._closed.wait(RETRY_SECONDS)

    def _visit(self, rank: int) -> None:
        seconds = self.options.control_seconds
        with socket.create_connection(self.endpoints[rank], timeout=seconds) as connection:
            handshake.set_options(connection, seconds)
            hello = Hello(self._identity(rank), self.options.rows, self._address)
            handshake.send_line(connection, hello.to_json())
            token, address = handshake.check_reply(handshake.read_message(connection))
            self.library.call("attach", self.session, rank, address, len(address), token)
            self._troubles[rank] = ""
            while not self._closed.wait(HEARTBEAT_SECONDS):
                if not self.up(rank):
                    raise FabricError(self._down_reason(rank))
                connection.sendall(handshake.HEARTBEAT)
                if handshake.read_line(connection) != b"ping":
                    raise HandshakeError("no heartbeat, but something else")

    def _identity(self, rank: int) -> Identity:
        return Identity(
            engine=ds41jax.__version__,
            model=self._model,
            topology=self.placement.topology.name,
            placement=f"{self.placement.version:016x}",
            rank=rank,
        )
