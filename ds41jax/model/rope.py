"""Rotary positions: plain for window-only layers and the drafter, YaRN with global KV."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ds41jax.config import ModelConfig, YarnConfig
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.rotation import Turn, turn


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """[dim / 2] float32 frequencies, computed on the host.

    One float32 ulp of a frequency is 0.06 rad at position 10^6, so the order of operations is that
    of the official `precompute_freqs_cis`, with its power correctly rounded (numpy's float32 power
    is not).
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / power
    if yarn is None:
        return frequencies
    low, high = yarn_bounds(dim, theta, yarn)
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        max(high - low, 1e-3)
    )
    smooth = np.float32(1) - np.clip(ramp, 0, 1)
    return frequencies / np.float32(yarn.factor) * (1 - smooth) + frequencies * smooth


def yarn_bounds(dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
    """First and last dimension pair of the blend between kept and interpolated frequencies."""

    def pair(rotations: float) -> float:
        ratio = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(theta))

    return max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dim - 1)


def plain_frequencies(config: ModelConfig) -> np.ndarray:
    """Frequencies of window-only layers and draft stages: theta 10000, no interpolation."""
    return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, None)


def compressed_frequencies(config: ModelConfig) -> np.ndarray:
    """Frequencies of layers with global KV: theta 160000 with YaRN."""
    return inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)


def rotate(
    x: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array | np.ndarray,
    compute: Compute,
    inverse: bool = False,
) -> jax.Array:
    """Rotates the last 2 * frequencies.shape[0] columns of x, adjacent pairs, by position *
    frequency.

    Args:
      x: [T, ..., D].
      positions: [T] int32 absolute positions; the angle is their float32 product with a frequency.
      frequencies: [R / 2] float32, where R is the number of columns that turn.
      compute: rounding of the result.
      inverse: rotate backwards.
    """
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    angles = angles.reshape(x.shape[0], *[1] * (x.ndim - 2), frequencies.shape[0])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if inverse:
        sin = -sin
    return turn(x, cos, sin, compute)


def turns(positions: jax.Array, frequencies: jax.Array | np.ndarray) -> Turn:
    """`rotate`'s angles, for the kernels that turn what they read or write."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return Turn(jnp.cos(angles), jnp.sin(angles))
