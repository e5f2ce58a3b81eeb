"""Attention of many query heads over one shared key-value row per position, rows chosen by index.

The definition: online softmax over blocks of 64 rows, as in the official kernel, with the
probabilities rounded to bfloat16 before the product with the values (the denominator sums them
unrounded). The sink logit adds to the denominator only. An index of -1 contributes nothing; a query
without any valid index yields 0.

The kernels are in `flash_decode`.

Letters: T queries, H heads, D head width, K chosen rows, N stored rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.formats import QuantizedArray, values
from ds41jax.formats.numerics import steer
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.flash_decode import RingAndStep, attend_parts, merge_parts
from ds41jax.kernels.rotation import Turn, turn
from ds41jax.kernels.rows import map_rows

BLOCK = 64


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
        parts = attend_parts(q, None, sources, scale, compute)
        out = merge_parts(parts, None, sink, q.shape[1], q.shape[1], compute)
        return jnp.moveaxis(out, 2, 3).reshape(q.shape)
    if compute.differentiable:
        return _attend_at_once(q, sources, sink, scale, compute, guide)

    def tile(q: jax.Array, *index: jax.Array) -> jax.Array:
        keys = [take_rows(rows, i) for (rows, _), i in zip(sources, index, strict=True)]
        valid = jnp.concatenate(index, axis=1) >= 0
        return attend(q, jnp.concatenate(keys, axis=1), valid, sink, scale, compute)

    return map_rows(compute, tile, q, *(index for _, index in sources))


def rotated_attention(
    q: jax.Array,
    angles: Turn,
    sources: tuple[tuple[Rows, jax.Array], ...],
    sink: jax.Array,
    scale: float,
    groups: int,
    compute: Compute,
) -> jax.Array:
    """`sparse_attention` of queries that it rotates first, and rotated back.

    Returns:
      The heads in `groups`, laid out as the grouped product takes them: planes
      [T, groups, 2, H / groups * D / 2].
    """
    if compute.on_gpu:
        parts = attend_parts(q, angles, sources, scale, compute)
        return merge_parts(parts, angles, sink, groups, q.shape[1], compute)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    out = sparse_attention(turn(q, cos, sin, compute), sources, sink, scale, compute)
    out = turn(out, cos, -sin, compute)
    return gpu.planes(out.reshape(out.shape[0], groups, -1), 2)


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
