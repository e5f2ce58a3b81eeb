"""One attention layer: window rows of its own, global rows of its KV source, output projection.

Keys and values are one shared latent. Only the low-rank query is normalised. The output is rotated
back before the grouped projection.

Letters: T rows, H heads, D head width, W window, K selected global rows, G output groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels import gpu, latents, sparse_attention
from ds41jax.kernels.cards import Part, sum_of_cards
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import (
    grouped_linear,
    grouped_parts,
    operand,
    quantized_linear,
    quantized_parts,
)
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.quantize import Input
from ds41jax.kernels.rows import map_rows
from ds41jax.model.rope import rotate, turns
from ds41jax.model.state import PAGE_ROWS, KVState, Rows, StepBatch
from ds41jax.model.tensors import Split, spec

Frequencies = jax.Array | np.ndarray  # [rotary pairs] float32


@struct.dataclass
class AttentionWeights:
    attn_sink: jax.Array  # [H]
    wq_a: QuantizedArray  # [q_lora_rank, hidden]
    q_norm: jax.Array  # [q_lora_rank]
    wq_b: QuantizedArray  # [H * D, q_lora_rank]
    wkv: QuantizedArray  # [D, hidden]
    kv_norm: jax.Array  # [D]
    wo_a: QuantizedArray  # [G * o_lora_rank, H * D / G]
    wo_b: QuantizedArray  # [hidden, G * o_lora_rank]


def attention_specs(config: ModelConfig, prefix: str, layers: tuple[int, ...]) -> AttentionWeights:
    """`prefix` is "layers.{i}.attn" or "mtp.{i}.attn"."""
    hidden, width, q_rank = config.hidden_size, config.head_dim, config.q_lora_rank
    heads, groups, o_rank = config.num_attention_heads, config.o_groups, config.o_lora_rank
    fp8: Any = {"format": Format.FP8_BLOCK, "layers": layers}

    def share(axis: int, unit: int) -> Split:
        return Split(Part.ATTENTION, axis, unit)

    return AttentionWeights(
        attn_sink=spec(
            f"{prefix}.attn_sink", (heads,), "f32", layers=layers, split=share(0, heads // groups)
        ),
        wq_a=spec(f"{prefix}.wq_a.weight", (q_rank, hidden), **fp8),
        q_norm=spec(f"{prefix}.q_norm.weight", (q_rank,), "bf16", layers=layers),
        wq_b=spec(
            f"{prefix}.wq_b.weight",
            (heads * width, q_rank),
            split=share(0, heads * width // groups),
            **fp8,
        ),
        wkv=spec(f"{prefix}.wkv.weight", (width, hidden), **fp8),
        kv_norm=spec(f"{prefix}.kv_norm.weight", (width,), "bf16", layers=layers),
        wo_a=spec(
            f"{prefix}.wo_a.weight",
            (groups * o_rank, heads * width // groups),
            split=share(0, o_rank),
            **fp8,
        ),
        wo_b=spec(
            f"{prefix}.wo_b.weight", (hidden, groups * o_rank), split=share(1, o_rank), **fp8
        ),
    )


def window_rows(
    x: Input,
    positions: jax.Array,
    weights: AttentionWeights,
    frequencies: Frequencies,
    config: ModelConfig,
    compute: Compute,
) -> Rows:
    """The layer's own key-value rows [T, D] of x [T, hidden], rotated and quantised for storage."""
    wkv, norm = operand(weights.wkv, compute), weights.kv_norm

    def tile(x: jax.Array, positions: jax.Array) -> Rows:
        kv = rms_norm(quantized_linear(x, wkv, compute), norm, config.rms_norm_eps, compute)
        return compute.quantize(rotate(kv, positions, frequencies, compute), Format.FP8_GROUP)

    return map_rows(compute, tile, x, positions)


