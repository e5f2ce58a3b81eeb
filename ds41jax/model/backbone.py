"""The text model: embedding, layers, head; whole, or split where bounded prefill splits it.

Layers of equal kind that follow each other share one compiled body, and so do repeated pairs of
such runs, so a program of 40 layers compiles a dozen bodies.

Letters: T rows, S streams, D hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig, SelectRole
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import operand, project
from ds41jax.kernels.quantize import Input
from ds41jax.kernels.rows import map_rows
from ds41jax.model import attention, compressor, indexer
from ds41jax.model.block import BlockWeights, attention_input, block
from ds41jax.model.engram import engram
from ds41jax.model.hyper_connections import collapse, initial_pre
from ds41jax.model.indexer import Selection
from ds41jax.model.moe import placed_moe
from ds41jax.model.norm import rms_norm
from ds41jax.model.params import Params
from ds41jax.model.rope import compressed_frequencies, plain_frequencies
from ds41jax.model.state import KVState, StepBatch, put, ring_rows, ring_slots, write_ring
from ds41jax.model.tensors import at_layer, choose, lookup
from ds41jax.model.vocabulary import token_rows, whole_logits

_KEPT = jax.checkpoint_policies.save_only_these_names(indexer.CHOSEN)  # by a training step

Index = jax.Array | int
T = TypeVar("T")


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


def run_layers(
    carry: Carry,
    first: int,
    last: int,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> Carry:
    """Runs layers first to last - 1: all through one compiled body, or unrolled on a GPU.

    Unrolled, every choice that a layer's index makes is static, and its weights are read in place.
    """
    if compute.on_gpu or compute.differentiable:
        for index in range(first, last):
            run: Callable[..., Carry] = partial(layer, index=index, config=config, compute=compute)
            if compute.differentiable:
                run = jax.checkpoint(run, policy=_KEPT)
            carry = run(carry, params=params, batch=batch)
        return carry

    def body(index: Index, carry: Carry) -> Carry:
        return layer(carry, index, params, batch, config, compute)

    return lax.fori_loop(first, last, body, carry)


def layer(
    carry: Carry,
    index: Index,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> Carry:
    """One layer. What it does follows from its index, which may be traced."""
    stream = add_engram(carry.stream, index, params, batch, config, compute)
    taps = carry.taps
    if taps.shape[1] and (not isinstance(index, int) or config.tap_index[index] >= 0):
        mean = compute.round(jnp.mean(stream.astype(jnp.float32), axis=1))
        tap = lookup(config.tap_index, index)
        taps = taps.at[:, jnp.where(tap < 0, taps.shape[1], tap)].set(mean, mode="drop")
    state = keep_suffix(carry, index, batch, config, compute)
    selection = carry.selection

    def attend(x: Input) -> jax.Array:
        nonlocal state, selection
        out, state, selection = attention_layer(
            x, index, state, selection, params, batch, config, compute
        )
        return out

    weights = at_layer(params.layers, index, in_place=compute.on_gpu)

    def feed_forward(x: Input) -> jax.Array:
        nonlocal state
        out, fault = placed_moe(x, index, state.fault, weights.ffn, batch, config, compute)
        state = dataclasses.replace(state, fault=fault)
        return out

    k, elsewhere = config.num_experts_per_tok, None if compute.exchange is None else feed_forward
    stream, pre = block(
        stream, carry.pre, batch.is_image, attend, weights, k, config, compute, elsewhere
    )
    return Carry(stream=stream, pre=pre, state=state, selection=selection, taps=taps)


def add_engram(
    stream: jax.Array,
    index: Index,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """The streams with the layer's Engram lookup added, if it has one."""
    if not config.engram_layer_ids:
        return stream
    rows = batch.engram
    assert rows is not None, "this model needs Engram rows in its batch"
    place = lookup(config.engram_index, index)

    def look_up() -> jax.Array:
        mine = at_layer(params.engram, place)
        return engram(
            stream,
            jax.tree.map(lambda x: x[:, place], rows),
            ~batch.is_image,
            mine,
            config,
            compute,
        )

    has_engram = tuple(int(place >= 0) for place in config.engram_index)
    return choose(lookup(has_engram, index), (lambda: stream, look_up))


