"""A worker: one rank's experts, and a compiled program that answers frames until none come.

The program itself receives, computes and sends, frame after frame, so no Python runs between
layers. Python only lets coordinators in, and picks the program of the size that the next frame has.
"""

import ctypes
import secrets
import socket
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ffi import ffi_call

import ds41jax
from ds41jax.config import ModelConfig, load_config
from ds41jax.fabric import handshake
from ds41jax.fabric.exchange import partial_sum, unpack_rows
from ds41jax.fabric.handshake import HandshakeError, Identity
from ds41jax.fabric.identity import model_revision
from ds41jax.fabric.library import FabricError, Geometry, WorkerOptions, native
from ds41jax.fabric.topology import ROW_LIMIT, Placement
from ds41jax.fabric.weights import load_slice
from ds41jax.kernels.compute import Compute
from ds41jax.model.moe import ExpertWeights
from ds41jax.model.tensors import at_layer

ROW_BUCKETS = (8, 64, 512, ROW_LIMIT)
LINGER_MS = 20  # a program waits so long for another frame before Python looks around
IDLE_MS = 100
CONTROL_SECONDS = 15.0  # of silence, after which a coordinator counts as gone


def make_geometry(placement: Placement, rows: int) -> Geometry:
    """What frames of a placement look like to the native library."""
    return Geometry(
        hidden=placement.hidden,
        experts=placement.experts,
        choices=placement.choices,
        groups=placement.topology.ep,
        first_layer=placement.first_layer,
        last_layer=placement.layers,
        capacity=rows,
        placement=placement.version,
    )


@dataclass(frozen=True)
class FrameShape:
    """What a program of a worker is compiled for.

    Attributes:
      above, rows: it takes frames of more than `above` and at most `rows` rows.
    """

    session: int
    above: int
    rows: int


@partial(jax.jit, static_argnames=("shape", "placement", "limit", "compute"))
def answer_frames(
    weights: ExpertWeights, shape: FrameShape, placement: Placement, limit: float, compute: Compute
) -> jax.Array:
    """Answers frames until none of this size comes within `LINGER_MS`.

    Args:
      weights: this rank's stacks [layers, experts, ...] of the remote layers.
    """
    rows, d, k = shape.rows, placement.hidden, placement.choices
    frame = (
        jax.ShapeDtypeStruct((rows, d), jnp.uint8),
        jax.ShapeDtypeStruct((rows, d // 32), jnp.uint8),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    receive = ffi_call("ds41jax_expert_receive", frame, has_side_effect=True)
    done = jax.ShapeDtypeStruct((), jnp.int32)
    respond = ffi_call("ds41jax_expert_respond", done, has_side_effect=True)
    session = np.int32(shape.session)

    def turn(last: jax.Array) -> jax.Array:
        codes, scales, ids, routing, place_layer = receive(
            last, session=session, above=np.int32(shape.above), timeout_ms=np.int32(LINGER_MS)
        )
        x = unpack_rows(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scales, compute)
        mine = at_layer(weights, place_layer[1] - placement.first_layer)
        matrices = (mine.w1, mine.w2, mine.w3)
        plane = partial_sum(x, ids, routing, matrices, limit, compute)
        return respond(plane, place_layer, session=session)

    return lax.while_loop(lambda place: place > 0, turn, jnp.int32(1))


class Worker:
    """Serves one rank's experts until it is stopped."""

    def __init__(
        self,
        path: str | Path,
        placement: Placement,
        rank: int,
        rows: int = 256,
        *,
        transports: str | None = None,
        spin: bool = False,
        compute: Compute | None = None,
        progress: bool = False,
    ):
        """Loads the slice, opens the transport and compiles.

        Args:
          rows: of the largest frame, at most `topology.ROW_LIMIT`.
          transports: UCX_TLS; None for UCX's own choice.
          spin: poll without sleeping, for the lowest latency at the price of a core.

        Raises:
          ValueError, FabricError: saying what is wrong.
        """
        if not 1 <= rows <= ROW_LIMIT:
            raise ValueError(f"rows must be 1 to {ROW_LIMIT}, not {rows}")
        if not 0 <= rank < placement.topology.ranks:
            raise ValueError(f"rank must be 0 to {placement.topology.ranks - 1}, not {rank}")
        config = load_config(path)
        self.placement, self.rank, self.rows = placement, rank, rows
        self.compute = compute or Compute()
        self.limit = config.swiglu_limit
        self.identity = self._identity(path, config)
        self.weights = load_slice(path, config, placement, rank, progress=progress)
        self.library = native()
        topology = placement.topology
        options = WorkerOptions(
            geometry=make_geometry(placement, rows),
            group=topology.group(rank),
            executor=topology.executor + rank,
        )
        self.session = self.library.open_worker(options, transports, spin)
        if jax.local_devices()[0].platform == "gpu":
            self.library.call("open_staging", self.session, ctypes.byref(options.geometry))
        below = [0, *(b for b in ROW_BUCKETS if b < rows)]
        self.shapes = [
            FrameShape(self.session, above, size)
            for above, size in zip(below, [*below[1:], rows], strict=True)
        ]
        self._stopped = threading.Event()
        for shape in self.shapes:
            self._answer(shape)

    def _identity(self, path: str | Path, config: ModelConfig) -> Identity:
        return Identity(
            engine=ds41jax.__version__,
            model=model_revision(path, config),
            topology=self.placement.topology.name,
            placement=f"{self.placement.version:016x}",
            rank=self.rank,
        )

    def _answer(self, shape: FrameShape) -> None:
        answer_frames(
            self.weights, shape, self.placement, self.limit, self.compute
        ).block_until_ready()

    def run(self, listener: socket.socket) -> tuple[int, int, str]:
        """Answers frames on this thread, coordinators on others, until `stop`.

        Returns:
          Frames answered, frames refused, and why the last one was.
        """
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        try:
            while not self._stopped.is_set():
                rows = self.library.handle.ds41jax_next_rows(self.session, IDLE_MS)
                if rows:
                    self._answer(next(s for s in self.shapes if s.rows >= rows))
            return self.library.worker_counts(self.session)
        finally:
            listener.close()
            self.library.handle.ds41jax_close_staging(self.session)
            self.library.handle.ds41jax_close_worker(self.session)

    def stop(self) -> None:
        """Ends `run` soon; from any thread or a signal handler."""
        self._stopped.set()

    # ------------------------------------------------------------------ coordinators

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed: the worker stops
            threading.Thread(target=self._control, args=(connection,), daemon=True).start()

    def _control(self, connection: socket.socket) -> None:
        """Lets a coordinator in and keeps it while its connection lives."""
        peer = -1
        with connection:
            try:
                handshake.set_options(connection, CONTROL_SECONDS)
                peer = self._admit(connection)
                while not self._stopped.is_set() and handshake.read_line(connection) == b"ping":
                    connection.sendall(handshake.HEARTBEAT)
            except (HandshakeError, OSError):
                pass  # it left, or went silent: its frames go with it
            finally:
                if peer >= 0:
                    self.library.handle.ds41jax_dismiss(self.session, peer)

    def _admit(self, connection: socket.socket) -> int:
        try:
            message = handshake.read_message(connection)
            _, address = handshake.check_hello(message, self.identity, self.rows)
            token = secrets.randbits(63) | 1
            peer = self.library.call("admit", self.session, address, len(address), token)
        except (HandshakeError, FabricError) as error:
            handshake.send_line(connection, {"error": str(error)})
            raise HandshakeError(str(error)) from error
        answer: dict[str, Any] = handshake.reply(token, self.library.address(self.session, True))
        handshake.send_line(connection, answer)
        return peer
