"""Master weights: float32 values of everything that a checkpoint stores rounded.

A training step rounds them to what the checkpoint would hold, with straight-through gradients, so
that the model learns with the weights that it will be shipped with.
"""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ds41jax.checkpoint.engram_tables import EngramTable
from ds41jax.checkpoint.reader import load_params, open_engram_tables
from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray, values
from ds41jax.formats.numerics import Numerics, straight_through
from ds41jax.formats.quantized import E4M3, encode
from ds41jax.kernels.compute import Compute
from ds41jax.model.params import Params, engram_table_specs, param_specs
from ds41jax.model.tensors import TensorSpec

# (name, mean, standard deviation) of weights that are no projections
_FIXED = (
    (r"norm\d?\.weight$|engram\.[qk]_weight$", 1.0, 0.0),
    (r"hc_\w+_scale$", 0.1, 0.0),
    (r"attn_sink$|\.bias(_vl)?$|confidence_head", 0.0, 0.0),
    (r"engram\.embed\.weight$", 0.0, 0.3),
    (r"embed\.weight$", 0.0, 0.5),
)
# (name, gain) of projections; their standard deviation is gain / sqrt(inputs), gain 1 by default
_GAINS = (
    (r"hc_\w+_fn$", 0.3),
    (r"attn\.wo_b\.weight$|experts\..*w2\.weight$|engram\.wkv\.weight$", 0.5),
    (r"markov_head", 0.3),
)
_PRE_BASE = -1.1  # four streams of sigmoid(-1.1) = 1/4 collapse to their mean
_COMB_DIAGONAL = 3.0  # each residual stream mostly keeps itself


@struct.dataclass
class Masters:
    """All that training changes: float32 `Params`, and the Engram tables [rows, width] each."""

    params: Params
    tables: tuple[Any, ...]


def master_specs(config: ModelConfig) -> Masters:
    """The `Masters` tree with a `TensorSpec` in place of every weight."""
    return Masters(params=param_specs(config), tables=engram_table_specs(config))


def initial_masters(config: ModelConfig, seed: int) -> Masters:
    """Random weights; each leaf is drawn from a generator of its own, seeded by its place."""
    leaves, tree = jax.tree.flatten(master_specs(config))
    seeds = np.random.SeedSequence(seed).spawn(len(leaves))
    drawn = [_draw(leaf, np.random.default_rng(s)) for leaf, s in zip(leaves, seeds, strict=True)]
    masters: Masters = jax.tree.unflatten(tree, drawn)
    return masters


def _draw(leaf: TensorSpec, generator: np.random.Generator) -> jax.Array:
    shape = (*leaf.stack, *leaf.shape)
    if leaf.name.endswith("_base"):
        return jnp.broadcast_to(_mix_base(leaf.shape[0]), shape)
    mean, std = _distribution(leaf)
    return jnp.asarray(mean + std * generator.standard_normal(shape, np.float32))


def _distribution(leaf: TensorSpec) -> tuple[float, float]:
    for pattern, mean, std in _FIXED:
        if re.search(pattern, leaf.name):
            return mean, std
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, leaf.name)), 1.0)
    return 0.0, gain / math.sqrt(leaf.shape[-1])


def _mix_base(mixes: int) -> jax.Array:
    """Base of a hyper-connection's mixes [S * (2 + S)] that begins near a plain residual."""
    streams = math.isqrt(mixes + 1) - 1
    pre, post = jnp.full(streams, _PRE_BASE), jnp.zeros(streams)
    return jnp.concatenate([pre, post, _COMB_DIAGONAL * jnp.eye(streams).reshape(-1)])


def checkpoint_masters(path: Path, config: ModelConfig) -> Masters:
    """A checkpoint's values, to train on from there.

    Raises:
      CheckpointError: if it does not fit the configuration.
    """

    def value(leaf: Any) -> jax.Array:
        made: jax.Array = values(leaf)
        return made

    def rows(table: EngramTable) -> jax.Array:
        codes = jnp.asarray(table.codes.view(E4M3))
        return value(QuantizedArray(codes, jnp.asarray(table.scales), format=Format.FP8_GROUP))

    params = load_params(path, config, progress=False)
    tables = tuple(map(rows, open_engram_tables(path, config)))
    return Masters(params=jax.tree.map(value, params, is_leaf=_is_quantized), tables=tables)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def stored_params(masters: Masters, config: ModelConfig, compute: Compute) -> Params:
    """The weights as values of the checkpoint's formats; unrounded with FLOAT32 numerics."""
    if compute.numerics is Numerics.FLOAT32:
        return masters.params
    params: Params = jax.tree.map(_stored, param_specs(config), masters.params)
    return params


def _stored(leaf: TensorSpec, master: jax.Array) -> jax.Array:
    if leaf.format == "f32":
        return master
    if isinstance(leaf.format, Format):
        master = straight_through(master, values(encode(master, leaf.format)))
    return master.astype(jnp.bfloat16)


def engram_rows(masters: Masters, ids: jax.Array, compute: Compute) -> Any:
    """Table rows [T, L, C, width] of hash ids [T, L, C], rounded as the tables store them."""
    rows = [table[ids[:, layer]] for layer, table in enumerate(masters.tables)]
    return compute.quantize(jnp.stack(rows, axis=1), Format.FP8_GROUP)