def attention_layer(
    x: Input,
    index: Index,
    state: KVState,
    selection: Selection,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, KVState, Selection]:
    """Attention of one layer on its normalised input x [T, D]; writes its rows, reads caches."""
    weights = at_layer(params.layers.attn, index, in_place=compute.on_gpu)
    frequencies = layer_frequencies(config, index)
    rows, latent, q = attention.rows_and_queries(
        x, batch.positions, weights, frequencies, config, compute
    )
    floor = window_floor(batch, index, config)
    window = attention.window_index(batch, floor, config.sliding_window, ring_rows(config))
    ring = attention.ring_and_step_rows(state.window, index, batch.slots, rows, compute)
    sources = [(ring, window)]
    if config.kv_source_layer_ids:
        state = publish(x, index, state, params, batch, config, compute)
        selection = select(x, latent, index, state, selection, params, batch, config, compute)
        reads = lookup(config.layer_ratios, index) > 0
        if reads is not False:
            source = jnp.maximum(lookup(config.kv_source_index, index), 0)
            chosen = attention.global_index(selection.rows, batch, source)
            sources.append((attention.pool_rows(state), jnp.where(reads, chosen, -1)))
    guide = selection.scores if len(sources) > 1 else None
    out = attention.attend(
        q, batch.positions, tuple(sources), weights, frequencies, config, compute, guide
    )
    if compute.on_gpu:  # the ring is written in place, so the read must come first
        rows, out = lax.optimization_barrier((rows, out))
    state = dataclasses.replace(state, window=write_ring(state.window, index, batch, rows, compute))
    return out, state, selection


def layer_frequencies(config: ModelConfig, index: Index) -> jax.Array:
    """[rotary pairs] frequencies of a layer: YaRN where it reads global KV, plain elsewhere."""
    both = np.stack([plain_frequencies(config), compressed_frequencies(config)])
    compressed = tuple(int(ratio > 0) for ratio in config.layer_ratios)
    return jnp.asarray(both)[lookup(compressed, index)]


def window_floor(batch: StepBatch, index: Index, config: ModelConfig) -> jax.Array:
    """[S] positions below which the layer has no window rows."""
    boundary = config.boundary_layer
    if boundary is None:
        return batch.window_floor
    decoder = jnp.maximum(batch.window_floor, batch.decoder_floor)
    return jnp.where(index > boundary, decoder, batch.window_floor)


