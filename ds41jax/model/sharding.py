"""Weights and step programs over several cards.

Which weights are split, and along which axis, stands in their `TensorSpec`s; everything here is
derived from them.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ds41jax.config import ModelConfig
from ds41jax.formats import Format
from ds41jax.kernels.cards import ALL_PARTS, AXIS, Cards, Part
from ds41jax.kernels.compute import Compute
from ds41jax.model.params import Params, param_specs, spec_leaves
from ds41jax.model.state import CacheShape, KVState, init_state
from ds41jax.model.tensors import TensorSpec

STATIC = ("config", "compute", "dspark")  # arguments of a step that are no arrays

F = TypeVar("F", bound=Callable[..., Any])


def find_cards(count: int, parts: frozenset[Part] = ALL_PARTS) -> Cards:
    """The first `count` devices that JAX sees, those of other hosts included.

    Raises:
      ValueError: if there are fewer.
    """
    devices = jax.devices()
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"{count} cards are wanted, but JAX sees {len(devices)} device(s) "
            f"({devices[0].device_kind}): see CUDA_VISIBLE_DEVICES, or for trials on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return Cards(Mesh(np.array(devices[:count]), (AXIS,)), parts)


def check_split(config: ModelConfig, cards: Cards) -> None:
    """Raises `ValueError` naming every weight that cannot be split evenly over the cards."""
    problems = []
    for spec in spec_leaves(param_specs(config)):
        if spec.split is None or not cards.splits(spec.split.part):
            continue
        axis, size = spec.split.axis, spec.shape[spec.split.axis]
        unit = math.lcm(spec.split.unit, _scale_unit(spec.format, axis))
        if size % (unit * cards.count):
            what = ("rows", "columns")[axis]
            problems.append(f"{spec.name}: {size} {what}, in units of {unit}")
    if problems:
        raise ValueError(
            f"the model does not split over {cards.count} cards: {'; '.join(problems)}. Split "
            f"other parts, or use another number of cards"
        )


def _scale_unit(format: str | Format, axis: int) -> int:
    """Rows or columns that share a scale and so stay on one card."""
    if format is Format.FP8_BLOCK or (isinstance(format, Format) and axis == 1):
        return 32
    return 1


def partition(spec: TensorSpec, cards: Cards) -> P:
    """How a weight, and its scales, lie on the mesh."""
    if spec.split is None or not cards.splits(spec.split.part):
        return P()
    return P(*[None] * (len(spec.stack) + spec.split.axis), AXIS)


def partitions(config: ModelConfig, cards: Cards) -> Params:
    """The `Params` tree with a `PartitionSpec` in place of every weight."""
    tree: Params = jax.tree.map(
        lambda spec: partition(spec, cards),
        param_specs(config),
        is_leaf=lambda leaf: isinstance(leaf, TensorSpec),
    )
    return tree


def place(params: Params, config: ModelConfig, cards: Cards) -> Params:
    """Loaded weights split over the cards, or copied to them; what lies right stays.

    Raises:
      ValueError: if they cannot be split; see `check_split`.
    """
    check_split(config, cards)

    def put(spec: P, leaf: Any) -> Any:
        return jax.device_put(leaf, NamedSharding(cards.mesh, spec))

    placed: Params = jax.tree.map(put, partitions(config, cards), params)
    return placed


def empty_caches(
    config: ModelConfig, shape: CacheShape, compute: Compute, sharding: jax.sharding.Sharding
) -> KVState:
    """Empty caches, made where they will lie: on the device, or whole on every card."""
    make = functools.partial(init_state, config, shape, compute)
    state: KVState = jax.jit(make, out_shardings=sharding)()
    return state


def over_cards(step: F) -> F:
    """Makes a step program run on every card of its `compute`, if that has cards.

    `params` are split as their specs say; all other arrays are whole on every card, and so are the
    results.
    """
    signature = inspect.signature(step)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        cards: Cards | None = given["compute"].cards
        if cards is None:
            return step(*args, **kwargs)
        static = {name: given.pop(name) for name in STATIC if name in given}
        specs = {name: P() for name in given} | {"params": partitions(static["config"], cards)}
        whole = jax.shard_map(
            lambda arrays: step(**arrays, **static),
            mesh=cards.mesh,
            in_specs=(specs,),
            out_specs=P(),
            check_vma=False,  # results are equal on every card by construction; Pallas needs it too
        )
        return whole(dict(given))

    return run  # type: ignore[return-value]
