"""Engram: an n-gram memory added to the residual streams before a layer.

The host hashes the last tokens to table rows and gathers them; here the rows become one key per
stream and one value, which each stream admits through its own gate. Image rows and padding get
none.

Letters: T rows, S streams, D hidden size, C table columns (n-gram orders x heads), E table width.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray, values
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import operand, quantized_linear
from ds41jax.kernels.rows import map_rows
from ds41jax.model.tensors import spec

GATE_FLOOR = 1e-6


@struct.dataclass
class EngramWeights:
    """Stacked over the Engram layers. The tables are not weights: they stay on disk."""

    wkv: QuantizedArray  # [(S + 1) * D, C * E]
    q_weight: jax.Array  # [S, D]
    k_weight: jax.Array  # [S, D]


def engram_specs(config: ModelConfig) -> EngramWeights:
    streams, d = config.hc_mult, config.hidden_size
    prefix, layers = "layers.{i}.engram", config.engram_layer_ids
    width = config.engram_columns * config.engram_head_dim
    return EngramWeights(
        wkv=spec(
            f"{prefix}.wkv.weight", ((streams + 1) * d, width), Format.FP8_BLOCK, layers=layers
        ),
        q_weight=spec(f"{prefix}.q_weight", (streams, d), "bf16", layers=layers),
        k_weight=spec(f"{prefix}.k_weight", (streams, d), "bf16", layers=layers),
    )


def engram_gate(
    stream: jax.Array, key: jax.Array, weights: EngramWeights, config: ModelConfig
) -> jax.Array:
    """Gate [T, S] of float32 streams and keys [T, S, D]: sigmoid of a signed square root."""
    eps = config.rms_norm_eps
    weight = weights.q_weight.astype(jnp.float32) * weights.k_weight.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(stream * stream, axis=-1) + eps)
    scale = scale * lax.rsqrt(jnp.mean(key * key, axis=-1) + eps)
    product = (stream * weight * key).sum(-1) * scale * config.hidden_size**-0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(product), GATE_FLOOR))
    return jax.nn.sigmoid(jnp.copysign(root, product))


def engram(
    stream: jax.Array,
    rows: QuantizedArray,
    admitted: jax.Array,
    weights: EngramWeights,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """Adds the gated memory to the streams.

    Args:
      stream: [T, S, D].
      rows: FP8_GROUP [T, C, E] gathered table rows.
      admitted: [T] bool, False for image rows.
      weights: of one Engram layer.
    """
    wkv = operand(weights.wkv, compute)
    split = config.hc_mult * config.hidden_size

    def tile(stream: jax.Array, rows: QuantizedArray, admitted: jax.Array) -> jax.Array:
        flat = values(rows).reshape(admitted.shape[0], -1)
        kv = quantized_linear(flat, wkv, compute).astype(jnp.float32)
        key, value = kv[:, :split].reshape(stream.shape), kv[:, None, split:]
        wide = stream.astype(jnp.float32)
        gate = jnp.where(admitted[:, None], engram_gate(wide, key, weights, config), 0)
        return compute.round(wide + gate[..., None] * value)

    return map_rows(compute, tile, stream, rows, admitted)
