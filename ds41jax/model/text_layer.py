"""One layer of the text model; what it does follows from its index alone.

Letters: T rows, S streams, D hidden size, W window.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig, SelectRole
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.quantize import Input
from ds41jax.model import attention, compressor, indexer
from ds41jax.model.block import Middle, first_half, second_half
from ds41jax.model.engram import engram
from ds41jax.model.indexer import Selection
from ds41jax.model.moe import moe, placed_moe
from ds41jax.model.params import Params
from ds41jax.model.rope import compressed_frequencies, plain_frequencies
from ds41jax.model.state import KVState, StepBatch, put, ring_rows, ring_slots, write_ring
from ds41jax.model.tensors import at_layer, choose, lookup

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


def layer(
    carry: Carry,
    index: Index,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> Carry:
    """One layer. What it does follows from its index, which may be traced."""
    middle, carry = enter_layer(carry, index, params, batch, config, compute)
    weights = at_layer(params.layers.ffn, index, in_place=compute.on_gpu)
    if compute.exchange is None:
        k = config.num_experts_per_tok
        output = moe(middle.x, batch.is_image, weights, k, config, compute)
    else:
        fault = carry.state.fault
        output, fault = placed_moe(middle.x, index, fault, weights, batch, config, compute)
        carry = dataclasses.replace(carry, state=dataclasses.replace(carry.state, fault=fault))
    stream, pre = second_half(output, middle, compute)
    return dataclasses.replace(carry, stream=stream, pre=pre)


def enter_layer(
    carry: Carry,
    index: Index,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Middle, Carry]:
    """A layer up to the input of its experts; of the carry, the streams stay to be replaced."""
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
    middle = first_half(stream, carry.pre, attend, weights, config, compute)
    return middle, dataclasses.replace(carry, state=state, selection=selection, taps=taps)


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
