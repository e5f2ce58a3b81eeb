"""RMS normalisation, and the mean of a row's squares, which it divides by.

That mean is a kernel of its own so that the order of the sum depends on the row's length alone: XLA
may choose another for another number of rows. Decoding's own norms are parts of larger kernels
(`streams`, `latents`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute

COLUMNS = 1024  # a step


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, compute: Compute) -> jax.Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in float32, rounded once.

    With the text model's eps of 1e-20 a row of zeros stays zero and tiny rows are scaled up in
    full.
    """
    scale = lax.rsqrt(mean_square(x, compute) + eps)
    return compute.round(weight.astype(jnp.float32) * (x.astype(jnp.float32) * scale))


def mean_square(x: jax.Array, compute: Compute) -> jax.Array:
    """[..., D] to [..., 1] in float32."""
    if not compute.on_gpu:
        return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    *lead, d = x.shape
    flat = x.reshape(-1, d)
    width = min(COLUMNS, d & -d)
    out = jax.ShapeDtypeStruct((flat.shape[0],), jnp.float32)
    kernel = functools.partial(_kernel, width=width)
    run = gpu.call(kernel, compute, (flat.shape[0],), out, warps=4, name="mean_square")
    return run(flat).reshape(*lead, 1)


def _kernel(x_ref: Any, out_ref: Any, *, width: int) -> None:
    row, d = pl.program_id(0), x_ref.shape[1]

    def add(i: Any, total: jax.Array) -> jax.Array:
        x = x_ref[row, pl.ds(i * width, width)].astype(jnp.float32)
        return total + x * x

    total = lax.fori_loop(0, d // width, add, jnp.zeros(width, jnp.float32))
    out_ref[row] = jnp.sum(total) / d
