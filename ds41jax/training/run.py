"""One run: the target, then the drafter; can be stopped and resumed."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ds41jax.config import ModelConfig
from ds41jax.kernels.compute import Compute, Kernels
from ds41jax.model.engram_hash import EngramHash
from ds41jax.training.batches import Rows, Shape, TrainingBatch, make_batch
from ds41jax.training.masters import Masters, checkpoint_masters, initial_masters
from ds41jax.training.recipe import SHORT, Recipe, write_log
from ds41jax.training.trainer import (
    Learner,
    drafter_optimiser,
    drafter_step,
    interleaved,
    load_tree,
    new_learner,
    save_tree,
    target_optimiser,
    target_step,
)

LOG_EVERY = 20  # steps
AHEAD = 12  # batches made before they are needed
TARGET_FILE, DRAFTER_FILE, LOG_FILE = "target.safetensors", "drafter.safetensors", "log.jsonl"


class OutOfTime(Exception):
    """The run's time is up; what it has is saved, and the same command goes on from there."""


@dataclass(frozen=True)
class Data:
    """Training rows: packed documents of up to SHORT tokens, and long ones."""

    short: Rows
    long: Rows


@dataclass
class Run:
    """What both parts of a run share.

    Attributes:
      out: folder of the saved state and the log.
      deadline: `time.monotonic()` at which to save and stop.
      start: checkpoint whose values the weights begin with; None for random ones.
    """

    recipe: Recipe
    config: ModelConfig
    hash: EngramHash | None
    data: Data
    out: Path
    deadline: float
    start: Path | None = None

    @property
    def compute(self) -> Compute:
        kernels = Kernels.PALLAS if jax.default_backend() == "gpu" else Kernels.JNP
        return Compute(kernels=kernels, differentiable=True)

    def log(self, entry: dict[str, Any]) -> None:
        write_log(self.out / LOG_FILE, entry)


def train_target(run: Run) -> Masters:
    """Trains everything but the drafter, or loads it if that is done."""
    recipe = run.recipe
    optimiser = target_optimiser(run.config, recipe.rate, recipe.steps)
    learner = new_learner(_first_masters(run), optimiser)
    path = run.out / TARGET_FILE
    if path.exists():
        learner = load_tree(path, learner)
    order = list(interleaved(recipe.phases))
    done = int(learner.step)
    if done < len(order):
        steps = {
            i: target_step(optimiser, recipe.phases[i], run.config, run.compute)
            for i in sorted(set(order[done:]))
        }
        programs = _compiled(run, steps, learner)
        rows = _target_batches(run, order)
        learner = _loop(run, "target", learner, order, programs, rows, path)
    masters: Masters = learner.weights
    return masters


def _first_masters(run: Run) -> Masters:
    if run.start is None:
        return initial_masters(run.config, run.recipe.seed)
    return checkpoint_masters(run.start, run.config)


def _compiled(run: Run, steps: dict[int, Any], learner: Learner) -> dict[int, Future[Any]]:
    """Compiles the phases' steps side by side; the first is usually ready well before the last."""
    pool = ThreadPoolExecutor(len(steps))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), learner)

    def compile(i: int) -> Any:
        batch = _abstract_batch(run, run.recipe.phases[i].shape)
        began = time.monotonic()
        program = steps[i].lower(abstract, batch).compile()
        run.log({"compiled": i, "seconds": round(time.monotonic() - began, 1)})
        return program

    return {i: pool.submit(compile, i) for i in steps}


