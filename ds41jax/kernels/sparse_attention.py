"""Attention of many query heads over one shared key-value row per position, rows chosen by index.

The definition: online softmax over blocks of 64 rows, as in the official kernel, with the
probabilities rounded to bfloat16 before the product with the values (the denominator sums them
unrounded). The sink logit adds to the denominator only. An index of -1 contributes nothing; a query
without any valid index yields 0.

Letters: T queries, H heads, D head width, K chosen rows, N stored rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.formats import QuantizedArray, values
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.rows import map_rows

BLOCK = 64

Rows = QuantizedArray | jax.Array


def take_rows(rows: Rows, index: jax.Array) -> jax.Array:
    """Float32 values [..., D] of the stored rows [N, D] at `index`; -1 reads row 0."""
    safe = jnp.maximum(index, 0)
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
) -> jax.Array:
    """Attention over rows gathered by index from one or more stores.

    Args:
      q: [T, H, D] queries.
      sources: (rows [N, D] float32 or quantised, index [T, K] int32 or -1); keys are taken in this
        order, which fixes the order of summation.
      sink: [H] float32 sink logits.
      scale: factor of the scores.
      compute: rounding of probabilities and output.

    Returns:
      [T, H, D] in the activation dtype.
    """

    def tile(q: jax.Array, *index: jax.Array) -> jax.Array:
        keys = [take_rows(rows, i) for (rows, _), i in zip(sources, index, strict=True)]
        valid = jnp.concatenate(index, axis=1) >= 0
        return attend(q, jnp.concatenate(keys, axis=1), valid, sink, scale, compute)

    return map_rows(compute, tile, q, *(index for _, index in sources))
