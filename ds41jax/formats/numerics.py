"""What is rounded where: the checkpoint's own arithmetic, or none of its quantisers."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.formats.quantized import Format, QuantizedArray, decode, encode


class Numerics(enum.Enum):
    """Static choice of arithmetic, passed to every function of the model.

    REFERENCE rounds as the official implementation does: activations between operations are
    bfloat16, inputs of quantised products FP8, caches FP8 and FP4. FLOAT32 switches every
    activation and cache quantiser and every rounding off; weights keep their stored values. It is
    not a mode of the official
    code: it is continuous, so it shows wiring errors that quantisation noise would hide.
    """

    REFERENCE = "reference"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations between operations."""
        return jnp.dtype(jnp.bfloat16 if self is Numerics.REFERENCE else jnp.float32)

    def round(self, x: jax.Array) -> jax.Array:
        """Rounds float32 to the activation dtype.

        XLA may drop a float32 -> bfloat16 -> float32 pair of conversions (it allows itself excess
        precision); reduce_precision states the rounding so that it stays.
        """
        if self is Numerics.FLOAT32:
            return x
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)

    def quantize(self, x: jax.Array, format: Format) -> QuantizedArray | jax.Array:
        """Quantises for storage or for a product; the identity (as float32) in FLOAT32."""
        if self is Numerics.FLOAT32:
            return x.astype(jnp.float32)
        return encode(x, format)

    def fake_quantize(self, x: jax.Array, format: Format) -> jax.Array:
        """The float32 values that `x` has after quantisation."""
        return values(self.quantize(x, format))


@jax.custom_vjp
def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`, with the gradient of `x`: how a quantiser is trained through (arXiv 1308.3432)."""
    return rounded


def _straight_forward(x: jax.Array, rounded: jax.Array) -> tuple[jax.Array, None]:
    return rounded, None


def _straight_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.zeros_like(gradient)


straight_through.defvjp(_straight_forward, _straight_backward)


@jax.custom_vjp
def steer(x: jax.Array, target: jax.Array, gradient: jax.Array) -> jax.Array:
    """`x` unchanged; while training, `target` receives `gradient` whatever the loss is.

    For what no loss reaches through a choice of the best few: selection biases, index scores.
    """
    return x


def _steer_forward(
    x: jax.Array, target: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return x, (gradient,)


def _steer_backward(
    kept: tuple[jax.Array, ...], incoming: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return incoming, kept[0], jnp.zeros_like(kept[0])


steer.defvjp(_steer_forward, _steer_backward)


def values(x: Any) -> Any:
    """Float32 values of an array that may be quantised."""
    return decode(x) if isinstance(x, QuantizedArray) else x.astype(jnp.float32)
