"""Both ends of the vocabulary, whole or with its rows shared out over cards; equal bits either way.

Letters: T rows, D hidden size, V vocabulary.
"""

import jax

from ds41jax.kernels.cards import Part, join_columns, take_rows
from ds41jax.kernels.compute import Compute


def token_rows(table: jax.Array, token_ids: jax.Array, compute: Compute) -> jax.Array:
    """Embeddings [T, D] in the activation dtype; table [V, D], or this card's rows of it."""
    shared = compute.splits(Part.VOCABULARY)
    return (take_rows(table, token_ids) if shared else table[token_ids]).astype(compute.dtype)


def whole_logits(logits: jax.Array, compute: Compute) -> jax.Array:
    """Logits [T, V] of products with the head, or with this card's rows of it."""
    return join_columns(logits) if compute.splits(Part.VOCABULARY) else logits
