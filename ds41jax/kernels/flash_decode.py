"""Sparse attention on a GPU: parts of the keys, and what merges them. See `sparse_attention`.

A flash decode: a program takes one query, a tile of heads and a fixed part of the keys, reads rows
by index from FP8 rings and FP4 pages and decodes them in registers. Both formats come out as four
planes (columns 4 c + j), the order in which FP4 is packed. Another kernel merges the parts with the
sink. Queries are rotated where they are read, and results rotated back where they are merged.

Letters: T queries, H heads, D head width, K chosen rows, N stored rows, R rotary pairs.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels import choices, gpu
from ds41jax.kernels.compute import Compute, Phase
from ds41jax.kernels.rotation import Turn, load_turn, turn_pairs

MERGE_HEADS = 8
ROW_SHIFT = 16  # rows are held at 2^-16, so that every KV_FP4 scale fits BF16 with E2M1's bias
LOG2E = 1.4426950408889634


@struct.dataclass
class RingAndStep:
    """FP8 rows of the sequences' rings, B x R of them, followed by those of the step.

    Attributes:
      ring: [S, R, D], an entry of a stack; slots: [B] int32 ring of each sequence.
      step: [T, D].
    """

    ring: QuantizedArray
    slots: jax.Array
    step: QuantizedArray


@dataclass(frozen=True)
class _Plan:
    """Static numbers of one call."""

    heads: int
    width: int  # D
    ring_rows: int  # of a sequence
    all_ring_rows: int  # of all sequences
    window_tiles: int
    tiles: int
    keys: int  # of a tile
    head_tile: int
    part_tiles: int
    factor: float  # of the raw scores, for powers of two
    turns: bool  # whether queries are rotated

    @property
    def parts(self) -> int:
        return -(-self.tiles // self.part_tiles)


def attend_parts(
    q: jax.Array,
    angles: Turn | None,
    sources: tuple[tuple[Any, jax.Array], ...],
    scale: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Results [parts, T, heads, D], and tops and sums [parts, T, heads], of parts of the keys.

    Queries are rotated by `angles` first, if given. Heads are padded to whole tiles.
    """
    sizes, (t, heads, width) = choices.current()["attention"], q.shape
    keys, head_tile = sizes["keys"], sizes["heads"]
    index = [_padded(i, keys) for _, i in sources]
    window = sources[0][0]
    tiles = sum(i.shape[1] for i in index) // keys
    plan = _Plan(
        heads=heads,
        width=width,
        ring_rows=window.ring.codes.shape[2],
        all_ring_rows=window.slots.shape[0] * window.ring.codes.shape[2],
        window_tiles=index[0].shape[1] // keys,
        tiles=tiles,
        part_tiles=tiles if compute.phase is Phase.PREFILL else sizes["part_tiles"],
        keys=keys,
        head_tile=head_tile,
        factor=scale * LOG2E * 2.0**ROW_SHIFT,
        turns=angles is not None,
    )
    padded_heads = -(-heads // head_tile) * head_tile
    q = jnp.pad(q, ((0, 0), (0, padded_heads - heads), (0, 0)))
    scalar = jax.ShapeDtypeStruct((plan.parts, t, padded_heads), jnp.float32)
    shape = (plan.parts, t, padded_heads, width)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16), scalar, scalar)
    kernel = functools.partial(_attend_kernel, plan=plan, compute=compute)
    grid = (padded_heads // head_tile, plan.parts, t)
    warps, stages = sizes["warps"], sizes["stages"]
    run = gpu.call(kernel, compute, grid, shapes, warps, stages, name="sparse_attention")
    turns = () if angles is None else (angles.cos, angles.sin)
    out, top, total = run(q, *turns, index[0], *_stores(sources), *index[1:])
    return out, top, total


def _stores(sources: tuple[tuple[Any, jax.Array], ...]) -> list[jax.Array]:
    """What the kernel reads rows from, in place: layer, slots, ring, step, and pages, if any."""
    window, *rest = (rows for rows, _ in sources)
    assert isinstance(window, RingAndStep)
    ring, step = window.ring, window.step
    operands = [jnp.asarray(ring.layer, jnp.int32).reshape(1), window.slots]
    operands += [gpu.lanes(ring.codes, jnp.uint32), ring.scales]
    operands += [gpu.lanes(step.codes, jnp.uint32), step.scales]
    for pages in rest:
        assert isinstance(pages, QuantizedArray) and pages.format is Format.KV_FP4
        operands += [gpu.lanes(pages.codes), pages.scales]
    return operands


def _padded(index: jax.Array, keys: int) -> jax.Array:
    """Index [T, K] with -1 up to a multiple of `keys`."""
    return jnp.pad(index, ((0, 0), (0, -index.shape[1] % keys)), constant_values=-1)


def merge_parts(
    parts: tuple[jax.Array, jax.Array, jax.Array],
    angles: Turn | None,
    sink: jax.Array,
    groups: int,
    heads: int,
    compute: Compute,
) -> jax.Array:
    """The parts of `attend_parts` as one, with the sink: planes, as of `rotated_attention`."""
    out, top, total = parts
    t, width, each = out.shape[1], out.shape[3], heads // groups
    tile = min(MERGE_HEADS, each & -each)
    kernel = functools.partial(_merge_kernel, tile=tile, each=each, compute=compute)
    shape = jax.ShapeDtypeStruct((t, groups, 2, each * width // 2), jnp.bfloat16)
    turns = () if angles is None else (angles.cos, angles.sin)
    grid = (heads // tile, t)
    run = gpu.call(kernel, compute, grid, shape, warps=4, stages=1, name="attention_merge")
    return run(out, top, total, *gpu.entry(sink), *turns)


def _merge_kernel(
    parts_ref: Any,  # [parts, T, heads, D]
    top_ref: Any,  # [parts, T, heads]
    total_ref: Any,
    layer_ref: Any,
    sink_ref: Any,  # [L, H]
    *refs: Any,  # cosines and sines [T, R], if any; then the output
    tile: int,
    each: int,
    compute: Compute,
) -> None:
    *turns, out_ref = refs
    first, query = pl.program_id(0) * tile, pl.program_id(1)
    heads, count = pl.ds(first, tile), parts_ref.shape[0]
    half = parts_ref.shape[3] // 2
    pair = jnp.arange(half)[None, :]
    tops = [top_ref[p, query, heads] for p in range(count)]
    highest = functools.reduce(jnp.maximum, tops)
    weights = [total_ref[p, query, heads] * jnp.exp2(tops[p] - highest) for p in range(count)]
    sink = jnp.exp2(sink_ref[layer_ref[0], heads] * LOG2E - highest)
    bottom = gpu.add_parts(weights) + sink
    shares = [(w / bottom)[:, None] for w in weights]
    rows = (first + jnp.arange(tile))[:, None]

    def merged(odd: int) -> jax.Array:
        at = rows, 2 * pair + odd
        terms = [parts_ref[(p, query, *at)].astype(jnp.float32) * shares[p] for p in range(count)]
        return gpu.rounded(gpu.add_parts(terms), compute)

    even, odd = merged(0), merged(1)
    if turns:
        cos_ref, sin_ref = turns
        cos, sin = load_turn(cos_ref, sin_ref, query, pair, half)
        even, odd = turn_pairs(even, odd, cos, -sin, compute)
    group, place = first // each, (rows - first // each * each) * half + pair
    out_ref[query, group, 0, place] = even.astype(jnp.bfloat16)
    out_ref[query, group, 1, place] = odd.astype(jnp.bfloat16)


def _attend_kernel(
    q_ref: Any,  # [T, heads, D]
    *refs: Any,  # cosines and sines [T, R], if queries are rotated; then those of `_attend_rows`
    plan: _Plan,
    compute: Compute,
) -> None:
    query, heads = pl.program_id(2), pl.program_id(0) * plan.head_tile
    rows_of_heads = heads + jnp.arange(plan.head_tile)[:, None]
    lane = jnp.arange(plan.width // 4)[None, :]
    q = [q_ref[query, rows_of_heads, 4 * lane + j] for j in range(4)]
    if plan.turns:
        (cos_ref, sin_ref), refs = refs[:2], refs[2:]
        for j in (0, 2):
            cos, sin = load_turn(cos_ref, sin_ref, query, 2 * lane + j // 2, plan.width // 2)
            even, odd = (x.astype(jnp.float32) for x in q[j : j + 2])
            turned = turn_pairs(even, odd, cos, sin, compute)
            q[j : j + 2] = [x.astype(jnp.bfloat16) for x in turned]
    _attend_rows(q, *refs, plan=plan, compute=compute)


def _attend_rows(
    q: list[jax.Array],  # four planes of a tile of heads
    window_ref: Any,  # [T, W]
    layer_ref: Any,
    slots_ref: Any,  # [B]
    ring_ref: Any,  # [L, S, R, D / 4] four codes a lane
    ring_scales: Any,
    step_ref: Any,
    step_scales: Any,
    *refs: Any,  # pages [N, D / 4], their scales and their index [T, K], if any; then the outputs
    plan: _Plan,
    compute: Compute,
) -> None:
    *pages, out_ref, top_ref, total_ref = refs
    part, query = pl.program_id(1), pl.program_id(2)
    first_head = pl.program_id(0) * plan.head_tile
    heads = pl.ds(first_head, plan.head_tile)
    rows_of_heads = first_head + jnp.arange(plan.head_tile)[:, None]
    lanes = plan.width // 4
    columns = 4 * jnp.arange(lanes)[None, :]

    def add(rows: list[jax.Array], live: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        top, total, *sums = carry
        scores = sum(gpu.dot(q[j], rows[j].T) for j in range(4)) * plan.factor
        scores = jnp.where(live[None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p = jnp.exp2(scores - new_top[:, None])
        decay = jnp.exp2(top - new_top)
        weights = p.astype(jnp.bfloat16)
        sums = [s * decay[:, None] + gpu.dot(weights, rows[j]) for j, s in enumerate(sums)]
        return new_top, total * decay + jnp.sum(p, axis=1), *sums

    def chosen(ref: Any, tile: Any) -> tuple[Any, Any]:
        index = ref[query, pl.ds(tile * plan.keys, plan.keys)]
        return index, index >= 0

    def add_window(tile: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, live = chosen(window_ref, tile)
        in_ring = live & (index < plan.all_ring_rows)
        sequence = jnp.where(in_ring, index, 0) // plan.ring_rows
        slot = triton.load(slots_ref.at[sequence])[:, None]
        stores = (
            (ring_ref, ring_scales, (layer_ref[0], slot), index % plan.ring_rows, in_ring),
            (step_ref, step_scales, (), index - plan.all_ring_rows, live & ~in_ring),
        )
        return add(_ring_rows(stores, lanes), live, carry)

    def add_pages(tile: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        codes, scales, index_ref = pages
        index, live = chosen(index_ref, tile - plan.window_tiles)
        return add(_page_rows(codes, scales, index, live, lanes, compute), live, carry)

    first = part * plan.part_tiles
    last = jnp.minimum(first + plan.part_tiles, plan.tiles)
    zero = jnp.zeros((plan.head_tile, lanes), jnp.float32)
    start = jnp.full(plan.head_tile, -1e30, jnp.float32), jnp.zeros(plan.head_tile, jnp.float32)
    carry: tuple[Any, ...] = (*start, zero, zero, zero, zero)
    carry = lax.fori_loop(first, jnp.minimum(last, plan.window_tiles), add_window, carry)
    if pages:
        carry = lax.fori_loop(jnp.maximum(first, plan.window_tiles), last, add_pages, carry)
    top, total, *sums = carry
    unit = 2.0**ROW_SHIFT / jnp.maximum(total, 1e-30)[:, None]
    for j, s in enumerate(sums):
        out_ref[part, query, rows_of_heads, columns + j] = (s * unit).astype(jnp.bfloat16)
    top_ref[part, query, heads] = top
    total_ref[part, query, heads] = total


def _gather(ref: Any, lead: tuple[Any, ...], index: Any, live: Any, width: int) -> jax.Array:
    """Rows [keys, width] of a store at `index`, 0 where not live."""
    at = (*lead, jnp.where(live, index, 0)[:, None], jnp.arange(width)[None, :])
    mask = jnp.broadcast_to(live[:, None], (index.shape[0], width))
    zero = jnp.zeros((), ref.dtype)
    return triton.load(ref.at[at], mask=mask, other=zero)


def _ring_rows(stores: tuple[tuple[Any, ...], ...], lanes: int) -> list[jax.Array]:
    """The four planes of FP8 rows that lie in one of two stores, in BF16 at 2^-ROW_SHIFT."""
    codes, scales = [], []
    for ref, scale_ref, lead, index, live in stores:
        codes.append(_gather(ref, lead, index, live, lanes))
        scales.append(_gather(scale_ref, lead, index, live, lanes // 8))
    lane = (codes[0] | codes[1]).astype(jnp.int32)
    exponent = (scales[0] | scales[1]).astype(jnp.int32) + (120 - ROW_SHIFT)
    factor = lax.bitcast_convert_type((exponent << 7).astype(jnp.int16), jnp.bfloat16)
    factor = gpu.expand(factor, 8)
    planes = []
    for j in range(4):
        code = lane >> (8 * j)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 4)
        value = lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16)
        planes.append(value * factor)
    return planes


def _page_rows(
    ref: Any, scale_ref: Any, index: Any, live: Any, lanes: int, compute: Compute
) -> list[jax.Array]:
    """The four planes of KV_FP4 rows, in BF16 at 2^-ROW_SHIFT."""
    codes = _gather(ref, (), index, live, lanes)
    scales = _gather(scale_ref, (), index, live, lanes // 4).astype(jnp.float32)
    factor = gpu.expand((scales * 2.0 ** (126 - ROW_SHIFT)).astype(jnp.bfloat16), 4)
    return gpu.decode_e2m1_lanes(codes, factor, compute)
