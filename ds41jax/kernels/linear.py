"""Matrix products of the dense weights: what is quantised, accumulated and rounded where.

Weights are [out, in]; products accumulate in float32. The official FP8 product adds float32 partial
sums of 32-wide blocks in K order; codes times power-of-two scales are exact in float32, so only the
order of the same sum differs here.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.formats import Format
from ds41jax.kernels.compute import Compute


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., in] by [out, in] -> [..., out] in float32, at full precision."""
    return lax.dot_general(
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        (((x.ndim - 1,), (w.ndim - 1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def linear(x: jax.Array, w: jax.Array, compute: Compute) -> jax.Array:
    """A product with an unquantised weight, rounded once. x [..., in], w [out, in]."""
    return compute.round(dot(x, w))


def quantized_linear(x: jax.Array, w: jax.Array, compute: Compute) -> jax.Array:
    """A product with a quantised weight, given as its values; the input is quantised to FP8."""
    return compute.round(dot(compute.fake_quantize(x, Format.FP8_GROUP), w))


def grouped_linear(x: jax.Array, w: jax.Array, compute: Compute) -> jax.Array:
    """Block-diagonal product: x [..., G, in] by w [G, out, in] -> [..., G, out]; input as is."""
    product = jnp.einsum(
        "...gd,grd->...gr",
        x.astype(jnp.float32),
        w,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return compute.round(product)
