"""Which global rows a query attends to: index scores, candidate blocks, top-k. Ties: lowest index.

Letters: T queries, H index heads, D index width, N rows of a sequence, B blocks of rows, K
  selected.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.experimental import pallas as pl

from ds41jax.formats import QuantizedArray
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import dot


@struct.dataclass
class PagedKeys:
    """Index keys where they are stored.

    Attributes:
      pages: MXFP4 [P, rows, D]; table: [B, pages] int32 pages of each sequence, in order.
    """

    pages: QuantizedArray
    table: jax.Array


def index_scores(
    q: jax.Array, head_weights: jax.Array, keys: jax.Array, compute: Compute
) -> jax.Array:
    """Sum over heads of weight * relu(q . k) for one query, in the activation dtype's precision.

    Args:
      q: [H, D] quantised queries as values.
      head_weights: [H], already scaled, in the activation dtype.
      keys: [N, D] quantised keys as values.

    Returns:
      [N] float32 scores; products, weighted products and their sum are each rounded.
    """
    scores = compute.round(dot(q, keys)).astype(jnp.float32)
    weighted = jax.nn.relu(scores) * head_weights.astype(jnp.float32)[:, None]
    total = compute.round(weighted).astype(jnp.float32).sum(0)
    return compute.round(total).astype(jnp.float32) + 0.0  # -0 would lose its ties against +0


def candidate_blocks(
    scores: jax.Array, visible: jax.Array, top_blocks: int, block: int
) -> jax.Array:
    """Blocks of rows that later index sources may choose within (one query).

    Args:
      scores: [N] scores, -inf where not visible.
      visible: scalar number of visible rows.
      top_blocks: blocks kept; the block of the newest visible row is always among them.
      block: rows a block.

    Returns:
      [ceil(N / block)] bool.
    """
    padded = jnp.pad(scores, (0, -scores.shape[0] % block), constant_values=-jnp.inf)
    best = padded.reshape(-1, block).max(-1)
    newest = (visible - 1) // block
    best = jnp.where(jnp.arange(best.shape[0]) == newest, jnp.inf, best)
    top, index = lax.top_k(best, min(top_blocks, best.shape[0]))
    return jnp.zeros(best.shape, bool).at[index].set(top > -jnp.inf)


def top_rows(scores: jax.Array, k: int) -> jax.Array:
    """The k best rows of scores [N] above -inf, ascending, then -1; ties go to the lowest index."""
    n = scores.shape[0]
    top, index = lax.top_k(scores, min(k, n))
    ascending = jnp.sort(jnp.where(top > -jnp.inf, index, n))
    return jnp.pad(
        jnp.where(ascending < n, ascending, -1), (0, k - len(ascending)), constant_values=-1
    )


def index_floor(queries: int, visible: int, heads: int, d: int) -> tuple[int, int]:
    """(bytes, FLOPs) of scoring `visible` keys for each of the queries, each with keys its own."""
    return queries * visible * (d * 17 // 32 + 4), 2 * queries * visible * heads * d


def paged_index_scores(
    q: jax.Array,
    head_weights: jax.Array,
    keys: PagedKeys,
    sequences: jax.Array,
    visible: jax.Array,
    compute: Compute,
) -> jax.Array:
    """`index_scores` of every query over its sequence's pages, by the kernel.

    Args:
      q: [T, H, D] quantised queries as values; head_weights: [T, H].
      sequences: [T] int32; visible: [T] int32 rows that a query sees.

    Returns:
      [T, N] float32 scores, -inf where not visible.
    """
    t, heads, d = q.shape
    pages, rows = keys.table.shape[1], keys.pages.shape[1]
    padded = max(16, pl.next_power_of_2(heads))
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, padded - heads), (0, 0)))
    weights = jnp.pad(head_weights.astype(jnp.float32), ((0, 0), (0, padded - heads)))
    kernel = functools.partial(_score_kernel, rows=rows, lanes=d // 4, compute=compute)
    out = jax.ShapeDtypeStruct((t, pages * rows), jnp.float32)
    run = gpu.call(kernel, compute, (pages, t), out, warps=4, stages=1, name="index_scores")
    codes, scales = gpu.lanes(keys.pages.codes), keys.pages.scales
    return run(gpu.planes(q, 4), weights, sequences, visible, keys.table, codes, scales)


def _score_kernel(
    q_ref: Any,  # [T, H, 4, D / 4]
    weights_ref: Any,  # [T, H]
    sequences_ref: Any,
    visible_ref: Any,
    table_ref: Any,  # [B, pages]
    codes_ref: Any,  # [P, rows, D / 4]
    scales_ref: Any,  # [P, rows, D / 32]
    out_ref: Any,  # [T, N]
    *,
    rows: int,
    lanes: int,
    compute: Compute,
) -> None:
    place, query = pl.program_id(0), pl.program_id(1)
    first = place * rows
    visible = visible_ref[query]
    here = pl.ds(first, rows)

    @pl.when(first >= visible)
    def _() -> None:
        out_ref[query, here] = jnp.full(rows, -jnp.inf, jnp.float32)

    @pl.when(first < visible)
    def _() -> None:
        page = table_ref[sequences_ref[query], place]
        factors = gpu.expand(gpu.e8m0_factor(scales_ref[page, :, :], 126), 8)
        planes = gpu.decode_e2m1_lanes(codes_ref[page, :, :], factors, compute)
        parts = [gpu.dot(q_ref[query, :, j, :], planes[j].T) for j in range(4)]
        scores = gpu.rounded(sum(parts[1:], parts[0]) * 2.0**gpu.SCALE_SHIFT, compute)
        weighted = jnp.maximum(scores, 0.0) * weights_ref[query, :][:, None]
        total = jnp.sum(gpu.rounded(weighted, compute), axis=0)
        total = gpu.rounded(total, compute) + 0.0  # -0 would lose its ties against +0
        seen = first + jnp.arange(rows) < visible
        out_ref[query, here] = jnp.where(seen, total, -jnp.inf)
