"""Blocks of the drafter at many anchors of a text at once, each as if it were the next to draft.

Where inference reads a ring, training reads the step's own rows; where inference chains its own
choices, training chains the text.

Letters: T rows, A anchors, K block size, W window, D hidden size.
"""

import jax
import jax.numpy as jnp

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import project, quantized_linear
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.streams import collapse
from ds41jax.model import attention
from ds41jax.model.block import BlockWeights, block
from ds41jax.model.drafter import Draft, DrafterWeights
from ds41jax.model.hyper_connections import initial_pre
from ds41jax.model.params import Params
from ds41jax.model.rope import plain_frequencies
from ds41jax.model.state import StepBatch
from ds41jax.model.tensors import at_layer


def draft_in_training(
    params: Params,
    taps: jax.Array,
    step: StepBatch,
    anchors: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> Draft:
    """Drafts after the tokens at flat rows `anchors` [A], given the text up to each of them.

    Args:
      params: values of all weights.
      taps: [T, targets * D] what the target's rows leave for the drafter.
      step: the batch whose rows `taps` belong to.
    """
    weights: DrafterWeights = params.drafter
    size = config.dspark_block_size
    latent = quantized_linear(taps, weights.main_proj, compute)
    context = rms_norm(latent, weights.main_norm, config.rms_norm_eps, compute)
    noise = jnp.full((anchors.shape[0], size - 1), config.dspark_noise_token_id, jnp.int32)
    tokens = jnp.concatenate([step.token_ids[anchors][:, None], noise], axis=1).reshape(-1)
    stream = jnp.repeat(params.embed[tokens].astype(compute.dtype)[:, None], config.hc_mult, axis=1)
    positions = (step.positions[anchors][:, None] + jnp.arange(size)).reshape(-1)
    index = _block_index(anchors, step, config)
    carry = (stream, initial_pre(stream.shape[0], config))
    for stage in range(config.num_nextn_predict_layers):
        mine: BlockWeights = at_layer(weights.stages, stage)
        carry = _stage(carry, mine, context, step.positions, positions, index, config, compute)
    return _chain(params, *carry, step.token_ids, anchors, config, compute)


def _stage(
    carry: tuple[jax.Array, jax.Array],
    weights: BlockWeights,
    context: jax.Array,
    context_positions: jax.Array,
    positions: jax.Array,
    index: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    frequencies = plain_frequencies(config)

    def attend(x: jax.Array) -> jax.Array:
        def rows(x: jax.Array, at: jax.Array) -> jax.Array:
            made = attention.window_rows(x, at, weights.attn, frequencies, config, compute)
            assert isinstance(made, jax.Array)
            return made

        stored = jnp.concatenate([rows(context, context_positions), rows(x, positions)])
        _, q = attention.queries(x, positions, weights.attn, frequencies, config, compute)
        sources = ((stored, index),)
        return attention.attend(q, positions, sources, weights.attn, frequencies, config, compute)

    text = jnp.zeros(positions.shape, bool)
    k = config.dspark_num_experts_per_tok
    return block(*carry, text, attend, weights, k, config, compute)


def _block_index(anchors: jax.Array, step: StepBatch, config: ModelConfig) -> jax.Array:
    """Stored rows that block rows attend to, [A * K, W + K]: the anchor's past, then its block."""
    size, rows = config.dspark_block_size, step.token_ids.shape[0]
    age = jnp.arange(config.sliding_window, 0, -1)
    first = step.per_row(step.starts)[anchors][:, None]
    past = jnp.where(step.positions[anchors][:, None] - age >= first, anchors[:, None] - age, -1)
    own = rows + jnp.arange(anchors.shape[0])[:, None] * size + jnp.arange(size)
    return jnp.repeat(jnp.concatenate([past, own], axis=1), size, axis=0)


def _chain(
    params: Params,
    stream: jax.Array,
    pre: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> Draft:
    weights: DrafterWeights = params.drafter
    count, size = anchors.shape[0], config.dspark_block_size
    hidden = collapse(stream, pre, compute)
    normalised = rms_norm(hidden, weights.norm, config.rms_norm_eps, compute)
    base = project(normalised, params.head, compute)
    before = tokens[(anchors[:, None] + jnp.arange(size)).reshape(-1)]
    embedding = weights.markov_embed[before].astype(jnp.float32)
    logits = base + project(embedding, weights.markov_head, compute)
    features = jnp.concatenate([hidden.astype(jnp.float32), embedding], axis=-1)
    confidence = project(features, weights.confidence, compute)[:, 0]
    return Draft(
        token_ids=jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(count, size),
        base_logits=base.reshape(count, size, -1),
        logits=logits.reshape(count, size, -1),
        confidence=confidence.reshape(count, size),
    )
