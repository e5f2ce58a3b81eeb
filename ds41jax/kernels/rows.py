"""Row independence on the jnp path: every row-wise computation runs in tiles of one fixed size.

A plain dot in XLA's CPU backend changes a row's bits with the number of rows beside it. Here each
tile is the same computation on the same shapes whatever the step holds, so a row's result depends
on that row alone (design invariant 2), at the cost of a padded last tile.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.kernels.compute import Compute

ROW_TILE = 8

T = TypeVar("T")


def map_rows(compute: Compute, function: Callable[..., T], *rows: Any, tile: int = ROW_TILE) -> T:
    """Applies `function` to tiles of rows.

    Args:
      compute: which kernels run; the jnp ones need the tiles. On a GPU `function` takes all rows at
        once: its products are kernels that keep rows apart themselves. So it does in training,
        where nothing keeps them apart.
      function: takes arrays (or trees of them) of `tile` rows, returns a tree of `tile`-row arrays,
        and treats every row alike and apart. What it closes over is shared by all rows.
      *rows: trees of arrays with the same number of rows on their first axis.
      tile: rows a tile; part of a result's identity, so never chosen by the number of rows.

    Returns:
      The results with the rows' first axis restored.
    """
    if compute.on_gpu or compute.differentiable:
        return function(*rows)
    count = jax.tree.leaves(rows)[0].shape[0]
    tiles = max(
        2, -(-count // tile)
    )  # XLA inlines a loop of one trip, which can change its fusions

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, tiles * tile - count)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(tiles, tile, *x.shape[1:])

    out = lax.map(lambda args: function(*args), jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(tiles * tile, *x.shape[2:])[:count], out)
