"""Several cards as one: which weights are split over them, and how their results meet.

Every card runs the same program on whole rows and its own part of the weights. Caches and
activations are whole on every card; cards meet where a split sum ends and where split columns are
wanted together. Partial sums travel in float32 and every card adds them in the cards' order, so
that all hold the same bits.

Letters: T rows, D columns, N columns of one card, V vocabulary.
"""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "cards"


class Part(enum.Enum):
    """What can be split, each for itself.

    ATTENTION: query heads, their sinks and output groups. EXPERTS: the hidden columns of routed
    and shared experts. VOCABULARY: rows of the embedding and of the head.
    """

    ATTENTION = "attention"
    EXPERTS = "experts"
    VOCABULARY = "vocabulary"


ALL_PARTS = frozenset(Part)


@dataclass(frozen=True)
class Cards:
    """A mesh whose one axis is `AXIS`, and the parts that are split over it."""

    mesh: Any  # Mesh, or AbstractMesh where a program is only lowered
    parts: frozenset[Part] = ALL_PARTS

    @property
    def count(self) -> int:
        return int(self.mesh.size)

    def splits(self, part: Part) -> bool:
        """Whether each card holds a share of `part`; a single card holds everything."""
        return self.count > 1 and part in self.parts


def sum_of_cards(partial: jax.Array) -> jax.Array:
    """The cards' float32 partial sums, added in the cards' order: equal bits on every card."""
    parts = lax.all_gather(partial.astype(jnp.float32), AXIS)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def join_columns(columns: jax.Array) -> jax.Array:
    """[T, N] of every card to [T, cards * N], in the cards' order. Nothing is computed."""
    return lax.all_gather(columns, AXIS, axis=columns.ndim - 1, tiled=True)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [T, D] of a table whose rows [V / cards, D] lie on this card, the others on theirs."""
    size = table.shape[0]
    found = lax.all_gather(table[ids % size], AXIS)
    return found[ids // size, jnp.arange(ids.shape[0])]
