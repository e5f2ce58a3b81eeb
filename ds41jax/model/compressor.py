"""Global KV: the latent that a KV source writes for every one or two tokens, and its index key.

A paired source (ratio 2) pools two tokens with a gate: its first half waits in the carry until the
second arrives. The latent's position is that of the first token of its group. The index key is made
from the latent before rotation and quantisation.

Letters: T rows, D head width, H hidden size, I index key width.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.formats import Format
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import linear, operand, project
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.quantize import Input
from ds41jax.kernels.rows import map_rows
from ds41jax.model.rope import compressed_frequencies, rotate
from ds41jax.model.state import CARRY_PAIRS, PAGE_ROWS, KVState, StepBatch, put, write_pages
from ds41jax.model.tensors import lookup, spec


@struct.dataclass
class CompressorWeights:
    """Stacked over the KV sources, `wgate` over the paired ones."""

    wkv: jax.Array  # [D, H]
    wgate: jax.Array  # [D, H]
    norm: jax.Array  # [D]
    wk: jax.Array  # [I, D]
    k_norm: jax.Array  # [I]


def compressor_specs(config: ModelConfig) -> CompressorWeights:
    d, h, i = config.head_dim, config.hidden_size, config.index_head_dim
    sources = config.kv_source_layer_ids
    paired = tuple(sources[s] for s in config.paired_sources)
    prefix = "layers.{i}.attn"
    return CompressorWeights(
        wkv=spec(f"{prefix}.compressor.wkv.weight", (d, h), "bf16", layers=sources),
        wgate=spec(f"{prefix}.compressor.wgate.weight", (d, h), "bf16", layers=paired),
        norm=spec(f"{prefix}.compressor.norm.weight", (d,), "bf16", layers=sources),
        wk=spec(f"{prefix}.indexer.wk.weight", (i, d), "bf16", layers=sources),
        k_norm=spec(f"{prefix}.indexer.k_norm.weight", (i,), "bf16", layers=sources),
    )


@struct.dataclass
class GlobalRows:
    """What a KV source makes of a step's rows.

    Attributes:
      rows: KV_FP4 [T, D]; keys: MXFP4 [T, I]; both stand only where `complete`.
      complete: [T] bool, the rows that finish a group.
      waiting: [T] bool, the first halves of pairs.
      halves: [T, 2, D] float32 value and gate score of each row, kept where `waiting`.
    """

    rows: Any
    keys: Any
    complete: jax.Array
    waiting: jax.Array
    halves: jax.Array


def no_global_rows(rows: int, config: ModelConfig, compute: Compute) -> GlobalRows:
    """What a layer that is no KV source makes: nothing, in the shapes of `compress`."""
    zeros = partial(jnp.zeros, dtype=jnp.float32)
    return GlobalRows(
        rows=compute.quantize(zeros((rows, config.head_dim)), Format.KV_FP4),
        keys=compute.quantize(zeros((rows, config.index_head_dim)), Format.MXFP4),
        complete=jnp.zeros(rows, bool),
        waiting=jnp.zeros(rows, bool),
        halves=zeros((rows, 2, config.head_dim)),
    )


def compress(
    x: Input,
    weights: CompressorWeights,
    source: jax.Array | int,
    ratio: int,
    carry: jax.Array,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> GlobalRows:
    """The global rows and index keys that rows x [T, H] of KV source `source` complete.

    `carry` is the state's: [paired sources, S, CARRY_PAIRS, 2, D].
    """
    if ratio == 1:
        wkv = weights.wkv[source]
        pooled = map_rows(compute, lambda x: linear(x, wkv, compute), x)
        halves = jnp.zeros((x.shape[0], 2, config.head_dim), jnp.float32)
        complete = batch.is_row
    else:
        pair = lookup(config.pair_index, source)
        pooled, halves = _pool_pairs(x, weights, source, pair, carry[pair], batch, compute)
        complete = batch.is_row & (batch.positions % 2 == 1)
    waiting = batch.is_row & ~complete
    positions = batch.positions // ratio * ratio
    rows, keys = _latent_rows(pooled, positions, weights, source, config, compute)
    complete &= batch.positions >= batch.per_row(batch.global_floor)
    return GlobalRows(rows=rows, keys=keys, complete=complete, waiting=waiting, halves=halves)


def store(
    made: GlobalRows,
    source: jax.Array | int,
    state: KVState,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> KVState:
    """Writes what `compress` made into the pages and the carry."""
    groups = batch.positions // jnp.maximum(lookup(config.source_ratios, source), 1)
    table = batch.page_tables[source]
    page = jnp.take_along_axis(batch.per_row(table), groups[:, None] // PAGE_ROWS, axis=1)[:, 0]
    pool = jax.tree.leaves(state.pages)[0].shape[0]
    page = jnp.where(made.complete, page, pool)
    row = groups % PAGE_ROWS
    return dataclasses.replace(
        state,
        pages=write_pages(state.pages, page, row, made.rows, compute),
        index_pages=write_pages(state.index_pages, page, row, made.keys, compute),
        carry=_store_halves(made, source, state.carry, batch, config, compute),
    )


def _store_halves(
    made: GlobalRows,
    source: jax.Array | int,
    carry: jax.Array,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """Keeps the last first halves of the step in the carry."""
    kept = made.waiting & (batch.positions >= batch.per_row(batch.ends) - 2 * CARRY_PAIRS)
    slots = jnp.where(kept, batch.per_row(batch.slots), carry.shape[1])
    place = batch.positions // 2 % CARRY_PAIRS
    pair = lookup(config.pair_index, source)
    return put(carry, (pair, slots, place), made.halves, compute)


def _pool_pairs(
    x: Input,
    weights: CompressorWeights,
    source: jax.Array | int,
    pair: jax.Array | int,
    carry: jax.Array,
    batch: StepBatch,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Pools each row with its predecessor, from the step or the carry [S, ...]; also the halves."""
    pair_weights = operand(weights.wkv[source], compute), operand(weights.wgate[pair], compute)

    def half(x: jax.Array) -> jax.Array:
        return jnp.stack([project(x, w, compute) for w in pair_weights], axis=1)

    halves = map_rows(compute, half, x)
    carried = carry[batch.per_row(batch.slots), (batch.positions - 1) // 2 % CARRY_PAIRS]
    in_step = batch.positions > batch.per_row(batch.starts)
    first = jnp.where(in_step[:, None, None], jnp.roll(halves, 1, axis=0), carried)
    return map_rows(compute, lambda a, b: _gated_mean(a, b, compute), first, halves), halves


def _gated_mean(first: jax.Array, second: jax.Array, compute: Compute) -> jax.Array:
    """Softmax over the pair's gate scores, per column; halves are [T, 2 (value, score), D]."""
    pair = jnp.stack([first, second], axis=1)
    gates = jax.nn.softmax(pair[:, :, 1], axis=1)
    return compute.round((pair[:, :, 0] * gates).sum(1))


def _latent_rows(
    pooled: jax.Array,
    positions: jax.Array,
    weights: CompressorWeights,
    source: jax.Array | int,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Any, Any]:
    """Normalised, rotated, quantised global rows [T, D] and index keys [T, I]."""
    frequencies = compressed_frequencies(config)
    norm, k_norm = weights.norm[source], weights.k_norm[source]
    wk, eps = operand(weights.wk[source], compute), config.rms_norm_eps

    def tile(pooled: jax.Array, positions: jax.Array) -> tuple[Any, Any]:
        latent = rms_norm(pooled, norm, eps, compute)
        key = linear(lax.stop_gradient(latent), wk, compute)  # the indexer learns apart
        key = rms_norm(key, k_norm, eps, compute)
        key = rotate(key, positions, frequencies, compute)
        latent = rotate(latent, positions, frequencies, compute)
        return (
            compute.quantize(latent, Format.KV_FP4),
            compute.quantize(key, Format.MXFP4),
        )

    return map_rows(compute, tile, pooled, positions)
