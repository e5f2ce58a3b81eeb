"""Moves inside the caches: snapshots between slots, shared pages to their own copies."""

import dataclasses
from functools import partial
from typing import Any

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


@jax.jit
def read_slot(state: KVState, slot: jax.Array) -> Any:
    """What a sequence keeps in its slot, as arrays of their own: a tree that `write_slot` takes."""
    stacked = (state.window, state.carry, state.draft_window)
    flat = (state.suffix_stream, state.suffix_pre)
    return jax.tree.map(lambda x: x[:, slot], stacked), jax.tree.map(lambda x: x[slot], flat)


@partial(jax.jit, donate_argnames=("state",))
def write_slot(state: KVState, slot: jax.Array, kept: Any) -> KVState:
    """Puts what `read_slot` gave into a slot."""
    (window, carry, draft_window), (stream, pre) = kept
    into = partial(jax.tree.map, lambda x, new: x.at[:, slot].set(new))
    return dataclasses.replace(
        state,
        window=into(state.window, window),
        carry=into(state.carry, carry),
        draft_window=into(state.draft_window, draft_window),
        suffix_stream=state.suffix_stream.at[slot].set(stream),
        suffix_pre=state.suffix_pre.at[slot].set(pre),
    )


@jax.jit
def read_page(state: KVState, page: jax.Array) -> Any:
    """One page's rows and index keys, as arrays of their own."""
    return jax.tree.map(lambda x: x[page], (state.pages, state.index_pages))


@partial(jax.jit, donate_argnames=("state",))
def write_page(state: KVState, page: jax.Array, kept: Any) -> KVState:
    """Puts what `read_page` gave into a page."""
    pages, index_pages = jax.tree.map(
        lambda x, new: x.at[page].set(new), (state.pages, state.index_pages), kept
    )
    return dataclasses.replace(state, pages=pages, index_pages=index_pages)
