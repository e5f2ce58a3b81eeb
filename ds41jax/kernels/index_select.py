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
from jax.experimental.pallas import triton

from ds41jax.formats import QuantizedArray
from ds41jax.kernels import choices, gpu
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import dot

BELOW = -(1 << 16)  # under every key of a score


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
    t, heads, _ = q.shape
    pages, rows = keys.table.shape[1], keys.pages.shape[1]
    padded = max(16, pl.next_power_of_2(heads))
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, padded - heads), (0, 0)))
    weights = jnp.pad(head_weights.astype(jnp.float32), ((0, 0), (0, padded - heads)))
    sizes = choices.current()["index_scores"]
    tile = min(sizes["keys"], rows)
    kernel = functools.partial(_score_kernel, rows=rows, tile=tile, compute=compute)
    out = jax.ShapeDtypeStruct((t, pages * rows), jnp.float32)
    grid = (pages * rows // tile, t)
    warps, stages = sizes["warps"], sizes["stages"]
    run = gpu.call(kernel, compute, grid, out, warps, stages, name="index_scores")
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
    tile: int,
    compute: Compute,
) -> None:
    query = pl.program_id(1)
    first = pl.program_id(0) * tile
    visible = visible_ref[query]
    here = pl.ds(first, tile)

    @pl.when(first >= visible)
    def _() -> None:
        out_ref[query, here] = jnp.full(tile, -jnp.inf, jnp.float32)

    @pl.when(first < visible)
    def _() -> None:
        page = table_ref[sequences_ref[query], first // rows]
        keys = pl.ds(first % rows, tile)
        factors = gpu.expand(gpu.e8m0_factor(scales_ref[page, keys, :], 126), 8)
        planes = gpu.decode_e2m1_lanes(codes_ref[page, keys, :], factors, compute)
        parts = [gpu.dot(q_ref[query, :, j, :], planes[j].T) for j in range(4)]
        scores = gpu.rounded(sum(parts[1:], parts[0]) * 2.0**gpu.SCALE_SHIFT, compute)
        weighted = jnp.maximum(scores, 0.0) * weights_ref[query, :][:, None]
        total = jnp.sum(gpu.rounded(weighted, compute), axis=0)
        total = gpu.rounded(total, compute) + 0.0  # -0 would lose its ties against +0
        seen = first + jnp.arange(tile) < visible
        out_ref[query, here] = jnp.where(seen, total, -jnp.inf)


def best_rows(scores: jax.Array, k: int, compute: Compute) -> jax.Array:
    """`top_rows` of every query's scores [T, N] by the kernel: [T, K].

    The scores are bfloat16 values, as `index_scores` rounds them, so 16 halvings find the k-th.
    Long rows are cut into chunks: the best k of all are among the best k of the chunks, and every
    chunk keeps its lowest indices of equal scores.
    """
    index = None
    while True:
        width = scores.shape[1] if index is None else index.shape[1]
        index = _best_of_chunks(scores, index, k, compute)
        if width <= choices.current()["index_select"]["scores"]:
            return index


def _best_of_chunks(
    scores: jax.Array, index: jax.Array | None, k: int, compute: Compute
) -> jax.Array:
    """The best k of each chunk of the scores (at `index` [T, C], if given): [T, chunks * k]."""
    t, n = scores.shape
    among = n if index is None else index.shape[1]
    sizes = choices.current()["index_select"]
    width = min(sizes["scores"], pl.next_power_of_2(max(among, k)))
    chunks = -(-among // width)
    kernel = functools.partial(_best_kernel, k=k, width=width, among=among)
    out = jax.ShapeDtypeStruct((t, chunks * k), jnp.int32)
    inputs = (scores,) if index is None else (scores, index)
    warps = sizes["warps"]
    run = gpu.call(kernel, compute, (chunks, t), out, warps=warps, stages=1, name="best_rows")
    return run(*inputs)


def _best_kernel(scores_ref: Any, *refs: Any, k: int, width: int, among: int) -> None:
    *index_refs, out_ref = refs
    chunk, query = pl.program_id(0), pl.program_id(1)
    lane = chunk * width + jnp.arange(width)
    live = lane < among
    index = lane
    if index_refs:
        index = triton.load(index_refs[0].at[query, lane], mask=live, other=-1)
        live = live & (index >= 0)
    at = jnp.where(live, index, 0)
    scores = triton.load(scores_ref.at[query, at], mask=live, other=-jnp.inf)
    bits = lax.bitcast_convert_type(scores, jnp.int32) >> 16
    keys = jnp.where(bits < 0, bits ^ 0x7FFF, bits)  # ordered as the scores are
    keys = jnp.where(live & (scores > -jnp.inf), keys, BELOW)

    def halve(i: Any, least: Any) -> Any:
        trial = least + (1 << (15 - i))
        return jnp.where(jnp.sum((keys >= trial).astype(jnp.int32)) >= k, trial, least)

    least = lax.fori_loop(0, 16, halve, jnp.int32(-(1 << 15)))
    above, equal = (keys > least).astype(jnp.int32), (keys == least).astype(jnp.int32)
    spare = k - jnp.sum(above)
    taken = above + jnp.where(jnp.cumsum(equal) <= spare, equal, 0)
    place = jnp.where(taken > 0, jnp.cumsum(taken) - 1, k)
    first = chunk * k
    count = jnp.sum(taken)
    slot = jnp.arange(pl.next_power_of_2(k))
    empty = (slot >= count) & (slot < k)
    end = out_ref.shape[1]  # lanes without a place point past the end
    triton.store(out_ref.at[query, jnp.where(taken > 0, first + place, end)], index, mask=taken > 0)
    none = jnp.full(slot.shape, -1, jnp.int32)
    triton.store(out_ref.at[query, jnp.where(empty, first + slot, end)], none, mask=empty)


def best_blocks(
    scores: jax.Array, visible: jax.Array, top_blocks: int, block: int, compute: Compute
) -> jax.Array:
    """`candidate_blocks` of every query's scores [T, N] by the kernel: [T, blocks] bool."""
    t, n = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, -n % block)), constant_values=-jnp.inf)
    best = padded.reshape(t, -1, block).max(-1)
    newest = ((visible - 1) // block)[:, None]
    best = jnp.where(jnp.arange(best.shape[1])[None, :] == newest, jnp.inf, best)
    if top_blocks >= best.shape[1]:
        return best > -jnp.inf
    index = best_rows(best, top_blocks, compute)
    kept = jnp.where(index >= 0, index, best.shape[1])
    return jnp.zeros(best.shape, bool).at[jnp.arange(t)[:, None], kept].set(True, mode="drop")
