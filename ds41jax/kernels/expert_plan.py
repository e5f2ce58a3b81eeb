"""Which pairs of a row and an expert share a program: blocks of pairs of one expert.

Letters: P pairs, E experts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute

BLOCK_ROWS = 16  # pairs of one expert that share its weights; the matrix unit's narrowest


def block_plan(expert_ids: jax.Array, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """Groups pairs by expert, in the pairs' order.

    Block p exists if pair p is the first, the 17th, ... of its expert: no sort, no atomics, and a
    program that finds no block ends at once.

    Args:
      expert_ids: [P] int32.

    Returns:
      The expert of each block [P], -1 where there is none, and its pairs [P, BLOCK_ROWS], P where
      there is none.
    """
    pairs = expert_ids.shape[0]
    width = max(16, pl.next_power_of_2(pairs))
    shapes = (
        jax.ShapeDtypeStruct((pairs,), jnp.int32),
        jax.ShapeDtypeStruct((pairs, BLOCK_ROWS), jnp.int32),
    )
    kernel = functools.partial(_plan_kernel, pairs=pairs, width=width)
    return tuple(gpu.call(kernel, compute, (pairs,), shapes, name="expert_plan")(expert_ids))


def sorted_plan(
    expert_ids: jax.Array, experts: int, block_rows: int
) -> tuple[jax.Array, jax.Array]:
    """`block_plan` for many pairs, by sorting: blocks of `block_rows`, as many as there can be."""
    pairs = expert_ids.shape[0]
    blocks = min(pairs, experts) + pairs // block_rows
    order = jnp.argsort(jnp.where(expert_ids < 0, experts, expert_ids), stable=True)
    ids = expert_ids[order]
    counts = jnp.zeros(experts, jnp.int32).at[ids].add(1, mode="drop", wrap_negative_indices=False)
    first = jnp.cumsum(counts) - counts
    blocks_of = -(-counts // block_rows)
    start = jnp.cumsum(blocks_of) - blocks_of
    rank = jnp.arange(pairs) - first[ids]
    block = jnp.where(ids < 0, blocks, start[ids] + rank // block_rows)
    rows = jnp.full((blocks, block_rows), pairs, jnp.int32)
    rows = rows.at[block, rank % block_rows].set(order.astype(jnp.int32), mode="drop")
    return jnp.full(blocks, -1, jnp.int32).at[block].set(ids, mode="drop"), rows


def _plan_kernel(ids_ref: Any, expert_ref: Any, rows_ref: Any, *, pairs: int, width: int) -> None:
    pair = pl.program_id(0)
    lane = jnp.arange(width)
    ids = triton.load(ids_ref.at[lane], mask=lane < pairs, other=-1)
    expert = ids_ref[pair]
    same = ids == expert
    rank = jnp.sum((same & (lane < pair)).astype(jnp.int32))
    leads = (rank % BLOCK_ROWS == 0) & (expert >= 0)
    expert_ref[pair] = jnp.where(leads, expert, -1)
    order = jnp.cumsum(same.astype(jnp.int32)) - 1 - rank
    place = jnp.arange(BLOCK_ROWS)[:, None] == order[None, :]
    mine = place & same[None, :]
    rows_ref[pair, :] = jnp.min(jnp.where(mine, lane[None, :], pairs), axis=1)
