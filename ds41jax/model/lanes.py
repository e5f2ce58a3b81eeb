"""Two lanes: while the experts of one half of a step's rows are away, the other half computes.

The first lane enters a layer, and once its rows are in the caches and its experts on their way, the
second lane enters; before the first goes on to the next layer it waits for its experts, and so in
turn. Rows that follow others of their sequence are in the later lane, which reads what the earlier
one wrote in that layer: a prompt's chunk passes the layers as a wavefront, and every row equals
the one of an undivided step.

Letters: T rows of a step, C = T / 2 rows of a lane.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute
from ds41jax.model.block import Middle, second_half
from ds41jax.model.indexer import Selection
from ds41jax.model.moe import ExpertsAway, await_experts, send_experts
from ds41jax.model.params import Params
from ds41jax.model.state import KVState, StepBatch
from ds41jax.model.tensors import at_layer
from ds41jax.model.text_layer import Carry, Index, enter_layer

FEWEST_ROWS = 16  # of a step that is divided; fewer are computed in one tile anyhow

T = TypeVar("T")


@struct.dataclass
class Between:
    """Rows [C, ...] of a lane between two layers: a `Carry` without the caches, which all share."""

    stream: jax.Array
    pre: jax.Array
    selection: Selection
    taps: jax.Array


@struct.dataclass
class Inside:
    """Rows of a lane whose experts of a layer are away.

    Attributes:
      layer: int32 scalar.
    """

    middle: Middle
    away: ExpertsAway
    selection: Selection
    taps: jax.Array
    layer: jax.Array


def divides(batch: StepBatch, compute: Compute) -> bool:
    """Whether a step's rows go in two lanes."""
    rows = batch.positions.shape[0]
    return compute.lanes == 2 and rows >= FEWEST_ROWS and rows % 2 == 0


def run_lanes(
    carry: Carry,
    first: int,
    last: int,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> Carry:
    """Runs layers first to last - 1, all of them with remote experts, in two lanes."""
    border = (jnp.sum(batch.is_row, dtype=jnp.int32) + 1) // 2
    batches = divide_batch(batch, border)
    whole = Between(carry.stream, carry.pre, carry.selection, carry.taps)
    parts = divide(whole, border)

    def enter(part: Between, state: KVState, index: Index, side: int) -> tuple[Inside, KVState]:
        mine, number = batches[side], jnp.asarray(index, jnp.int32)
        carry = Carry(part.stream, part.pre, state, part.selection, part.taps)
        middle, carry = enter_layer(carry, index, params, mine, config, compute)
        weights = at_layer(params.layers.ffn, index, in_place=compute.on_gpu)
        masks, fault = (mine.is_image, mine.is_row), fault_of(carry.state)
        away = send_experts(middle.x, *masks, number, fault, weights, config, compute)
        return Inside(middle, away, carry.selection, carry.taps, number), carry.state

    def leave(lane: Inside, state: KVState, other: Inside) -> tuple[Between, KVState]:
        experts = at_layer(params.layers.ffn.experts, lane.layer)
        output, fault = await_experts(lane.away, (other.away,), experts, config, compute)
        first_fault = jnp.where(fault_of(state) != 0, fault_of(state), fault)
        stream, pre = second_half(output, lane.middle, compute)
        ended = Between(stream, pre, lane.selection, lane.taps)
        return ended, dataclasses.replace(state, fault=first_fault)

    def turn(index: Index, both: tuple[Inside, Inside, KVState]) -> tuple[Inside, Inside, KVState]:
        early, late, state = both
        part, state = leave(early, state, late)
        early, state = enter(part, state, index, 0)
        part, state = leave(late, state, early)
        late, state = enter(part, state, index, 1)
        return early, late, state

    early, state = enter(parts[0], carry.state, first, 0)
    late, state = enter(parts[1], state, first, 1)
    both = early, late, state
    if compute.on_gpu:
        for index in range(first + 1, last):
            both = turn(index, both)
    else:
        both = lax.fori_loop(first + 1, last, turn, both)
    early, late, state = both
    ended, state = leave(early, state, late)
    other, state = leave(late, state, early)
    rows = join(whole, ended, other, border)
    return Carry(rows.stream, rows.pre, state, rows.selection, rows.taps)


def fault_of(state: KVState) -> jax.Array:
    """The step's fault so far; there is one wherever experts are remote."""
    assert state.fault is not None
    return state.fault


def divide_batch(batch: StepBatch, border: jax.Array) -> tuple[StepBatch, StepBatch]:
    """The rows before the traced number `border`, at most C, and those after, as steps [C]."""
    per_row = ("token_ids", "positions", "sequences", "is_image", "image_embeds", "engram")
    rows: dict[str, Any] = {name: getattr(batch, name) for name in per_row}
    early, late = divide(rows, border)
    capacity, nobody = early["positions"].shape[0], batch.starts.shape[0]
    early["sequences"] = jnp.where(jnp.arange(capacity) < border, early["sequences"], nobody)
    # A sequence with rows in both ends here for the early lane, and starts here for the late one.
    shared, position = late["sequences"][0], late["positions"][0]
    ends = batch.ends.at[shared].set(position, mode="drop")
    starts = batch.starts.at[shared].set(position, mode="drop")
    early, late = early | {"ends": ends}, late | {"starts": starts}
    return dataclasses.replace(batch, **early), dataclasses.replace(batch, **late)


def divide(rows: T, border: jax.Array) -> tuple[T, T]:
    """Leaves [T, ...] to [C, ...]: from 0 on, and from the traced row `border` on."""
    count = jax.tree.leaves(rows)[0].shape[0] // 2
    early = jax.tree.map(lambda x: x[:count], rows)
    late = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, border, count), rows)
    return early, late


def join(whole: T, early: T, late: T, border: jax.Array) -> T:
    """Undoes `divide`; where neither lane has rows, those of `whole` stay."""

    def place(whole: jax.Array, early: jax.Array, late: jax.Array) -> jax.Array:
        whole = lax.dynamic_update_slice_in_dim(whole, early.astype(whole.dtype), 0, 0)
        return lax.dynamic_update_slice_in_dim(whole, late.astype(whole.dtype), border, 0)

    placed: T = jax.tree.map(place, whole, early, late)
    return placed
