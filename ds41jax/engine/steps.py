"""The compiled programs of a step. State is donated; shapes come from the row buckets."""

from functools import partial

import jax

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute
from ds41jax.model import backbone, drafter
from ds41jax.model.drafter import Draft
from ds41jax.model.params import Params
from ds41jax.model.sharding import over_cards
from ds41jax.model.state import KVState, StepBatch

_program = partial(jax.jit, static_argnames=("config", "compute"), donate_argnames=("state",))


def _with_draft_rows(
    result: tuple[KVState, jax.Array, jax.Array],
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[KVState, jax.Array, jax.Array]:
    state, logits, main_hidden = result
    if params.drafter is not None:
        state = drafter.absorb(params.drafter, state, main_hidden, batch, config, compute)
    return state, logits, main_hidden


@_program
@over_cards
def full_step(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> tuple[KVState, jax.Array, jax.Array]:
    """All layers on all rows; the drafter's rings follow. See `backbone.forward`."""
    result = backbone.forward(params, state, batch, config, compute)
    return _with_draft_rows(result, params, batch, config, compute)


@_program
@over_cards
def encode_step(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> KVState:
    """One chunk of a bounded prefill. See `backbone.encode`."""
    return backbone.encode(params, state, batch, config, compute)


@_program
@over_cards
def suffix_step(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> tuple[KVState, jax.Array, jax.Array]:
    """The end of a bounded prefill; the drafter's rings follow. See `backbone.decode_suffix`."""
    result = backbone.decode_suffix(params, state, batch, config, compute)
    return _with_draft_rows(result, params, batch, config, compute)


@partial(jax.jit, static_argnames=("config", "compute"))
@over_cards
def draft_step(
    params: Params,
    state: KVState,
    slots: jax.Array,
    anchors: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> Draft:
    """A drafted block for every sequence. See `drafter.draft`."""
    return drafter.draft(
        params.drafter, params.embed, params.head, state, slots, anchors, positions, config, compute
    )
