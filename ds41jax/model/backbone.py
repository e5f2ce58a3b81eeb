"""The text model: embedding, layers, head; whole, or split where bounded prefill splits it.

Layers of equal kind that follow each other share one compiled body, and so do repeated pairs of
such runs, so a program of 40 layers compiles a dozen bodies.

Letters: T rows, S streams, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import LayerKind, ModelConfig
from ds41jax.formats import Numerics, values
from ds41jax.kernels.linear import dot
from ds41jax.kernels.rows import map_rows
from ds41jax.model import attention, compressor, indexer
from ds41jax.model.block import BlockWeights, attention_input, block
from ds41jax.model.engram import engram
from ds41jax.model.hyper_connections import collapse, initial_pre
from ds41jax.model.indexer import Selection
from ds41jax.model.norm import rms_norm
from ds41jax.model.params import Params
from ds41jax.model.state import KVState, StepBatch, ring_rows, ring_slots, write_ring
from ds41jax.model.tensors import at_layer, lookup

Index = jax.Array | int


@struct.dataclass
class Carry:
    """What a layer hands to the next.

    Attributes:
      stream: [T, S, D] residual streams; pre: [T, S] collapse weights.
      state: the caches.
      selection: of the last index source.
      taps: [T, targets, D] what the drafter sees: stream means entering its target layers.
    """

    stream: jax.Array
    pre: jax.Array
    state: KVState
    selection: Selection
    taps: jax.Array


@dataclass(frozen=True)
class Run:
    """A pattern of layers repeated `repeats` times; items are kinds or runs of kinds."""

    pattern: tuple[Any, ...]
    repeats: int

    @property
    def layers(self) -> int:
        inner = sum(item.layers if isinstance(item, Run) else 1 for item in self.pattern)
        return inner * self.repeats


def layer_plan(kinds: Sequence[LayerKind]) -> tuple[Run, ...]:
    """Groups layers into runs of equal kind, then repeated neighbouring pairs of runs into one."""
    runs: list[Run] = []
    for kind in kinds:
        if runs and runs[-1].pattern == (kind,):
            runs[-1] = Run((kind,), runs[-1].repeats + 1)
        else:
            runs.append(Run((kind,), 1))
    plan: list[Run] = []
    while runs:
        pair, repeats = runs[:2], 1
        while runs[2 * repeats : 2 * repeats + 2] == pair:
            repeats += 1
        taken = 2 * repeats if repeats > 1 else 1
        plan.append(Run(tuple(pair), repeats) if repeats > 1 else runs[0])
        runs = runs[taken:]
    return tuple(plan)


def run_layers(
    carry: Carry,
    first: int,
    last: int,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    numerics: Numerics,
) -> Carry:
    """Runs layers first to last - 1."""
    step = partial(layer, params=params, batch=batch, config=config, numerics=numerics)
    for run in layer_plan(config.kinds[first:last]):
        carry = _run(run, first, carry, step)
        first += run.layers
    return carry


def _run(item: Run | LayerKind, first: Index, carry: Carry, step: Callable[..., Carry]) -> Carry:
    if isinstance(item, LayerKind):
        return step(carry, first, item)
    stride = item.layers // item.repeats

    def body(i: Index, carry: Carry) -> Carry:
        at = first + i * stride
        for inner in item.pattern:
            carry = _run(inner, at, carry, step)
            at = at + (inner.layers if isinstance(inner, Run) else 1)
        return carry

    if item.repeats == 1:
        return body(0, carry)
    return lax.fori_loop(0, item.repeats, body, carry)


def layer(
    carry: Carry,
    index: Index,
    kind: LayerKind,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    numerics: Numerics,
) -> Carry:
    """Layer `index`, whose kind is static; the index may be traced."""
    stream, taps = carry.stream, carry.taps
    if kind.engram:
        place = lookup(config.engram_index, index)
        rows = batch.engram.map(lambda x: x[:, place])  # type: ignore[union-attr]
        weights = at_layer(params.engram, place)
        stream = engram(stream, rows, ~batch.is_image, weights, config, numerics)
    if kind.tap:
        mean = numerics.round(jnp.mean(stream.astype(jnp.float32), axis=1))
        taps = taps.at[:, lookup(config.tap_index, index)].set(mean)
    state, selection = carry.state, carry.selection

    def attend(x: jax.Array) -> jax.Array:
        nonlocal state, selection
        out, state, selection = attention_layer(
            x, index, kind, state, selection, params, batch, config, numerics
        )
        return out

    weights = at_layer(params.layers, index)
    stream, pre = block(
        stream,
        carry.pre,
        batch.is_image,
        attend,
        weights,
        config.num_experts_per_tok,
        config,
        numerics,
    )
    return Carry(stream=stream, pre=pre, state=state, selection=selection, taps=taps)


def attention_layer(
    x: jax.Array,
    index: Index,
    kind: LayerKind,
    state: KVState,
    selection: Selection,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[jax.Array, KVState, Selection]:
    """Attention of one layer on its normalised input x [T, D]; writes its rows, reads caches."""
    weights, compressed = at_layer(params.layers.attn, index), kind.ratio > 0
    floor = batch.window_floor
    if kind.past_boundary:
        floor = jnp.maximum(floor, batch.decoder_floor)
    window = attention.window_index(batch, floor, config.sliding_window, ring_rows(config))
    rows = attention.window_rows(x, batch.positions, weights, compressed, config, numerics)
    sources = [(attention.ring_and_step_rows(state.window, index, rows), window)]
    state = state.replace(  # type: ignore[attr-defined]
        window=write_ring(state.window, index, batch, rows)
    )
    latent, q = attention.queries(x, batch.positions, weights, compressed, config, numerics)
    if compressed:
        source = lookup(config.kv_source_index, index)
        if kind.kv_source:
            state = compressor.publish(
                x, params.compressor, source, kind.ratio, state, batch, config, numerics
            )
        if kind.index_source:
            chooser = at_layer(params.indexer, lookup(config.index_source_index, index))
            iq, head_weights = indexer.index_queries(
                x, latent, batch.positions, chooser, config, numerics
            )
            keys = indexer.sequence_keys(state, batch, source, kind.ratio)
            selection, _ = indexer.select(
                iq, head_weights, keys, batch, selection, kind, config, numerics
            )
        chosen = attention.global_index(selection.rows, batch, source)
        sources.append((attention.pool_rows(state), chosen))
    out = attention.attend(
        q, batch.positions, tuple(sources), weights, compressed, config, numerics
    )
    return out, state, selection


def embed(params: Params, batch: StepBatch, config: ModelConfig, numerics: Numerics) -> jax.Array:
    """Token embeddings, or image embeddings on image rows, in every stream: [T, S, D]."""
    x = params.embed[batch.token_ids].astype(numerics.dtype)
    if batch.image_embeds is not None:
        x = jnp.where(batch.is_image[:, None], batch.image_embeds.astype(numerics.dtype), x)
    return jnp.repeat(x[:, None], config.hc_mult, axis=1)


def start(
    stream: jax.Array,
    pre: jax.Array,
    state: KVState,
    batch: StepBatch,
    config: ModelConfig,
    numerics: Numerics,
) -> Carry:
    """The carry that enters a first layer."""
    shape = (stream.shape[0], len(config.dspark_target_layer_ids), config.hidden_size)
    return Carry(
        stream=stream,
        pre=pre,
        state=state,
        selection=indexer.empty_selection(batch, config),
        taps=jnp.zeros(shape, numerics.dtype),
    )


def head(
    carry: Carry, params: Params, batch: StepBatch, config: ModelConfig, numerics: Numerics
) -> jax.Array:
    """Float32 logits [rows, V] of the rows that the batch wants."""
    weight = values(params.head)

    def tile(stream: jax.Array, pre: jax.Array) -> jax.Array:
        x = collapse(stream, pre, numerics)
        return dot(rms_norm(x, params.norm, config.rms_norm_eps, numerics), weight)

    return map_rows(tile, carry.stream[batch.logit_rows], carry.pre[batch.logit_rows])


def _finish(
    carry: Carry, params: Params, batch: StepBatch, config: ModelConfig, numerics: Numerics
) -> tuple[KVState, jax.Array, jax.Array]:
    logits = head(carry, params, batch, config, numerics)
    return carry.state, logits, carry.taps.reshape(carry.taps.shape[0], -1)


def forward(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, numerics: Numerics
) -> tuple[KVState, jax.Array, jax.Array]:
    """Every layer on every row: exact prefill, decoding, verification.

    Returns:
      The caches, logits [rows, V] float32 of `batch.logit_rows`, and what conditions the drafter,
      [T, targets * D].
    """
    stream = embed(params, batch, config, numerics)
    carry = start(stream, initial_pre(stream.shape[0], config), state, batch, config, numerics)
    carry = run_layers(carry, 0, config.num_hidden_layers, params, batch, config, numerics)
    return _finish(carry, params, batch, config, numerics)


def encode(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, numerics: Numerics
) -> KVState:
    """The first part of a bounded prefill: the layers before the last KV source, and its caches.

    The source's window and global rows are written for every row; the streams of a sequence's last
    W rows stay in the state for `decode_suffix`.
    """
    boundary = config.boundary_layer
    assert boundary is not None, "bounded prefill needs a KV source"
    stream = embed(params, batch, config, numerics)
    carry = start(stream, initial_pre(stream.shape[0], config), state, batch, config, numerics)
    carry = run_layers(carry, 0, boundary, params, batch, config, numerics)
    state, kind = carry.state, config.kinds[boundary]
    weights: BlockWeights = at_layer(params.layers, boundary)
    x = attention_input(carry.stream, carry.pre, weights, config, numerics)
    rows = attention.window_rows(x, batch.positions, weights.attn, True, config, numerics)
    state = state.replace(  # type: ignore[attr-defined]
        window=write_ring(state.window, boundary, batch, rows)
    )
    source = config.kv_source_index[boundary]
    state = compressor.publish(
        x, params.compressor, source, kind.ratio, state, batch, config, numerics
    )
    slots, index = ring_slots(batch, config.sliding_window)
    return state.replace(  # type: ignore[attr-defined]
        suffix_stream=state.suffix_stream.at[slots, index].set(carry.stream, mode="drop"),
        suffix_pre=state.suffix_pre.at[slots, index].set(carry.pre, mode="drop"),
    )


def decode_suffix(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, numerics: Numerics
) -> tuple[KVState, jax.Array, jax.Array]:
    """The second part of a bounded prefill, on a prompt's last W rows after all chunks are encoded.

    The last KV source runs again for these rows, with equal results where it wrote already; later
    layers see no window row below `batch.decoder_floor`. Returns what `forward` does.
    """
    boundary = config.boundary_layer
    assert boundary is not None, "bounded prefill needs a KV source"
    slots = jnp.minimum(batch.slots, state.suffix_pre.shape[0] - 1)
    index = batch.positions % config.sliding_window
    stream, pre = state.suffix_stream[slots, index], state.suffix_pre[slots, index]
    carry = start(stream, pre, state, batch, config, numerics)
    carry = run_layers(carry, boundary, config.num_hidden_layers, params, batch, config, numerics)
    return _finish(carry, params, batch, config, numerics)
