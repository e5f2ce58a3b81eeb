"""Inputs of quantised products: rounded to FP8 by groups of 32 columns, laid out in planes.

One kernel, so that a product of one row costs two launches and not four.

Letters: T rows, K columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats.quantized import E4M3_MAX, decode_e8m0, power_of_two_exponent
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute

COLUMNS = 512  # a program


def rounded_groups(x: jax.Array) -> jax.Array:
    """float32 x [n] with the values that FP8_GROUP stores, inside a kernel."""
    groups = x.reshape(x.shape[0] // 32, 32)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=1), 1e-4)
    scale = decode_e8m0(power_of_two_exponent(amax * jnp.float32(1 / E4M3_MAX)))[:, None]
    codes = jnp.clip(groups / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return (codes.astype(jnp.float32) * scale).reshape(x.shape)


def quantized_planes(x: jax.Array, count: int, compute: Compute) -> jax.Array:
    """x [T, K] rounded to FP8_GROUP, as `gpu.planes` [T, count, K / count] in bfloat16 (exact)."""
    rows, k = x.shape
    width = min(COLUMNS, k & -k)
    kernel = functools.partial(_kernel, width=width, count=count)
    out = jax.ShapeDtypeStruct((rows, count, k // count), jnp.bfloat16)
    return gpu.call(kernel, compute, (k // width, rows), out, warps=2, name="quantize")(x)


def _kernel(x_ref: Any, out_ref: Any, *, width: int, count: int) -> None:
    first, row = pl.program_id(0) * width, pl.program_id(1)
    x = x_ref[row, pl.ds(first, width)].astype(jnp.float32)
    column = first + jnp.arange(width)
    target = out_ref.at[row, column % count, column // count]
    triton.store(target, rounded_groups(x).astype(jnp.bfloat16))
