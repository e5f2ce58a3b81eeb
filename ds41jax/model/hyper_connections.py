"""Lagged manifold-constrained hyper-connections (mHC): several residual streams, mixed per
sub-layer.

A sub-layer computes three things from the streams that enter it: `post` and `comb`, which write its
own output back, and `pre`, which collapses the streams for the *next* sub-layer. The first
sub-layer collapses with stream 0 alone; the last FFN's `pre` collapses the streams before the head.

Letters: T rows, S streams, D hidden size, M = S * (2 + S) mixes.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.kernels import mixes as mixes_kernel
from ds41jax.kernels.compute import REFERENCE, Compute
from ds41jax.kernels.linear import project, project_parts
from ds41jax.kernels.norm import mean_square
from ds41jax.model.tensors import spec


@struct.dataclass
class MixWeights:
    """Projection of the flattened streams to the mixes of one sub-layer."""

    fn: jax.Array  # [M, S * D]
    base: jax.Array  # [M]
    scale: jax.Array  # [3]: pre, post, comb


def mix_specs(config: ModelConfig, prefix: str, layers: tuple[int, ...]) -> MixWeights:
    m, width = config.num_mixes, config.hc_mult * config.hidden_size
    return MixWeights(
        fn=spec(f"{prefix}_fn", (m, width), "f32", layers=layers),
        base=spec(f"{prefix}_base", (m,), "f32", layers=layers),
        scale=spec(f"{prefix}_scale", (3,), "f32", layers=layers),
    )


def split_mixes(
    mixes: jax.Array, weights: MixWeights, config: ModelConfig, compute: Compute = REFERENCE
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mixes [T, M] to pre [T, S], post [T, S] and comb [T, S, S], all float32."""
    sizes = config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps
    return mixes_kernel.split_mixes(mixes, weights.base, weights.scale, *sizes, compute)


def stream_mixes(
    stream: jax.Array, weights: MixWeights, config: ModelConfig, compute: Compute = REFERENCE
) -> jax.Array:
    """Streams [T, S, D] to mixes [T, M]: a projection scaled by the row's reciprocal RMS."""
    flat = stream.reshape(stream.shape[0], -1)
    scale = lax.rsqrt(mean_square(flat, compute) + config.rms_norm_eps)
    return project(flat, weights.fn, compute) * scale


def mixes_on_gpu(
    stream: jax.Array,
    square: jax.Array,
    weights: MixWeights,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`split_mixes` of `stream_mixes`, by the kernels; square [T] is the streams' mean square."""
    parts = project_parts(stream.reshape(stream.shape[0], -1), weights.fn, compute)
    sizes = config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
    return mixes_kernel.finish_mixes(parts, square, weights.base, weights.scale, *sizes, compute)


def initial_pre(rows: int, config: ModelConfig) -> jax.Array:
    """The collapse weights of the first sub-layer, [T, S]: stream 0 alone."""
    return jnp.zeros((rows, config.hc_mult), jnp.float32).at[:, 0].set(1)
