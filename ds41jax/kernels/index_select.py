"""Which global rows a query attends to: index scores, candidate blocks, top-k. Ties: lowest index.

Letters: T queries, H index heads, D index width, N rows of a sequence, B blocks of rows, K
  selected.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import dot


def index_scores(
    q: jax.Array, head_weights: jax.Array, keys: jax.Array, compute: Compute
) -> jax.Array:
    """Sum over heads of weight * relu(q . k) for one query, in the activation dtype's precision.

    Args:
      q: [H, D] quantised queries as values.
      head_weights: [H], already scaled, in the activation dtype.
      keys: [N, D] quantised keys as values.

    Returns:
      [N] float32 scores; products, weighted products and their sum are each rounded.
    """
    scores = compute.round(dot(q, keys)).astype(jnp.float32)
    weighted = jax.nn.relu(scores) * head_weights.astype(jnp.float32)[:, None]
    total = compute.round(weighted).astype(jnp.float32).sum(0)
    return compute.round(total).astype(jnp.float32) + 0.0  # -0 would lose its ties against +0


def candidate_blocks(
    scores: jax.Array, visible: jax.Array, top_blocks: int, block: int
) -> jax.Array:
    """Blocks of rows that later index sources may choose within (one query).

    Args:
      scores: [N] scores, -inf where not visible.
      visible: scalar number of visible rows.
      top_blocks: blocks kept; the block of the newest visible row is always among them.
      block: rows a block.

    Returns:
      [ceil(N / block)] bool.
    """
    padded = jnp.pad(scores, (0, -scores.shape[0] % block), constant_values=-jnp.inf)
    best = padded.reshape(-1, block).max(-1)
    newest = (visible - 1) // block
    best = jnp.where(jnp.arange(best.shape[0]) == newest, jnp.inf, best)
    top, index = lax.top_k(best, min(top_blocks, best.shape[0]))
    return jnp.zeros(best.shape, bool).at[index].set(top > -jnp.inf)


def top_rows(scores: jax.Array, k: int) -> jax.Array:
    """The k best rows of scores [N] above -inf, ascending, then -1; ties go to the lowest index."""
    n = scores.shape[0]
    top, index = lax.top_k(scores, min(k, n))
    ascending = jnp.sort(jnp.where(top > -jnp.inf, index, n))
    return jnp.pad(
        jnp.where(ascending < n, ascending, -1), (0, k - len(ascending)), constant_values=-1
    )
