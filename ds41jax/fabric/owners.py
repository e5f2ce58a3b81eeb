"""Which group computes which expert of a step, where experts are replicated.

A pure function of the layer and the histogram of the step's choices: repeats agree. The native
library computes the same plan; this is its definition, and what the in-process exchange uses.
"""

import jax
import jax.numpy as jnp
from jax import lax

WEIGHT_COST = 4  # reading an expert's weights, in units of a tile of its rows
TILE_ROWS = 16


def _hashed(x: jax.Array) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fixed_owners(experts: int, groups: tuple[int, ...]) -> jax.Array:
    """[experts] int32: by the expert's number."""
    return jnp.asarray(groups, jnp.int32)[jnp.arange(experts) % len(groups)]


def balanced_owners(
    ids: jax.Array, live: jax.Array, layer: jax.Array | int, experts: int, groups: tuple[int, ...]
) -> jax.Array:
    """The dearest experts first, each to the least loaded group; ties by a hash of the layer.

    Args:
      ids: [T, K] int32 chosen experts.
      live: [T] bool, False for padding rows, which do not count.
      layer: of the model.
      groups: that are alive, ascending.

    Returns:
      [experts] int32 owning group of each.
    """
    layer = jnp.asarray(layer, jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[ids].add(live[:, None].astype(jnp.int32))
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    cost = jnp.where(counts > 0, WEIGHT_COST + tiles, 0)
    number = jnp.arange(experts)
    ties = _hashed((layer.astype(jnp.uint32) << 16) ^ number.astype(jnp.uint32))
    order = jnp.lexsort((number, ties, -cost))
    size = len(groups)
    turn = (jnp.arange(size) + layer) % size
    alive = jnp.asarray(groups, jnp.int32)

    def give(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        load, owners = carry
        expert = order[i]
        best = jnp.argmin(load * size + turn)
        mine = jnp.where(cost[expert] > 0, alive[best], owners[expert])
        return load.at[best].add(cost[expert]), owners.at[expert].set(mine)

    start = (jnp.zeros(size, jnp.int32), fixed_owners(experts, groups))
    return lax.fori_loop(0, experts, give, start)[1]
