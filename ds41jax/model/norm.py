"""RMS normalisation."""

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.kernels.compute import Compute
from ds41jax.kernels.norm import mean_square


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, compute: Compute) -> jax.Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in float32, rounded once.

    With the text model's eps of 1e-20 a row of zeros stays zero and tiny rows are scaled up in
    full.
    """
    scale = lax.rsqrt(mean_square(x, compute) + eps)
    return compute.round(weight.astype(jnp.float32) * (x.astype(jnp.float32) * scale))
