"""Step programs of an official-geometry slice over one or two cards, and their data."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from layers_gpu import decode_batch, random_caches, random_leaf, six_layers

from ds41jax.config import ModelConfig
from ds41jax.engine import steps
from ds41jax.kernels.cards import ALL_PARTS, Cards, Part
from ds41jax.kernels.compute import Compute, Kernels, Phase
from ds41jax.model import attention, backbone, moe, text_layer
from ds41jax.model.hyper_connections import initial_pre
from ds41jax.model.params import Params, param_specs
from ds41jax.model.sharding import over_cards, partition
from ds41jax.model.state import CacheShape, KVState, StepBatch, init_state
from ds41jax.model.tensors import TensorSpec

LAYOUTS: dict[str, frozenset[Part] | None] = {
    "one card": None,
    "all": ALL_PARTS,
    "attention": frozenset({Part.ATTENTION}),
    "experts": frozenset({Part.EXPERTS}),
    "vocabulary": frozenset({Part.VOCABULARY}),
}
READER = 2  # of `three_layers`: neither writes global rows nor selects


def three_layers() -> ModelConfig:
    """The official sizes with a window-only layer, a source of every token, and its reader.

    A reader is what most of the forty layers are. More layers would compile longer than a lent
    pair of GPUs waits.
    """
    return dataclasses.replace(
        six_layers(),
        num_hidden_layers=3,
        compress_ratios=(0, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=1,
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """One program: the whole slice, or a reader's layer with or without its sums over cards."""

    layout: str
    rows: int
    sequences: int
    phase: Phase
    what: str = "slice"  # or "layer", "layer without sums"


@dataclasses.dataclass(frozen=True)
class Slice:
    """A geometry, its kernels, and the steps to time."""

    config: ModelConfig
    kernels: Kernels
    decode: tuple[tuple[int, int], ...]  # rows, sequences
    context: int
    prefill_rows: int
    measuring_seconds: float = 40  # of all of it, once everything is compiled

    def jobs(self) -> list[Job]:
        """In the order in which they are worth having."""
        decode = [(*step, Phase.DECODE) for step in self.decode]
        steps = [*decode, (self.prefill_rows, 1, Phase.PREFILL)]
        whole = [Job(layout, *step) for layout in LAYOUTS for step in steps]
        layers = [Job("all", *s, w) for s in steps for w in ("layer", "layer without sums")]
        return [*whole[: 2 * len(steps)], *layers, *whole[2 * len(steps) :]]

    def compute(self, job: Job, mesh: Any) -> Compute:
        parts = LAYOUTS[job.layout]
        cards = None if parts is None else Cards(mesh, parts)
        return Compute(kernels=self.kernels, phase=job.phase, cards=cards)

    def batch(self, job: Job) -> StepBatch:
        """On the host; a prefill wants the last row's logits alone."""
        made = decode_batch(job.rows, job.sequences, self.context, self.config)
        batch: StepBatch = jax.tree.map(np.asarray, made)
        if job.phase is Phase.PREFILL:
            batch = dataclasses.replace(batch, logit_rows=np.array([job.rows - 1], np.int32))
        tokens = np.random.default_rng(0).integers(10, 500, job.rows)
        return dataclasses.replace(batch, token_ids=tokens.astype(np.int32))

    def caches(self, job: Job) -> Callable[[], KVState]:
        pages = int(self.batch(job).page_tables.size)
        shape, compute = CacheShape(job.sequences, pages), Compute(kernels=self.kernels)
        return lambda: random_caches(init_state(self.config, shape, compute))

    def arguments(self, job: Job) -> tuple[Any, Any, Any]:
        """Shapes of weights, caches and batch."""
        params = jax.tree.map(lambda s: s.abstract(), param_specs(self.config), is_leaf=is_spec)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.batch(job))
        return params, jax.eval_shape(self.caches(job)), batch

    def step(self, job: Job, mesh: Any) -> Callable[..., tuple[KVState, jax.Array]]:
        """(params, state, batch) to the caches, and logits or streams to wait for."""
        compute, config = self.compute(job, mesh), self.config
        if job.what == "slice":
            full = steps.full_step.__wrapped__  # type: ignore[attr-defined]
            return lambda *args: full(*args, config, compute)[:2]

        @over_cards
        def layer(
            params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
        ) -> tuple[KVState, jax.Array]:
            stream = jnp.ones((job.rows, config.hc_mult, config.hidden_size), compute.dtype)
            pre = initial_pre(job.rows, config)
            carry = backbone.start(stream, pre, state, batch, config, compute)
            carry = text_layer.layer(carry, READER, params, batch, config, compute)
            return carry.state, carry.stream

        return lambda *args: layer(*args, config=config, compute=compute)


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec)


@contextlib.contextmanager
def no_sums() -> Iterator[None]:
    """Cards go on with their own partial sums: wrong values, the same work otherwise."""

    def alone(partial: jax.Array) -> jax.Array:
        return partial

    with (
        mock.patch.object(attention, "sum_of_cards", alone),
        mock.patch.object(moe, "sum_of_cards", alone),
    ):
        yield


def lower(piece: Slice, job: Job, mesh: Mesh) -> Any:
    """A program for the devices of `mesh`, traced; caches are donated to it."""
    with no_sums() if job.what == "layer without sums" else contextlib.nullcontext():
        step = jax.jit(piece.step(job, mesh), donate_argnums=1)
        return step.lower(*_shapes(piece, job, mesh))


def _shapes(piece: Slice, job: Job, mesh: Any) -> tuple[Any, Any, Any]:
    """A job's arguments with their shardings."""
    params, state, batch = piece.arguments(job)
    everywhere = whole(piece, job, mesh)
    weights = _placed(params, placements(piece, job, mesh))
    return weights, _placed(state, everywhere), _placed(batch, everywhere)


def _placed(tree: Any, sharding: Any) -> Any:
    """Shapes with their sharding, one for all or a tree of them."""
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    else:
        sharding = jax.tree.map(lambda s, x: jax.tree.map(lambda _: s, x), sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
    )


def placements(piece: Slice, job: Job, mesh: Any) -> Any:
    """A sharding for every weight."""
    cards = piece.compute(job, mesh).cards

    def of(spec: TensorSpec) -> Any:
        if cards is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(cards.mesh, partition(spec, cards))

    return jax.tree.map(of, param_specs(piece.config), is_leaf=is_spec)


def whole(piece: Slice, job: Job, mesh: Any) -> Any:
    """The sharding of what every card of a job has all of."""
    if piece.compute(job, mesh).cards is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, P())


def weights(piece: Slice, job: Job, mesh: Mesh) -> Any:
    """A lowered program of random weights, equal whatever the layout, made where they lie."""
    specs, tree = jax.tree.flatten(param_specs(piece.config), is_leaf=is_spec)

    def make() -> Params:
        made = [random_leaf(spec, 7 * i + 1) for i, spec in enumerate(specs)]
        params: Params = jax.tree.unflatten(tree, made)
        return params

    shapes, _, _ = piece.arguments(job)
    targets = _placed(shapes, placements(piece, job, mesh))
    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, targets)).lower()
