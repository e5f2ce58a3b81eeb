"""Held-out bits per byte, rounded as the model is shipped and without any rounding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ds41jax.config import ModelConfig
from ds41jax.formats import Numerics
from ds41jax.kernels.compute import Compute
from ds41jax.model.engram_hash import EngramHash
from ds41jax.tokenizer import Tokenizer
from ds41jax.training.batches import Rows, Shape, make_batch
from ds41jax.training.losses import token_losses
from ds41jax.training.masters import Masters


def bits_per_byte(
    masters: Masters,
    rows: Rows,
    tokenizer: Tokenizer,
    config: ModelConfig,
    hash_: EngramHash | None,
    compute: Compute,
    batch_rows: int = 16,
) -> float:
    """Over the held-out targets of full weight: corpus text and assistants' turns."""
    shape = Shape(batch_rows, rows.tokens.shape[1] - 1)
    loss = jax.jit(partial(token_losses, shape=shape, config=config, compute=compute))
    lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    nats, size = 0.0, 0
    for at in range(0, len(rows.tokens) - batch_rows + 1, batch_rows):
        span = slice(at, at + batch_rows)
        batch = make_batch(rows.tokens[span], rows.weights[span], config, hash_)
        counted = batch.weights >= 1
        nats += float((loss(masters, batch=jax.tree.map(jnp.asarray, batch)) * counted).sum())
        size += int(lengths[batch.targets[counted]].sum())
    return nats / np.log(2) / max(size, 1)


def quantised_bits(
    masters: Masters,
    rows: Rows,
    tokenizer: Tokenizer,
    config: ModelConfig,
    hash_: EngramHash | None,
    compute: Compute,
) -> dict[str, float]:
    """Bits per byte as shipped alone, enough to compare runs of one length."""
    return {"quantised": bits_per_byte(masters, rows, tokenizer, config, hash_, compute)}


def both_bits(
    masters: Masters,
    rows: Rows,
    tokenizer: Tokenizer,
    config: ModelConfig,
    hash_: EngramHash | None,
    compute: Compute,
) -> dict[str, float]:
    """Bits per byte as shipped and unrounded."""
    plain = Compute(Numerics.FLOAT32, differentiable=True)
    unquantised = bits_per_byte(masters, rows, tokenizer, config, hash_, plain)
    return quantised_bits(masters, rows, tokenizer, config, hash_, compute) | {
        "unquantised": unquantised
    }
