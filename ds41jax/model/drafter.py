"""dSpark: three small blocks draft a block of tokens at once, a Markov head chains them.

Every committed row of the target leaves a key-value row in each stage's ring (`absorb`). A draft
(`draft`) feeds the last token and noise tokens through the stages; every row of the block sees the
last W ring rows and the whole block. The chain then adds, position by position, a bias that depends
on the token chosen before, and a confidence head says how likely each draft is to be accepted.

Letters: B sequences, K block size, W window, D hidden size, V vocabulary, M Markov rank.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import operand, project, quantized_linear
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.quantize import Input
from ds41jax.kernels.rows import map_rows
from ds41jax.kernels.streams import collapse
from ds41jax.model import attention
from ds41jax.model.block import BlockWeights, block, block_specs
from ds41jax.model.hyper_connections import initial_pre
from ds41jax.model.rope import plain_frequencies
from ds41jax.model.state import KVState, StepBatch, ring_rows, write_ring
from ds41jax.model.tensors import at_layer, spec
from ds41jax.model.vocabulary import token_rows, whole_logits


@struct.dataclass
class DrafterWeights:
    """The stages, and the heads of the first and the last of them."""

    stages: BlockWeights
    main_proj: QuantizedArray  # [D, targets * D]
    main_norm: jax.Array  # [D]
    norm: jax.Array  # [D]
    markov_embed: jax.Array  # [V, M]
    markov_head: jax.Array  # [V, M]
    confidence: jax.Array  # [1, D + M]


@struct.dataclass
class Draft:
    """A drafted block of each sequence.

    Attributes:
      token_ids: [B, K] int32.
      base_logits: [B, K, V] float32 before the Markov bias; logits: after it.
      confidence: [B, K] float32 logits of a draft's acceptance given that all before it were.
    """

    token_ids: jax.Array
    base_logits: jax.Array
    logits: jax.Array
    confidence: jax.Array


def drafter_specs(config: ModelConfig) -> DrafterWeights:
    stages = tuple(range(config.num_nextn_predict_layers))
    d, v, m = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    last = f"mtp.{stages[-1]}"
    targets = len(config.dspark_target_layer_ids)
    return DrafterWeights(
        stages=block_specs(config, "mtp.{i}", stages, config.dspark_n_routed_experts),
        main_proj=spec("mtp.0.main_proj.weight", (d, targets * d), Format.FP8_BLOCK),
        main_norm=spec("mtp.0.main_norm.weight", (d,), "bf16"),
        norm=spec(f"{last}.norm.weight", (d,), "bf16"),
        markov_embed=spec(f"{last}.markov_head.embed.weight", (v, m), "bf16"),
        markov_head=spec(f"{last}.markov_head.head.weight", (v, m), "bf16"),
        confidence=spec(f"{last}.confidence_head.proj.weight", (1, d + m), "bf16"),
    )


def absorb(
    weights: DrafterWeights,
    state: KVState,
    main_hidden: jax.Array,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> KVState:
    """Writes the ring rows of a step's target rows, main_hidden [T, targets * D]."""
    frequencies = plain_frequencies(config)
    proj, norm = operand(weights.main_proj, compute), weights.main_norm

    def project(hidden: jax.Array) -> jax.Array:
        return rms_norm(quantized_linear(hidden, proj, compute), norm, config.rms_norm_eps, compute)

    x = map_rows(compute, project, main_hidden)

    def stage(i: jax.Array, ring: Any) -> Any:
        attn = at_layer(weights.stages.attn, i)
        rows = attention.window_rows(x, batch.positions, attn, frequencies, config, compute)
        return write_ring(ring, i, batch, rows, compute)

    ring = lax.fori_loop(0, config.num_nextn_predict_layers, stage, state.draft_window)
    return dataclasses.replace(state, draft_window=ring)


