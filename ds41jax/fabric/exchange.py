"""The exchange inside a step: rows of a remote layer out, the sum of the partial planes back.

Two forms of one thing. `InProcess` is the definition: every rank's slice computed here, in the
order in which the real one adds them. `Remote` reaches worker processes through two calls of the
native library, between which the step goes on.

Letters: T rows, D hidden size, K experts a row.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds41jax.fabric.library import native
from ds41jax.fabric.owners import balanced_owners, fixed_owners
from ds41jax.fabric.topology import Placement
from ds41jax.formats import Format, QuantizedArray, decode, encode
from ds41jax.kernels.cards import AXIS, sum_of_cards
from ds41jax.kernels.compute import Compute, Phase
from ds41jax.kernels.experts import routed_experts

DECODE_ROWS, PREFILL_ROWS = 1, 2  # a frame's source kinds


def unpack_rows(codes: jax.Array, scales: jax.Array, compute: Compute) -> jax.Array:
    """Rows as a worker sees them: FP8 codes and scales back in the activation dtype, exact."""
    values = decode(QuantizedArray(codes, scales, format=Format.FP8_GROUP))
    return jnp.asarray(values, compute.dtype)


def partial_sum(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[QuantizedArray, QuantizedArray, QuantizedArray],
    limit: float,
    compute: Compute,
) -> jax.Array:
    """A rank's answer, [T, D]: its columns of its experts, summed in float32, rounded once.

    `ids` is -1 where another group owns the choice.
    """
    total = routed_experts(x, ids, weights, matrices, limit, compute, rounded=False, sparse=True)
    return compute.round(total)


@dataclass(frozen=True)
class InProcess:
    """Every rank computed here, from the whole weights: what any real deployment must equal.

    Attributes:
      placement: which layers count as remote, and how they are split.
      alive: groups that are up; None for all.
    """

    placement: Placement
    alive: tuple[int, ...] | None = None
    holds_experts = True

    @property
    def first_layer(self) -> int:
        return self.placement.first_layer

    def send(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        layer: jax.Array | int,
        live: jax.Array,
        fault: jax.Array,
        compute: Compute,
    ) -> Any:
        """Keeps what `wait` needs. See `Remote.send`."""
        return encode(x, Format.FP8_GROUP), ids, weights, layer, live, fault

    def wait(
        self, ticket: Any, meanwhile: tuple[Any, ...], experts: Any, limit: float, compute: Compute
    ) -> tuple[jax.Array, jax.Array]:
        """See `Remote.wait`."""
        rows, ids, weights, layer, live, fault = ticket
        topology, placement = self.placement.topology, self.placement
        x = unpack_rows(rows.codes, rows.scales, compute)
        groups, owners = self.groups, self.owners(ids, live, layer)
        planes = []
        for rank in range(topology.ranks):
            group = topology.group(rank)
            if group in groups:
                own = jnp.where((owners[ids] == group) & live[:, None], ids, -1)
                columns = slices(experts, topology.columns(rank, placement.width))
                plane = partial_sum(x, own, weights, columns, limit, compute)
                planes.append(plane.astype(jnp.float32))
        total = sum(planes[1:], planes[0])
        return jnp.where(live[:, None], total, 0.0), fault

    def describe(self, fault: int) -> str:
        """Faults here are those that were handed in."""
        return f"fault {fault}"

    @property
    def groups(self) -> tuple[int, ...]:
        """Those that are up, ascending."""
        return tuple(range(self.placement.topology.ep)) if self.alive is None else self.alive

    def owners(self, ids: jax.Array, live: jax.Array, layer: jax.Array | int) -> jax.Array:
        """[experts] int32 group that computes each; see `balanced_owners`."""
        if self.placement.owners == "fixed":
            return fixed_owners(self.placement.experts, self.groups)
        return balanced_owners(ids, live, layer, self.placement.experts, self.groups)


def slices(experts: Any, columns: slice) -> tuple[Any, Any, Any]:
    """Gate, down and up of some columns of every expert; slices are whole groups of a scale."""

    def rows(w: QuantizedArray) -> QuantizedArray:
        return w.map(lambda x: x[..., columns, :])

    down = experts.w2
    pairs = slice(columns.start // 2, columns.stop // 2)
    groups = slice(columns.start // 32, columns.stop // 32)
    down = dataclasses.replace(down, codes=down.codes[..., pairs], scales=down.scales[..., groups])
    return rows(experts.w1), down, rows(experts.w3)


@dataclass(frozen=True)
class Remote:
    """The exchange of a step whose experts are in other processes.

    Of several cards the first one speaks with them: the others send no rows, sum zeros, and get
    what the first one got.

    Attributes:
      placement: which layers are remote.
      session: place of the open coordinator in the native library.
    """

    placement: Placement
    session: int
    holds_experts = False

    @property
    def first_layer(self) -> int:
        return self.placement.first_layer

    def send(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        layer: jax.Array | int,
        live: jax.Array,
        fault: jax.Array,
        compute: Compute,
    ) -> Any:
        """Sends rows to every rank and returns at once.

        Args:
          x: [T, D] normalised inputs of a layer's experts.
          ids, weights: [T, K] int32 and float32 choices.
          layer: of the model.
          live: [T] bool; padding rows, which come last, are not sent.
          fault: int32 scalar; nothing is sent if it is not 0.

        Returns:
          What `wait` takes.
        """
        rows = encode(x, Format.FP8_GROUP)
        count = jnp.sum(live.astype(jnp.int32))
        if compute.cards is not None:
            count = jnp.where(lax.axis_index(AXIS) == 0, count, 0)
        numbers = jnp.stack([jnp.asarray(layer, jnp.int32), count, fault])
        source = PREFILL_ROWS if compute.phase is Phase.PREFILL else DECODE_ROWS
        call = jax.ffi.ffi_call(
            "ds41jax_expert_send", jax.ShapeDtypeStruct((2,), jnp.uint32), has_side_effect=True
        )
        codes = jax.lax.bitcast_convert_type(rows.codes, jnp.uint8)
        attributes = {"session": np.int32(self.session), "source": np.int32(source)}
        ticket = call(codes, rows.scales, ids, weights, numbers, **attributes)
        return ticket, count

    def wait(
        self, ticket: Any, meanwhile: tuple[Any, ...], experts: Any, limit: float, compute: Compute
    ) -> tuple[jax.Array, jax.Array]:
        """Waits for the ranks' planes and adds them in rank order.

        Args:
          ticket: from `send`.
          meanwhile: computed before this waits; an array [T, D] first, then any.

        Returns:
          [T, D] float32 sums, and the fault: 0, or the number of what went wrong, with zeros.
        """
        number, count = ticket
        shapes = (
            jax.ShapeDtypeStruct(meanwhile[0].shape, jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        call = jax.ffi.ffi_call("ds41jax_expert_wait", shapes, has_side_effect=True)
        before = jax.tree.leaves(meanwhile)
        sums, fault = call(number, count, *before, session=np.int32(self.session))
        if compute.cards is not None:
            sums, fault = sum_of_cards(sums), lax.pmax(fault, AXIS)
        return sums, fault

    def describe(self, fault: int) -> str:
        """Which workers failed, and how."""
        return native().text("fault", self.session, fault)