def _abstract_batch(run: Run, shape: Shape) -> Any:
    row = np.zeros((shape.rows, shape.length + 1), np.uint16)
    batch = make_batch(row, row, run.config, run.hash)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def _target_batches(run: Run, order: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of every step; a pure function of the seed, so that a resumed run sees what it would
    have seen."""
    streams = {
        i: (run.data.long if phase.long else run.data.short).batches(
            phase.shape.rows, run.recipe.seed + 1000 * i
        )
        for i, phase in enumerate(run.recipe.phases)
    }
    for i in order:
        yield next(streams[i])


def _loop(
    run: Run,
    name: str,
    learner: Learner,
    order: list[int],
    programs: dict[int, Future[Any]],
    rows: Iterator[Any],
    path: Path,
) -> Learner:
    """Takes the steps of `order` that the learner has not taken yet; saves it at the end.

    Raises:
      OutOfTime: with the learner saved, when the run's time is up.
    """
    done, log = int(learner.step), _StepLog(run, name)
    with (
        ThreadPoolExecutor(AHEAD) as pool,
        tqdm(total=len(order), initial=done, desc=name, unit="step") as bar,
    ):
        batches = _made_ahead(run, pool, itertools.islice(rows, done, len(order)))
        for n, batch in enumerate(batches, done):
            learner, metrics = programs[order[n]].result()(learner, batch)
            log.pending.append(metrics)
            bar.update()
            if (n + 1) % LOG_EVERY and n + 1 < len(order):
                continue
            bar.set_postfix(loss=f"{log.write(n + 1, order[n]):.3f}")
            if time.monotonic() > run.deadline and n + 1 < len(order):
                save_tree(path, learner)
                raise OutOfTime(f"stopped after {n + 1} of {len(order)} {name} steps")
    save_tree(path, learner)
    return learner


@dataclass
class _StepLog:
    """Metrics since the last line of the log; they stay on the device until a line is written."""

    run: Run
    name: str

    def __post_init__(self) -> None:
        self.pending: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def write(self, step: int, phase: int) -> float:
        """Writes a line with the means; returns the loss."""
        first, *_ = self.pending
        means = {k: np.mean([np.asarray(m[k]) for m in self.pending], axis=0) for k in first}
        now = time.monotonic()
        seconds = round((now - self._began) / len(self.pending), 4)
        entry = {"part": self.name, "step": step, "phase": phase, "seconds": seconds}
        self.run.log(entry | {k: mean.tolist() for k, mean in means.items()})
        self.pending, self._began = [], now
        return float(means["loss"])


def _made_ahead(run: Run, pool: ThreadPoolExecutor, rows: Iterator[Any]) -> Iterator[TrainingBatch]:
    """Batches in order, made by the pool before they are needed."""
    waiting = deque(pool.submit(_batch, run, item) for item in itertools.islice(rows, AHEAD))
    while waiting:
        batch = waiting.popleft().result()
        waiting.extend(pool.submit(_batch, run, item) for item in itertools.islice(rows, 1))
        yield batch


def _batch(run: Run, rows: tuple[np.ndarray, np.ndarray]) -> TrainingBatch:
    batch: TrainingBatch = jax.device_put(make_batch(*rows, run.config, run.hash))
    return batch


@dataclass
class DrafterTraining:
    """The drafter's part of a run. Its step compiles from the moment that this is made, while the
    target trains."""

    run: Run

    def __post_init__(self) -> None:
        recipe, config = self.run.recipe, self.run.config
        self.shape = Shape(recipe.drafter_rows, SHORT)
        self.optimiser = drafter_optimiser(config, recipe.drafter_rate, recipe.drafter_steps)
        self.program = ThreadPoolExecutor(1).submit(self._compile)

    def _compile(self) -> Any:
        run = self.run
        masters = jax.eval_shape(partial(initial_masters, run.config, 0))
        learner = jax.eval_shape(
            lambda weights: new_learner(weights, self.optimiser), masters.params.drafter
        )
        anchors = jax.ShapeDtypeStruct((run.recipe.anchors * self.shape.rows,), np.int32)
        step = drafter_step(self.optimiser, self.shape, run.config, run.compute)
        batch = _abstract_batch(run, self.shape)
        return step.lower(learner, masters, batch, anchors).compile()

    def train(self, masters: Masters) -> Masters:
        """Trains the drafter against the finished target; returns all weights."""
        run, recipe = self.run, self.run.recipe
        drafter = jax.tree.map(jnp.array, masters.params.drafter)
        learner = new_learner(drafter, self.optimiser)
        path = run.out / DRAFTER_FILE
        if path.exists():
            learner = load_tree(path, learner)
        done = int(learner.step)
        anchors = self._anchors(done)
        program = self.program.result()

        def step(learner: Learner, batch: TrainingBatch) -> Any:
            return program(learner, masters, batch, next(anchors))

        ready: Future[Any] = Future()
        ready.set_result(step)
        rows = run.data.short.batches(self.shape.rows, recipe.seed + 77)
        order = [0] * recipe.drafter_steps
        learner = _loop(run, "drafter", learner, order, {0: ready}, rows, path)
        params = dataclasses.replace(masters.params, drafter=learner.weights)
        return dataclasses.replace(masters, params=params)

    def _anchors(self, skip: int) -> Iterator[jax.Array]:
        """Where blocks begin, anew for every step: flat rows, ascending."""
        generator = np.random.default_rng(self.run.recipe.seed + 7)
        count = self.run.recipe.anchors * self.shape.rows
        for step in range(self.run.recipe.drafter_steps):
            drawn = np.sort(generator.choice(self.shape.tokens, count, replace=False))
            if step >= skip:
                yield jnp.asarray(drawn, jnp.int32)