def draft(
    weights: DrafterWeights,
    embed: jax.Array,
    head: jax.Array,
    state: KVState,
    slots: jax.Array,
    anchors: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> Draft:
    """Drafts the block after each sequence's last token.

    Args:
      embed, head: [V, D] of the target, or this card's rows of them.
      slots: [B] int32 cache slots of the sequences.
      anchors: [B] int32 last tokens, not yet fed to the target.
      positions: [B] int32 their positions: rows below are committed.
    """
    block_size = config.dspark_block_size
    noise = jnp.full((anchors.shape[0], block_size - 1), config.dspark_noise_token_id, jnp.int32)
    token_ids = jnp.concatenate([anchors[:, None], noise], axis=1).reshape(-1)
    stream = jnp.repeat(token_rows(embed, token_ids, compute)[:, None], config.hc_mult, axis=1)
    rows = (positions[:, None] + jnp.arange(block_size)).reshape(-1)
    stream, pre = run_stages(weights, state, stream, slots, rows, positions, config, compute)
    return chain(weights, head, stream, pre, anchors, config, compute)


def run_stages(
    weights: DrafterWeights,
    state: KVState,
    stream: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """All stages on block rows: stream [B * K, S, D] at positions rows [B * K]; also their pre."""
    frequencies = plain_frequencies(config)
    index = block_index(positions, config)
    text = jnp.zeros(rows.shape, bool)

    def stage(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mine: BlockWeights = at_layer(weights.stages, i, in_place=compute.on_gpu)

        def attend(x: Input) -> jax.Array:
            kv, _, q = attention.rows_and_queries(x, rows, mine.attn, frequencies, config, compute)
            sources = (
                (attention.ring_and_step_rows(state.draft_window, i, slots, kv, compute), index),
            )
            return attention.attend(q, rows, sources, mine.attn, frequencies, config, compute)

        k = config.dspark_num_experts_per_tok
        return block(*carry, text, attend, mine, k, config, compute)

    start = (stream, initial_pre(rows.shape[0], config))
    return lax.fori_loop(0, config.num_nextn_predict_layers, stage, start)


def block_index(positions: jax.Array, config: ModelConfig) -> jax.Array:
    """Rows of `ring_and_step_rows` that block rows attend to: [B * K, W + K], -1 where none."""
    slots, size, ring = positions.shape[0], config.dspark_block_size, ring_rows(config)
    window = config.sliding_window
    before = positions[:, None] - jnp.arange(window, 0, -1)
    slot = jnp.arange(slots)[:, None]
    stored = jnp.where(before >= 0, slot * ring + before % ring, -1)
    own = slots * ring + slot * size + jnp.arange(size)
    return jnp.repeat(jnp.concatenate([stored, own], axis=1), size, axis=0)


def chain(
    weights: DrafterWeights,
    head: jax.Array,
    stream: jax.Array,
    pre: jax.Array,
    anchors: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> Draft:
    """Base logits of the block, then greedy choices with the Markov bias, and confidences."""
    slots, size = anchors.shape[0], config.dspark_block_size
    head, markov_head = operand(head, compute), operand(weights.markov_head, compute)

    def tile(stream: jax.Array, pre: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = collapse(stream, pre, compute)
        return x, project(rms_norm(x, weights.norm, config.rms_norm_eps, compute), head, compute)

    hidden, base = map_rows(compute, tile, stream, pre)
    base = whole_logits(base, compute)
    hidden, base = hidden.reshape(slots, size, -1), base.reshape(slots, size, -1)
    confidence_weight = operand(weights.confidence, compute)

    def step(token: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        def choose(hidden: jax.Array, base: jax.Array, token: jax.Array) -> tuple[jax.Array, ...]:
            embedding = weights.markov_embed[token].astype(jnp.float32)
            logits = base + project(embedding, markov_head, compute)
            features = jnp.concatenate([hidden.astype(jnp.float32), embedding], axis=-1)
            confidence = project(features, confidence_weight, compute)[:, 0]
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits, confidence

        out = map_rows(compute, choose, *inputs, token)
        return out[0], out

    by_position = (hidden.swapaxes(0, 1), base.swapaxes(0, 1))
    _, (token_ids, logits, confidence) = lax.scan(step, anchors, by_position)
    return Draft(
        token_ids=token_ids.T,
        base_logits=base,
        logits=logits.swapaxes(0, 1),
        confidence=confidence.T,
    )
