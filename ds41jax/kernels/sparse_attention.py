"""Attention of many query heads over one shared key-value row per position, rows chosen by index.

The definition: online softmax over blocks of 64 rows, as in the official kernel, with the
probabilities rounded to bfloat16 before the product with the values (the denominator sums them
unrounded). The sink logit adds to the denominator only. An index of -1 contributes nothing; a query
without any valid index yields 0.

The kernel is a flash decode: a program takes one query, HEAD_TILE heads and a fixed part of the
keys, reads rows by index from FP8 rings and FP4 pages and decodes them in registers. Both formats
come out as four planes (columns 4 c + j), the order in which FP4 is packed. The parts are merged
with the sink afterwards.

Letters: T queries, H heads, D head width, K chosen rows, N stored rows.
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

from ds41jax.formats import Format, QuantizedArray, values
from ds41jax.formats.numerics import steer
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute, Phase
from ds41jax.kernels.rows import map_rows

BLOCK = 64

HEAD_TILE = 16
KEY_TILE = 64
PART_TILES = 2  # key tiles of a decoding program; prefill has programs enough without parts
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


Rows = QuantizedArray | RingAndStep | jax.Array


def take_rows(rows: Rows, index: jax.Array) -> jax.Array:
    """Float32 values [..., D] of the stored rows [N, D] at `index`; -1 reads row 0."""
    safe = jnp.maximum(index, 0)
    assert not isinstance(rows, RingAndStep), "only the kernel reads two stores as one"
    if isinstance(rows, QuantizedArray):
        return values(rows.map(lambda x: x[safe]))
    return values(rows[safe])


def attend(
    q: jax.Array,
    keys: jax.Array,
    valid: jax.Array,
    sink: jax.Array,
    scale: float,
    compute: Compute,
) -> jax.Array:
    """Online softmax attention of q [T, H, D] over its own keys [T, K, D] where valid [T, K]."""
    t, heads, width = q.shape
    pad = -keys.shape[1] % BLOCK
    keys = jnp.pad(keys, ((0, 0), (0, pad), (0, 0)))
    valid = jnp.pad(valid, ((0, 0), (0, pad)))
    q = q.astype(jnp.float32)

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        block = lax.dynamic_slice_in_dim(keys, i * BLOCK, BLOCK, axis=1)
        seen = lax.dynamic_slice_in_dim(valid, i * BLOCK, BLOCK, axis=1)
        scores = _contract("thd,tkd->thk", q, block) * scale
        scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        p = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        weighted = _contract("thk,tkd->thd", compute.round(p).astype(jnp.float32), block)
        return new_top, total * decay + p.sum(-1), out * decay[..., None] + weighted

    start = (
        jnp.full((t, heads), -1e30, jnp.float32),
        jnp.zeros((t, heads), jnp.float32),
        jnp.zeros((t, heads, width), jnp.float32),
    )
    top, total, out = lax.fori_loop(0, keys.shape[1] // BLOCK, step, start)
    total = total + jnp.exp(sink - top)
    return compute.round(out / total[..., None])


def _contract(expression: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        expression, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def sparse_attention(
    q: jax.Array,
    sources: tuple[tuple[Rows, jax.Array], ...],
    sink: jax.Array,
    scale: float,
    compute: Compute,
    guide: jax.Array | None = None,
) -> jax.Array:
    """Attention over rows gathered by index from one or more stores.

    Args:
      q: [T, H, D] queries.
      sources: (rows [N, D] float32 or quantised, index [T, K] int32 or -1); keys are taken in this
        order, which fixes the order of summation. For the kernel: a `RingAndStep`, and then KV_FP4
        rows, if any.
      sink: [H] float32 sink logits.
      scale: factor of the scores.
      compute: rounding of probabilities and output.
      guide: in training, the index scores [T, K] by which the last source's rows were chosen; they
        are taught to follow the attention that the rows get.

    Returns:
      [T, H, D] in the activation dtype.
    """
    if compute.on_gpu:
        return _attend_on_gpu(q, sources, sink, scale, compute)

    if compute.differentiable:
        return _attend_at_once(q, sources, sink, scale, compute, guide)

    def tile(q: jax.Array, *index: jax.Array) -> jax.Array:
        keys = [take_rows(rows, i) for (rows, _), i in zip(sources, index, strict=True)]
        valid = jnp.concatenate(index, axis=1) >= 0
        return attend(q, jnp.concatenate(keys, axis=1), valid, sink, scale, compute)

    return map_rows(compute, tile, q, *(index for _, index in sources))


def _attend_at_once(
    q: jax.Array,
    sources: tuple[tuple[Rows, jax.Array], ...],
    sink: jax.Array,
    scale: float,
    compute: Compute,
    guide: jax.Array | None,
) -> jax.Array:
    """`sparse_attention` for training: a plain softmax over all chosen rows."""
    keys = jnp.concatenate([take_rows(rows, index) for rows, index in sources], axis=1)
    keys = keys.astype(compute.dtype)
    valid = jnp.concatenate([index for _, index in sources], axis=1) >= 0
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("thd,tkd->thk", q, keys) * scale
    scores = jnp.where(valid[:, None, :], scores, -1e30)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sink[:, None], (*q.shape[:2], 1))], axis=-1)
    p = jax.nn.softmax(scores, axis=-1)[..., :-1]
    out = compute.round(product("thk,tkd->thd", compute.round(p), keys))
    if guide is None:
        return out
    return steer(out, guide, _index_gradient(guide, p[..., -guide.shape[1] :], sources[-1][1] >= 0))


def _index_gradient(guide: jax.Array, p: jax.Array, valid: jax.Array) -> jax.Array:
    """Of the divergence from the heads' attention p [T, H, K] to softmax(guide [T, K]).

    A query counts as much as its heads attend to chosen rows at all. (The indexer's training in
    DeepSeek-V3.2, section 2.1, there with all queries alike.)
    """
    mass = jnp.where(valid, p.mean(axis=1), 0)
    total = mass.sum(axis=1, keepdims=True)
    chance = jax.nn.softmax(jnp.where(valid, guide, -1e30), axis=-1)
    return jnp.where(valid, chance * total - mass, 0) / guide.shape[0]


def attention_floor(queries: int, window: int, chosen: int, heads: int, d: int) -> tuple[int, int]:
    """(bytes, FLOPs): every query reads its own rows, 33 / 32 and 9 / 16 bytes a column."""
    row_bytes = window * d * 33 // 32 + chosen * d * 9 // 16
    return queries * (row_bytes + 4 * heads * d), 4 * queries * heads * (window + chosen) * d


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

    @property
    def parts(self) -> int:
        return -(-self.tiles // self.part_tiles)


def _attend_on_gpu(
    q: jax.Array,
    sources: tuple[tuple[Rows, jax.Array], ...],
    sink: jax.Array,
    scale: float,
    compute: Compute,
) -> jax.Array:
    """See `sparse_attention`."""
    t, heads, width = q.shape
    (window, window_index), *rest = sources
    assert isinstance(window, RingAndStep)
    index = [_padded(i) for i in (window_index, *(i for _, i in rest))]
    ring, step = window.ring, window.step
    operands = [jnp.asarray(ring.layer, jnp.int32).reshape(1), window.slots]
    operands += [gpu.lanes(ring.codes, jnp.uint32), ring.scales]
    operands += [gpu.lanes(step.codes, jnp.uint32), step.scales]
    for pages, _ in rest:
        assert isinstance(pages, QuantizedArray) and pages.format is Format.KV_FP4
        operands += [gpu.lanes(pages.codes), pages.scales]
    tiles = sum(i.shape[1] for i in index) // KEY_TILE
    plan = _Plan(
        heads=heads,
        width=width,
        ring_rows=ring.codes.shape[2],
        all_ring_rows=window.slots.shape[0] * ring.codes.shape[2],
        window_tiles=index[0].shape[1] // KEY_TILE,
        tiles=tiles,
        part_tiles=tiles if compute.phase is Phase.PREFILL else PART_TILES,
        keys=KEY_TILE,
        head_tile=HEAD_TILE,
        factor=scale * LOG2E * 2.0**ROW_SHIFT,
    )
    padded_heads = -(-heads // HEAD_TILE) * HEAD_TILE
    q = jnp.pad(q, ((0, 0), (0, padded_heads - heads), (0, 0)))
    scalar = jax.ShapeDtypeStruct((plan.parts, t, padded_heads), jnp.float32)
    shape = (plan.parts, t, padded_heads, width)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16), scalar, scalar)
    kernel = functools.partial(_attend_kernel, plan=plan, compute=compute)
    grid = (padded_heads // HEAD_TILE, plan.parts, t)
    run = gpu.call(kernel, compute, grid, shapes, warps=4, stages=2, name="sparse_attention")
    out, top, total = run(q, index[0], *operands, *index[1:])
    merged = _merge(out[:, :, :heads], top[:, :, :heads], total[:, :, :heads], sink)
    return compute.round(merged)


def _padded(index: jax.Array) -> jax.Array:
    """Index [T, K] with -1 up to a multiple of KEY_TILE."""
    return jnp.pad(index, ((0, 0), (0, -index.shape[1] % KEY_TILE)), constant_values=-1)


def _merge(out: jax.Array, top: jax.Array, total: jax.Array, sink: jax.Array) -> jax.Array:
    """Parts [parts, T, H, D] and their tops and sums [parts, T, H] to one, with the sink."""
    highest = functools.reduce(jnp.maximum, top)
    weights = total * jnp.exp2(top - highest)
    bottom = gpu.add_parts(weights) + jnp.exp2(sink * LOG2E - highest)
    return gpu.add_parts(out.astype(jnp.float32) * (weights / bottom)[..., None])


def _attend_kernel(
    q_ref: Any,  # [T, heads, D]
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
    q = [q_ref[query, rows_of_heads, columns + j] for j in range(4)]

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
