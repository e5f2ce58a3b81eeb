"""The text model: embedding, layers, head; whole, or split where bounded prefill splits it.

Layers of equal kind that follow each other share one compiled body, and so do repeated pairs of
such runs, so a program of 40 layers compiles a dozen bodies.

Letters: T rows, S streams, D hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import operand, project
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.rows import map_rows
from ds41jax.kernels.streams import collapse
from ds41jax.model import attention, indexer
from ds41jax.model.block import BlockWeights, attention_input
from ds41jax.model.hyper_connections import initial_pre
from ds41jax.model.lanes import divides, run_lanes
from ds41jax.model.params import Params
from ds41jax.model.state import KVState, StepBatch, write_ring
from ds41jax.model.tensors import at_layer
from ds41jax.model.text_layer import Carry, Index, keep_suffix, layer, layer_frequencies, publish
from ds41jax.model.vocabulary import token_rows, whole_logits

_KEPT = jax.checkpoint_policies.save_only_these_names(indexer.CHOSEN)  # by a training step


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
    Layers with remote experts may go in two lanes.
    """
    if compute.exchange is not None and divides(batch, compute):
        remote = max(first, compute.exchange.first_layer)
        if remote < last:
            here = dataclasses.replace(compute, exchange=None, lanes=1)
            carry = run_layers(carry, first, remote, params, batch, config, here)
            return run_lanes(carry, remote, last, params, batch, config, compute)
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
