"""Rotary positions: pairs of adjacent columns turned by an angle; also within other kernels.

Letters: T rows, D columns, R pairs that turn, the last of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.pallas import triton

from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute


@struct.dataclass
class Turn:
    """Cosines and sines [T, R] float32 of the rows' angles."""

    cos: jax.Array
    sin: jax.Array


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, compute: Compute) -> jax.Array:
    """Turns the last pairs of x [T, ..., D] by angles [T, ..., R]; rounded to the dtype of x."""
    width = 2 * cos.shape[-1]
    kept, turned = x[..., :-width], x[..., -width:].astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], width // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([kept, compute.round(rotated).astype(x.dtype)], axis=-1)


def load_turn(cos_ref: Any, sin_ref: Any, row: Any, pair: jax.Array, pairs: int) -> Any:
    """Cosines and sines for `pair` of a row's `pairs`, 1 and 0 for those before the last R."""
    place = pair - (pairs - cos_ref.shape[1])
    live, safe = place >= 0, jnp.maximum(place, 0)
    cos = triton.load(cos_ref.at[row, safe], mask=live, other=1.0)
    return cos, triton.load(sin_ref.at[row, safe], mask=live, other=0.0)


def turn_pairs(
    even: jax.Array, odd: jax.Array, cos: jax.Array, sin: jax.Array, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """`turn` of even and odd columns (float32), inside a kernel; bfloat16 values in float32."""
    turned = even * cos - odd * sin, even * sin + odd * cos
    return gpu.rounded(turned[0], compute), gpu.rounded(turned[1], compute)
