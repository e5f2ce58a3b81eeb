"""The training loop: optimisers, steps, what is kept to go on from."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from safetensors.numpy import load_file, save_file

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute
from ds41jax.model.tensors import TensorSpec
from ds41jax.training.batches import Shape, TrainingBatch
from ds41jax.training.losses import drafter_loss, target_loss
from ds41jax.training.masters import Masters, master_specs

BIAS_STEP = 1e-3  # of a selection bias, each step, towards even load
TABLE_RATE = 5.0  # Engram tables learn faster: each row is met rarely (Engram paper, section 4)
WARM_UP = 0.02  # of all steps
DECAY = 0.35  # the last part of all steps, in which the rate falls to nothing
CLIP = 1.0
WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class Phase:
    """Steps on one kind of rows; the phases of a run are mixed evenly.

    Attributes:
      steps: optimiser steps.
      shape: rows and tokens of a step.
      long: whether rows come from the long shard.
    """

    steps: int
    shape: Shape
    long: bool = False


@struct.dataclass
class Learner:
    """What a step changes: weights, the optimiser's moments, the number of steps taken."""

    weights: Any
    moments: Any
    step: jax.Array


def schedule(rate: float, steps: int) -> optax.Schedule:
    """Linear warm-up, a plateau, linear decay to zero."""
    warm, fall = max(1, int(WARM_UP * steps)), max(1, int(DECAY * steps))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, rate, warm),
            optax.constant_schedule(rate),
            optax.linear_schedule(rate, 0.0, fall),
        ],
        [warm, steps - fall],
    )


def target_optimiser(config: ModelConfig, rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW, faster for Engram tables; selection biases take steps of one size; the drafter and
    the vision tower stay as they are."""
    fall = schedule(1.0, steps)
    adam = partial(_adam, decays=_decays(master_specs(config)))
    transforms = {
        "weights": adam(lambda step: rate * fall(step)),
        "tables": _adam(lambda step: TABLE_RATE * rate * fall(step), decays=False),
        "bias": optax.chain(
            optax.scale_by_sign(), optax.scale_by_learning_rate(lambda n: BIAS_STEP * fall(n))
        ),
        "frozen": optax.set_to_zero(),
    }
    return optax.multi_transform(transforms, _labels(master_specs(config)))


def drafter_optimiser(config: ModelConfig, rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW, and steps of one size for selection biases."""
    specs = master_specs(config).params.drafter
    fall = schedule(1.0, steps)
    transforms = {
        "weights": _adam(lambda step: rate * fall(step), decays=_decays(specs)),
        "bias": optax.chain(
            optax.scale_by_sign(), optax.scale_by_learning_rate(lambda n: BIAS_STEP * fall(n))
        ),
    }
    labels = jax.tree.map(lambda leaf: "bias" if _is_bias(leaf) else "weights", specs)
    return optax.multi_transform(transforms, labels)


def _adam(rate: optax.Schedule, decays: Any) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-10, weight_decay=WEIGHT_DECAY, mask=decays),
    )


def _is_bias(leaf: TensorSpec) -> bool:
    return leaf.name.endswith((".bias", ".bias_vl"))


def _labels(specs: Masters) -> Any:
    def frozen(tree: Any) -> Any:
        return jax.tree.map(lambda _: "frozen", tree)

    labels = jax.tree.map(lambda leaf: "bias" if _is_bias(leaf) else "weights", specs)
    params = dataclasses.replace(
        labels.params, drafter=frozen(labels.params.drafter), vision=frozen(labels.params.vision)
    )
    return dataclasses.replace(
        labels, params=params, tables=jax.tree.map(lambda _: "tables", specs.tables)
    )


def _decays(specs: Any) -> Callable[[Any], Any]:
    """Weight decay is for projections: their values, unlike norms', are free in scale."""
    flags = jax.tree.map(lambda leaf: len(leaf.shape) == 2 and not leaf.name.endswith("_fn"), specs)
    return lambda _: flags


def new_learner(weights: Any, optimiser: optax.GradientTransformation) -> Learner:
    return Learner(weights=weights, moments=optimiser.init(weights), step=jnp.zeros((), jnp.int32))


def target_step(
    optimiser: optax.GradientTransformation, phase: Phase, config: ModelConfig, compute: Compute
) -> Any:
    """The jitted step of a phase: (learner, batch), to the learner and metrics; donates it."""

    def step(learner: Learner, batch: TrainingBatch) -> tuple[Learner, dict[str, jax.Array]]:
        loss, gradient = jax.value_and_grad(target_loss)(
            learner.weights, batch, phase.shape, config, compute
        )
        metrics = {"loss": loss, "gradient": optax.global_norm(gradient)}
        return _updated(learner, gradient, optimiser), metrics

    return jax.jit(step, donate_argnums=0)


def drafter_step(
    optimiser: optax.GradientTransformation, shape: Shape, config: ModelConfig, compute: Compute
) -> Any:
    """The jitted step of the drafter: (learner, masters, batch, anchors [A]), else the same."""

    def step(
        learner: Learner, masters: Masters, batch: TrainingBatch, anchors: jax.Array
    ) -> tuple[Learner, dict[str, jax.Array]]:
        (loss, metrics), gradient = jax.value_and_grad(drafter_loss, has_aux=True)(
            learner.weights, masters, batch, anchors, shape, config, compute
        )
        return _updated(learner, gradient, optimiser), {"loss": loss, **metrics}

    return jax.jit(step, donate_argnums=0)


def _updated(learner: Learner, gradient: Any, optimiser: optax.GradientTransformation) -> Learner:
    updates, moments = optimiser.update(gradient, learner.moments, learner.weights)
    weights = optax.apply_updates(learner.weights, updates)
    return Learner(weights=weights, moments=moments, step=learner.step + 1)


def save_tree(path: Path, tree: Any) -> None:
    """Writes the arrays of a tree under their places in it."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    partial_path = path.with_suffix(".part")
    save_file({jax.tree_util.keystr(at): np.asarray(x) for at, x in flat}, partial_path)
    partial_path.replace(path)


def load_tree(path: Path, like: Any) -> Any:
    """Reads what `save_tree` wrote into the shape of `like`."""
    stored = load_file(path)

    def take(at: Any, x: Any) -> jax.Array:
        found = stored[jax.tree_util.keystr(at)]
        if found.shape != x.shape:
            raise ValueError(f"{path}: {jax.tree_util.keystr(at)} is {found.shape}, not {x.shape}")
        return jnp.asarray(found, x.dtype)

    return jax.tree_util.tree_map_with_path(take, like)


def interleaved(phases: Sequence[Phase]) -> Iterator[int]:
    """The order of steps: which phase is next, each spread evenly over the whole run."""
    total = sum(phase.steps for phase in phases)
    owed = np.zeros(len(phases))
    for _ in range(total):
        owed += [phase.steps / total for phase in phases]
        chosen = int(np.argmax(owed))
        owed[chosen] -= 1
        yield chosen
