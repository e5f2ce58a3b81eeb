"""Inputs of quantised products: rounded to FP8 by groups of 32 columns, laid out in planes.

One kernel, so that a product of one row costs two launches and not four; it also adds up the parts
of the product before. Kernels that make such rows quantise them themselves (`Prepared`).

Letters: T rows, K columns, P parts of a sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats.quantized import E4M3_MAX, decode_e8m0, power_of_two_exponent
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute

COLUMNS = 512  # a program


Input = Any  # of a product: rows [T, K], or on a GPU `Prepared`


@struct.dataclass
class Prepared:
    """Rows and what products of them read, on a GPU.

    Attributes:
      values: [T, K] in the activation dtype.
      planes: the same rounded to FP8_GROUP, as `gpu.planes` [T, count, K / count] in bfloat16
        (exact), by count.
    """

    values: jax.Array
    planes: dict[int, jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def values_of(x: Input) -> jax.Array:
    """The rows themselves."""
    return x.values if isinstance(x, Prepared) else x


def rounded_groups(x: jax.Array) -> jax.Array:
    """float32 x [n] with the values that FP8_GROUP stores, inside a kernel."""
    groups = x.reshape(x.shape[0] // 32, 32)
    scale = decode_e8m0(scale_codes(jnp.max(jnp.abs(groups), axis=1)))[:, None]
    codes = jnp.clip(groups / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return (codes.astype(jnp.float32) * scale).reshape(x.shape)


def scale_codes(amax: jax.Array) -> jax.Array:
    """E8M0 codes of FP8_GROUP for groups whose largest size is `amax`, inside a kernel."""
    return jnp.asarray(power_of_two_exponent(jnp.maximum(amax, 1e-4) * jnp.float32(1 / E4M3_MAX)))


def store_planes(ref: Any, row: Any, column: jax.Array, exact: jax.Array, live: Any = None) -> None:
    """Writes columns of a row of planes [T, count, K / count], inside a kernel."""
    count = ref.shape[1]
    target = ref.at[row, column % count, column // count]
    triton.store(target, exact.astype(jnp.bfloat16), mask=live)


def quantized_planes(x: Input, count: int, compute: Compute) -> jax.Array:
    """x rounded to FP8_GROUP, as `gpu.planes` [T, count, K / count] in bfloat16 (exact).

    x is [T, K], or parts [P, T, K] whose sum is rounded first, or already prepared.
    """
    if isinstance(x, Prepared):
        return x.planes[count]
    rows, k = x.shape[-2:]
    width = min(COLUMNS, k & -k)
    kernel = functools.partial(_kernel, width=width, whole=x.ndim == 2, compute=compute)
    out = jax.ShapeDtypeStruct((rows, count, k // count), jnp.bfloat16)
    run = gpu.call(kernel, compute, (k // width, rows), out, warps=2, name="quantize")
    return run(x.reshape(-1, rows, k))


def _kernel(x_ref: Any, out_ref: Any, *, width: int, whole: bool, compute: Compute) -> None:
    first, row = pl.program_id(0) * width, pl.program_id(1)
    parts = [x_ref[p, row, pl.ds(first, width)].astype(jnp.float32) for p in range(x_ref.shape[0])]
    x = parts[0] if whole else gpu.rounded(gpu.add_parts(parts), compute)
    store_planes(out_ref, row, first + jnp.arange(width), rounded_groups(x))