def queries(
    x: jax.Array,
    positions: jax.Array,
    weights: AttentionWeights,
    frequencies: Frequencies,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """The normalised low-rank query [T, q_lora_rank] and the rotated queries [T, H, D].

    H are the heads of this card. Not for a GPU: see `rows_and_queries`.
    """
    assert not compute.on_gpu, "attention would rotate them again"
    wq_a, wq_b = operand(weights.wq_a, compute), operand(weights.wq_b, compute)
    norm = weights.q_norm

    def tile(x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        latent = quantized_linear(x, wq_a, compute)
        latent = rms_norm(latent, norm, config.rms_norm_eps, compute)
        q = quantized_linear(latent, wq_b, compute)
        q = q.reshape(q.shape[0], -1, config.head_dim)
        return latent, rotate(q, positions, frequencies, compute)

    return map_rows(compute, tile, x, positions)


def rows_and_queries(
    x: Input,
    positions: jax.Array,
    weights: AttentionWeights,
    frequencies: Frequencies,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Rows, Input, jax.Array]:
    """`window_rows`, and the latent and queries of `queries`.

    On a GPU queries are not rotated yet: attention does that as it reads them.
    """
    if not compute.on_gpu:
        rows = window_rows(x, positions, weights, frequencies, config, compute)
        return rows, *queries(x, positions, weights, frequencies, config, compute)
    latent, rows = latents.latents(
        quantized_parts(x, (weights.wq_a, weights.wkv), compute),
        (weights.q_norm, weights.kv_norm),
        turns(positions, frequencies),
        config.rms_norm_eps,
        compute,
    )
    q = quantized_linear(latent, weights.wq_b, compute)
    return rows, latent, q.reshape(q.shape[0], -1, config.head_dim)


def window_index(batch: StepBatch, floor: jax.Array, window: int, ring: int) -> jax.Array:
    """Where a row's window lies in `ring_and_step_rows`: [T, W], oldest first, -1 where none.

    Rows before the step come from the ring, the others from the step itself, which may be longer
    than the ring.

    Args:
      floor: [B] positions below which no window row exists.
      window: W.
      ring: rows of a sequence's ring.
    """
    rows = jnp.arange(batch.positions.shape[0])[:, None]
    age = jnp.arange(window - 1, -1, -1)[None, :]
    positions = batch.positions[:, None] - age
    in_step = positions >= batch.per_row(batch.starts)[:, None]
    sequences = batch.starts.shape[0]
    stored = batch.sequences[:, None] * ring + positions % ring
    index = jnp.where(in_step, sequences * ring + rows - age, stored)
    lowest = jnp.maximum(batch.per_row(floor), 0)[:, None]
    return jnp.where((positions >= lowest) & batch.is_row[:, None], index, -1)


def ring_and_step_rows(
    ring: Rows, layer: jax.Array | int, slots: jax.Array, step: Rows, compute: Compute
) -> sparse_attention.Rows:
    """One layer's rings of the sequences' slots [B], flattened, then the step's rows [T, D]."""
    if compute.on_gpu:
        assert isinstance(ring, QuantizedArray) and isinstance(step, QuantizedArray)
        return sparse_attention.RingAndStep(ring.at_layer(layer), slots, step)

    def join(ring: jax.Array, step: jax.Array) -> jax.Array:
        stored = ring[layer, slots]
        return jnp.concatenate([stored.reshape(-1, stored.shape[-1]), step])

    return jax.tree.map(join, ring, step)


def global_index(selected: jax.Array, batch: StepBatch, source: jax.Array | int) -> jax.Array:
    """Pool rows [T, K] of a sequence's selected global rows [T, K]; -1 stays -1."""
    table = batch.per_row(batch.page_tables[source])
    page = jnp.take_along_axis(table, jnp.maximum(selected, 0) // PAGE_ROWS, axis=1)
    valid = (selected >= 0) & batch.is_row[:, None]
    return jnp.where(valid, page * PAGE_ROWS + selected % PAGE_ROWS, -1)


def pool_rows(state: KVState) -> Rows:
    """The page pool as one list of rows [P * PAGE_ROWS, D]."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), state.pages)


def attend(
    q: jax.Array,
    positions: jax.Array,
    sources: tuple[tuple[sparse_attention.Rows, jax.Array], ...],
    weights: AttentionWeights,
    frequencies: Frequencies,
    config: ModelConfig,
    compute: Compute,
    guide: jax.Array | None = None,
) -> jax.Array:
    """Attention over the given rows, and the output projection: q [T, H, D] -> [T, hidden].

    On a GPU parts [P, T, hidden] of the result, of queries as `rows_and_queries` leaves them.
    `guide`: see `sparse_attention`.
    """
    scale, sink = config.head_dim**-0.5, weights.attn_sink
    if compute.on_gpu:
        return _attend_on_gpu(q, positions, sources, weights, frequencies, scale, compute)
    out = sparse_attention.sparse_attention(q, sources, sink, scale, compute, guide)
    return project_output(out, positions, weights, frequencies, config, compute)


def _attend_on_gpu(
    q: jax.Array,
    positions: jax.Array,
    sources: tuple[tuple[sparse_attention.Rows, jax.Array], ...],
    weights: AttentionWeights,
    frequencies: Frequencies,
    scale: float,
    compute: Compute,
) -> jax.Array:
    """`attend` in parts [P, T, hidden], with the rotations in the kernels of attention."""
    groups = q.shape[1] * q.shape[2] // weights.wo_a.shape[-1]
    angles = turns(positions, frequencies)
    out = sparse_attention.rotated_attention(
        q, angles, sources, weights.attn_sink, scale, groups, compute
    )
    (parts,) = quantized_parts(grouped_parts(out, weights.wo_a, compute), (weights.wo_b,), compute)
    if compute.splits(Part.ATTENTION):
        return sum_of_cards(gpu.add_parts(parts))[None]
    return parts


def project_output(
    out: jax.Array,
    positions: jax.Array,
    weights: AttentionWeights,
    frequencies: Frequencies,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """Rotates heads [T, H, D] back and projects them, by groups and then together, to [T, hidden].

    `wo_a` is used at full precision with its input as is; only `wo_b`'s input is quantised. Cards
    that hold a share of the heads meet here.
    """
    wo_a, wo_b = operand(weights.wo_a, compute), operand(weights.wo_b, compute)
    width, whole = weights.wo_a.shape[-1], not compute.splits(Part.ATTENTION)

    def tile(out: jax.Array, positions: jax.Array) -> jax.Array:
        out = rotate(out, positions, frequencies, compute, inverse=True)
        latent = grouped_linear(out.reshape(out.shape[0], -1, width), wo_a, compute)
        return quantized_linear(latent, wo_b, compute, rounded=whole)

    projected = map_rows(compute, tile, out, positions)
    return projected if whole else compute.round(sum_of_cards(projected))
