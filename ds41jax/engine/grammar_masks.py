"""Masks on the device."""

import jax
import jax.numpy as jnp


def apply_masks(logits: jax.Array, words: jax.Array) -> jax.Array:
    """Logits [T, V] with minus infinity where a bit of `words` [T, ceil(V / 32)] int32 is unset.

    Rows without a constraint pass words of -1. Bits beyond V are ignored. What the logits hold in a
    forbidden place, NaN included, is never read.
    """
    rows, width = logits.shape
    assert words.shape == (rows, -(-width // 32)), (logits.shape, words.shape)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(rows, -1)[:, :width] == 1
    return jnp.where(allowed, logits, -jnp.inf)
