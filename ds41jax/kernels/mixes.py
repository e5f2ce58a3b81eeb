"""Hyper-connection mixes: from a projection's outputs to collapse, post and combination weights.

The combination matrix is made nearly doubly stochastic by repeated normalisation (Sinkhorn). As
separate operations its forty small steps would cost more launches than the rest of a layer, so the
kernel keeps one tile of rows in registers throughout.

Letters: T rows, S streams, M = S * (2 + S) mixes.
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

ROWS = 8  # a program


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
    if compute.on_gpu:
        return _split_on_gpu(mixes, base, scale, s, iterations, eps, compute)
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


def _split_on_gpu(
    mixes: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    s: int,
    iterations: int,
    eps: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = mixes.shape[0]
    kernel = functools.partial(_kernel, rows=rows, s=s, iterations=iterations, eps=eps)
    vector = jax.ShapeDtypeStruct((rows, s), jnp.float32)
    shapes = (vector, vector, jax.ShapeDtypeStruct((rows, s, s), jnp.float32))
    run = gpu.call(kernel, compute, (-(-rows // ROWS),), shapes, warps=1, stages=1, name="mixes")
    pre, post, comb = run(mixes, base, scale)
    return pre, post, comb


def _kernel(
    mixes_ref: Any,  # [T, M]
    base_ref: Any,
    scale_ref: Any,
    pre_ref: Any,  # [T, S]
    post_ref: Any,  # [T, S]
    comb_ref: Any,  # [T, S, S]
    *,
    rows: int,
    s: int,
    iterations: int,
    eps: float,
) -> None:
    row = pl.program_id(0) * ROWS + jnp.arange(ROWS)
    live = row < rows
    safe, target = jnp.where(live, row, 0), jnp.where(live, row, rows)
    column = jnp.arange(s)

    def scaled(columns: jax.Array, part: int) -> jax.Array:
        at = safe.reshape(ROWS, *[1] * (columns.ndim - 1)), columns
        return mixes_ref[at] * scale_ref[part] + base_ref[columns]

    flat = column[None, :]
    mask = jnp.broadcast_to(live[:, None], (ROWS, s))
    pre = jax.nn.sigmoid(scaled(flat, 0)) + eps
    post = 2 * jax.nn.sigmoid(scaled(flat + s, 1))
    triton.store(pre_ref.at[target[:, None], flat], pre, mask=mask)
    triton.store(post_ref.at[target[:, None], flat], post, mask=mask)
    square = column[None, :, None] * s + column[None, None, :]
    comb = scaled(square + 2 * s, 2)
    comb = jnp.exp(comb - jnp.max(comb, axis=2)[:, :, None])
    comb = comb / jnp.sum(comb, axis=2)[:, :, None] + eps
    comb = comb / (jnp.sum(comb, axis=1)[:, None, :] + eps)

    def normalise(_: Any, comb: jax.Array) -> jax.Array:
        comb = comb / (jnp.sum(comb, axis=2)[:, :, None] + eps)
        return comb / (jnp.sum(comb, axis=1)[:, None, :] + eps)

    comb = lax.fori_loop(0, iterations - 1, normalise, comb)
    at = target[:, None, None], column[None, :, None], column[None, None, :]
    triton.store(comb_ref.at[at], comb, mask=jnp.broadcast_to(live[:, None, None], (ROWS, s, s)))
