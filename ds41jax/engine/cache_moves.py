"""Moves inside the caches: snapshots between slots, shared pages to their own copies."""

import dataclasses
from functools import partial

import jax

from ds41jax.model.state import KVState


@partial(jax.jit, donate_argnames=("state",))
def copy_slot(state: KVState, source: jax.Array, target: jax.Array) -> KVState:
    """Everything that a sequence keeps in its slot, copied to another slot."""

    def stacked(x: jax.Array) -> jax.Array:
        return x.at[:, target].set(x[:, source])

    def flat(x: jax.Array) -> jax.Array:
        return x.at[target].set(x[source])

    return dataclasses.replace(
        state,
        window=jax.tree.map(stacked, state.window),
        carry=stacked(state.carry),
        draft_window=jax.tree.map(stacked, state.draft_window),
        suffix_stream=flat(state.suffix_stream),
        suffix_pre=flat(state.suffix_pre),
    )


@partial(jax.jit, donate_argnames=("state",))
def copy_pages(state: KVState, sources: jax.Array, targets: jax.Array) -> KVState:
    """Pages of the pool copied to other pages; targets out of range are dropped."""

    def move(x: jax.Array) -> jax.Array:
        return x.at[targets].set(x[sources], mode="drop")

    return dataclasses.replace(
        state,
        pages=jax.tree.map(move, state.pages),
        index_pages=jax.tree.map(move, state.index_pages),
    )