def publish(
    x: Input,
    index: Index,
    state: KVState,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> KVState:
    """Writes the layer's global rows and index keys, if it is a KV source."""
    variants = sorted(set(config.publish_ratios))
    which = lookup(tuple(variants.index(ratio) for ratio in config.publish_ratios), index)
    if isinstance(which, int) and variants[which] == 0:
        return state
    source = jnp.maximum(lookup(config.kv_source_index, index), 0)

    def make(ratio: int) -> compressor.GlobalRows:
        if ratio == 0:
            return compressor.no_global_rows(x.shape[0], config, compute)
        return compressor.compress(
            x, params.compressor, source, ratio, state.carry, batch, config, compute
        )

    made = choose(which, [partial(make, ratio) for ratio in variants])
    return compressor.store(made, source, state, batch, config, compute)


def select(
    x: Input,
    latent: Input,
    index: Index,
    state: KVState,
    selection: Selection,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> Selection:
    """The selection that the layer attends to: its own if it is an index source."""
    source = lookup(config.kv_source_index, index)
    place = lookup(config.index_source_index, index)

    def score(role: SelectRole, ratio: int) -> Selection:
        chooser = at_layer(params.indexer, place)
        apart = lax.stop_gradient((x, latent))  # the indexer learns from attention alone
        q, head_weights = indexer.index_queries(*apart, batch.positions, chooser, config, compute)
        keys = indexer.sequence_keys(state, batch, source, ratio, compute)
        chosen, _ = indexer.select(
            q, head_weights, keys, batch, selection, role, ratio, config, compute
        )
        return chosen

    variants = sorted(set(zip(config.select_roles, config.layer_ratios, strict=True)))
    which = tuple(
        variants.index(v) for v in zip(config.select_roles, config.layer_ratios, strict=True)
    )
    branches: list[Callable[[], Selection]] = [
        (lambda: selection) if role is SelectRole.REUSE else partial(score, role, ratio)
        for role, ratio in variants
    ]
    return choose(lookup(which, index), branches)


def embed(params: Params, batch: StepBatch, config: ModelConfig, compute: Compute) -> jax.Array:
    """Token embeddings, or image embeddings on image rows, in every stream: [T, S, D]."""
    x = token_rows(params.embed, batch.token_ids, compute)
    if batch.image_embeds is not None:
        x = jnp.where(batch.is_image[:, None], batch.image_embeds.astype(compute.dtype), x)
    return jnp.repeat(x[:, None], config.hc_mult, axis=1)


def start(
    stream: jax.Array,
    pre: jax.Array,
    state: KVState,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> Carry:
    """The carry that enters a first layer."""
    if state.fault is not None:
        state = dataclasses.replace(state, fault=jnp.int32(0))
    shape = (stream.shape[0], len(config.dspark_target_layer_ids), config.hidden_size)
    return Carry(
        stream=stream,
        pre=pre,
        state=state,
        selection=indexer.empty_selection(batch, config),
        taps=jnp.zeros(shape, compute.dtype),
    )


def head(
    carry: Carry, params: Params, batch: StepBatch, config: ModelConfig, compute: Compute
) -> jax.Array:
    """Float32 logits [rows, V] of the rows that the batch wants."""
    weight = operand(params.head, compute)

    def tile(stream: jax.Array, pre: jax.Array) -> jax.Array:
        x = collapse(stream, pre, compute)
        x = rms_norm(x, params.norm, config.rms_norm_eps, compute)
        return project(x, weight, compute)

    wanted = batch.logit_rows
    logits = map_rows(compute, tile, carry.stream[wanted], carry.pre[wanted])
    return whole_logits(logits, compute)


def _finish(
    carry: Carry, params: Params, batch: StepBatch, config: ModelConfig, compute: Compute
) -> tuple[KVState, jax.Array, jax.Array]:
    logits = head(carry, params, batch, config, compute)
    return carry.state, logits, carry.taps.reshape(carry.taps.shape[0], -1)


def forward(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> tuple[KVState, jax.Array, jax.Array]:
    """Every layer on every row: exact prefill, decoding, verification.

    Returns:
      The caches, logits [rows, V] float32 of `batch.logit_rows`, and what conditions the drafter,
      [T, targets * D].
    """
    stream = embed(params, batch, config, compute)
    carry = start(stream, initial_pre(stream.shape[0], config), state, batch, config, compute)
    carry = run_layers(carry, 0, config.num_hidden_layers, params, batch, config, compute)
    return _finish(carry, params, batch, config, compute)


def encode(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> KVState:
    """The first part of a bounded prefill: the layers before the last KV source, and its caches.

    The source's window and global rows are written for every row; the streams of a sequence's last
    W rows stay in the state for `decode_suffix`.
    """
    boundary = config.boundary_layer
    assert boundary is not None, "bounded prefill needs a KV source"
    stream = embed(params, batch, config, compute)
    carry = start(stream, initial_pre(stream.shape[0], config), state, batch, config, compute)
    carry = run_layers(carry, 0, boundary, params, batch, config, compute)
    state = carry.state
    weights: BlockWeights = at_layer(params.layers, boundary)
    frequencies = layer_frequencies(config, boundary)
    x = attention_input(carry.stream, carry.pre, weights, config, compute)
    rows = attention.window_rows(x, batch.positions, weights.attn, frequencies, config, compute)
    state = dataclasses.replace(
        state, window=write_ring(state.window, boundary, batch, rows, compute)
    )
    state = publish(x, boundary, state, params, batch, config, compute)
    return keep_suffix(dataclasses.replace(carry, state=state), boundary, batch, config, compute)


def keep_suffix(
    carry: Carry, index: Index, batch: StepBatch, config: ModelConfig, compute: Compute
) -> KVState:
    """Keeps the last W rows that enter the last KV source, for a bounded prefill to go on from.

    Decoding keeps them too, so that a prompt which continues a finished turn finds them.
    """
    state, boundary = carry.state, config.boundary_layer
    if boundary is None or (isinstance(index, int) and index != boundary):
        return state
    capacity, window = state.suffix_pre.shape[:2]
    slots, place = ring_slots(batch, capacity, window)
    slots = jnp.where(index == boundary, slots, capacity)
    return dataclasses.replace(
        state,
        suffix_stream=put(state.suffix_stream, (slots, place), carry.stream, compute),
        suffix_pre=put(state.suffix_pre, (slots, place), carry.pre, compute),
    )


def decode_suffix(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> tuple[KVState, jax.Array, jax.Array]:
    """The second part of a bounded prefill, on a prompt's last W rows after all chunks are encoded.

    The last KV source runs again for these rows, with equal results where it wrote already; later
    layers see no window row below `batch.decoder_floor`. Returns what `forward` does.
    """
    boundary = config.boundary_layer
    assert boundary is not None, "bounded prefill needs a KV source"
    slots = batch.per_row(batch.slots)
    index = batch.positions % config.sliding_window
    stream, pre = state.suffix_stream[slots, index], state.suffix_pre[slots, index]
    carry = start(stream, pre, state, batch, config, compute)
    carry = run_layers(carry, boundary, config.num_hidden_layers, params, batch, config, compute)
    return _finish(carry, params, batch, config, compute)
