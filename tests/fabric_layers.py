"""One layer of experts behind an exchange, as a program of its own: what fabric tests compare."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from fabric_workers import wide_model

from ds41jax.config import ModelConfig
from ds41jax.fabric.exchange import InProcess
from ds41jax.fabric.topology import Placement
from ds41jax.kernels.compute import Compute
from ds41jax.model.moe import MoeWeights, exchanged_moe
from ds41jax.model.tensors import at_layer

T, LIVE = 11, 9  # rows of a step, and those that are no padding


@partial(jax.jit, static_argnames=("config", "compute"))
def _run(
    weights: MoeWeights,
    x: jax.Array,
    layer: jax.Array,
    fault: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    mine = at_layer(weights, layer)
    live = jnp.arange(T) < LIVE
    text = jnp.zeros(T, bool)
    return exchanged_moe(x, text, live, layer, fault, mine, config, compute)


def make_rows(seed: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), (T, wide_model().config.hidden_size))
    return (3 * x).astype(jnp.bfloat16)


def through(compute: Compute, seed: int, layer: int, fault: int = 0) -> tuple[np.ndarray, int]:
    """The live rows after a layer's experts, and the fault."""
    model = wide_model()
    args = (model.params.layers.ffn, make_rows(seed), jnp.int32(layer), jnp.int32(fault))
    out, found = _run(*args, model.config, compute)
    return np.asarray(out)[:LIVE], int(found)


def in_process(placement: Placement, alive: tuple[int, ...] | None = None) -> Compute:
    return Compute(exchange=InProcess(placement, alive))
