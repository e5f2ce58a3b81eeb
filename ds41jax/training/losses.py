"""What is minimised: the target's next-token loss, the drafter's distance to the frozen target.

Letters: T rows, V vocabulary, A anchors, K drafts of a block.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute
from ds41jax.model import backbone
from ds41jax.model.state import StepBatch, init_state
from ds41jax.training.batches import Shape, TrainingBatch, step_batch
from ds41jax.training.draft_forward import draft_in_training
from ds41jax.training.masters import Masters, engram_rows, stored_params


def target_forward(
    masters: Masters,
    batch: TrainingBatch,
    shape: Shape,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, StepBatch]:
    """Logits [T, V] float32 and the drafter's taps [T, targets * D] of a batch."""
    engram = None
    if batch.engram_ids is not None:
        engram = engram_rows(masters, batch.engram_ids, compute)
    step = step_batch(batch, engram, shape, config)
    state = init_state(config, shape.cache(config), compute)
    params = stored_params(masters, config, compute)
    _, logits, taps = backbone.forward(params, state, step, config, compute)
    return logits, taps, step


def target_loss(
    masters: Masters,
    batch: TrainingBatch,
    shape: Shape,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """Mean of the weighted negative log-likelihoods, in nats."""
    nats = token_losses(masters, batch, shape, config, compute)
    return (nats * batch.weights).sum() / jnp.maximum(batch.weights.sum(), 1)


def token_losses(
    masters: Masters,
    batch: TrainingBatch,
    shape: Shape,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """Negative log-likelihood of every target, [T] in nats."""
    logits, _, _ = target_forward(masters, batch, shape, config, compute)
    mine = jnp.take_along_axis(logits, batch.targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - mine


def drafter_loss(
    drafter: Any,
    masters: Masters,
    batch: TrainingBatch,
    anchors: jax.Array,
    shape: Shape,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Drafts follow the target's distribution; confidences say how often they meet its choice.

    A draft counts while the text so far is what the target itself would have chosen: after that
    point a block is never reached when the model writes.

    Args:
      drafter: float32 weights of the drafter, the only ones with a gradient.
      anchors: [A] int32 flat rows at which blocks begin.

    Returns:
      The loss, and metrics: acceptance and mean confidence of each position, [K].
    """
    logits, taps, step = jax.lax.stop_gradient(
        target_forward(masters, batch, shape, config, compute)
    )
    whole = dataclasses.replace(
        masters, params=dataclasses.replace(masters.params, drafter=drafter)
    )
    params = stored_params(whole, config, compute)
    draft = draft_in_training(params, taps, step, anchors, config, compute)
    rows = anchors[:, None] + jnp.arange(config.dspark_block_size)
    wanted = jax.nn.softmax(logits[rows], axis=-1)
    choice = jnp.argmax(logits[rows], axis=-1)
    usable = _usable(batch, anchors, rows, shape)
    followed = jnp.cumprod((choice == batch.targets[rows]) & usable, axis=1)
    on_path = usable & jnp.pad(followed[:, :-1], ((0, 0), (1, 0)), constant_values=1).astype(bool)
    chance = jax.nn.log_softmax(draft.logits, axis=-1)
    hard = -jnp.take_along_axis(chance, choice[..., None], axis=-1)[..., 0]
    distance = hard - (wanted * chance).sum(-1)
    met = draft.token_ids == choice
    reached = on_path & (
        jnp.cumprod(jnp.pad(met[:, :-1], ((0, 0), (1, 0)), constant_values=1), 1) > 0
    )
    surprise = jax.nn.softplus(draft.confidence) - met * draft.confidence
    loss = _mean(distance, on_path) + _mean(surprise, reached)
    metrics = {
        "acceptance": _mean(met, reached, axis=0),
        "confidence": _mean(jax.nn.sigmoid(draft.confidence), reached, axis=0),
    }
    return loss, metrics


def _usable(batch: TrainingBatch, anchors: jax.Array, rows: jax.Array, shape: Shape) -> jax.Array:
    """[A, K] whether a row lies in its anchor's document and has a target there."""
    inside = rows // shape.length == (anchors // shape.length)[:, None]
    same = batch.documents[rows] == batch.documents[anchors][:, None]
    return inside & same & (batch.weights[rows] > 0)


def _mean(x: jax.Array, where: jax.Array, axis: int | None = None) -> jax.Array:
    total = jnp.where(where, x, 0).astype(jnp.float32).sum(axis)
    return total / jnp.maximum(where.sum(axis), 1)
