"""Hyper-connection mixes: from a projection's outputs to collapse, post and combination weights.

The combination matrix is made nearly doubly stochastic by repeated normalisation (Sinkhorn). As
separate operations its forty small steps would cost more launches than the rest of a layer, so the
kernel keeps a row in registers throughout. It also adds up the parts of the projection, all loaded
at once: one after the other, their latencies would add up.

Letters: T rows, S streams, M = S * (2 + S) mixes, P parts of a sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """[..., S, S] logits to a nearly doubly stochastic matrix (reference `hc_split_sinkhorn`).

    Softmax over the last axis, then columns and rows are normalised in turn, columns last.
    """
    comb = jax.nn.softmax(logits, axis=-1) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)

    def normalise(_: jax.Array, comb: jax.Array) -> jax.Array:
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        return comb / (comb.sum(-2, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, normalise, comb)


def split_mixes(
    mixes: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    streams: int,
    iterations: int,
    eps: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mixes [T, M] to pre [T, S], post [T, S] and comb [T, S, S], all float32.

    Args:
      base: [M]; scale: [3], of pre, post and comb.
    """
    s = streams
    pre = jax.nn.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * jax.nn.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(-1, s, s)
    if compute.differentiable:
        return pre, post, _sinkhorn_of_batch(comb, iterations, eps)
    return pre, post, sinkhorn(comb, iterations, eps)


def _sinkhorn_of_batch(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """`sinkhorn` for training: rows last, and sums of slices, which XLA fuses as it does no
    reduction."""
    comb = jnp.moveaxis(jax.nn.softmax(logits, axis=-1), 0, -1) + eps  # [S, S, T]

    def over_columns(comb: jax.Array) -> jax.Array:
        first, *rest = (comb[:, k] for k in range(comb.shape[1]))
        return comb / (sum(rest, first)[:, None] + eps)

    def over_rows(comb: jax.Array) -> jax.Array:
        first, *rest = comb
        return comb / (sum(rest, first)[None] + eps)

    def normalise(comb: jax.Array, _: None) -> tuple[jax.Array, None]:
        return over_rows(over_columns(comb)), None

    comb, _ = lax.scan(normalise, over_rows(comb), None, length=iterations - 1, unroll=4)
    return jnp.moveaxis(comb, -1, 0)


def finish_mixes(
    parts: jax.Array,
    square: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    streams: int,
    iterations: int,
    eps: float,
    norm_eps: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`split_mixes` of a projection's parts [P, T, M], scaled by the streams' mean square [T]."""
    if compute.on_gpu:
        sizes = streams, iterations, eps, norm_eps
        return _finish_on_gpu(parts, square, base, scale, *sizes, compute)
    mixes = gpu.add_parts(parts) * lax.rsqrt(square + norm_eps)[:, None]
    return split_mixes(mixes, base, scale, streams, iterations, eps, compute)


def _finish_on_gpu(
    parts: jax.Array,
    square: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    s: int,
    iterations: int,
    eps: float,
    norm_eps: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = parts.shape[1]
    kernel = functools.partial(_kernel, s=s, iterations=iterations, eps=eps, norm_eps=norm_eps)
    vector = jax.ShapeDtypeStruct((rows, s), jnp.float32)
    shapes = (vector, vector, jax.ShapeDtypeStruct((rows, s, s), jnp.float32))
    run = gpu.call(kernel, compute, (rows,), shapes, warps=1, stages=1, name="mixes")
    pre, post, comb = run(parts, square, *gpu.entry(base), *gpu.entry(scale))
    return pre, post, comb


def _kernel(
    parts_ref: Any,  # [P, T, M]
    square_ref: Any,  # [T]
    base_layer: Any,
    base_ref: Any,  # [L, M]
    scale_layer: Any,
    scale_ref: Any,  # [L, 3]
    pre_ref: Any,  # [T, S]
    post_ref: Any,  # [T, S]
    comb_ref: Any,  # [T, S, S]
    *,
    s: int,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> None:
    row, count = pl.program_id(0), parts_ref.shape[0]
    part = jnp.arange(pl.next_power_of_2(count))
    factor = lax.rsqrt(square_ref[row] + norm_eps)
    column = jnp.arange(s)

    def scaled(columns: jax.Array, kind: int) -> jax.Array:
        lead = part.reshape(-1, *[1] * columns.ndim)
        shape = (part.shape[0], *columns.shape)
        live = jnp.broadcast_to(lead < count, shape)
        at = jnp.where(live, lead, 0), row, jnp.broadcast_to(columns, shape)
        total = jnp.sum(triton.load(parts_ref.at[at], mask=live, other=0.0), axis=0)
        base = base_ref[base_layer[0], columns]
        return total * factor * scale_ref[scale_layer[0], kind] + base

    pre_ref[row, :] = jax.nn.sigmoid(scaled(column, 0)) + eps
    post_ref[row, :] = 2 * jax.nn.sigmoid(scaled(column + s, 1))
    comb = scaled(column[:, None] * s + column[None, :] + 2 * s, 2)
    comb = jnp.exp(comb - jnp.max(comb, axis=1)[:, None])
    comb = comb / jnp.sum(comb, axis=1)[:, None] + eps
    comb = comb / (jnp.sum(comb, axis=0)[None, :] + eps)

    def normalise(_: Any, comb: jax.Array) -> jax.Array:
        comb = comb / (jnp.sum(comb, axis=1)[:, None] + eps)
        return comb / (jnp.sum(comb, axis=0)[None, :] + eps)

    comb_ref[row, :, :] = lax.fori_loop(0, iterations - 1, normalise, comb)
