"""One transformer block: attention and experts between hyper-connections."""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from ds41jax.config import ModelConfig
from ds41jax.kernels import streams
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.quantize import Input
from ds41jax.kernels.rows import map_rows
from ds41jax.kernels.streams import collapse, expand
from ds41jax.model.attention import AttentionWeights, attention_specs
from ds41jax.model.hyper_connections import (
    MixWeights,
    mix_specs,
    mixes_on_gpu,
    split_mixes,
    stream_mixes,
)
from ds41jax.model.moe import MoeWeights, moe, moe_specs
from ds41jax.model.tensors import spec

Attend = Callable[[Input], jax.Array]
ATTENTION_PLANES, EXPERT_PLANES = (2,), (2, 4)  # of dense weights, and of routed experts


@struct.dataclass
class BlockWeights:
    """What every backbone layer and draft stage has, stacked."""

    attn: AttentionWeights
    attn_norm: jax.Array
    ffn: MoeWeights
    ffn_norm: jax.Array
    hc_attn: MixWeights
    hc_ffn: MixWeights


def block_specs(
    config: ModelConfig,
    prefix: str,
    layers: tuple[int, ...],
    num_experts: int,
    expert_layers: tuple[int, ...] | None = None,
) -> BlockWeights:
    """`prefix` is "layers.{i}" or "mtp.{i}"; `expert_layers` those whose experts are here."""
    d = config.hidden_size
    return BlockWeights(
        attn=attention_specs(config, f"{prefix}.attn", layers),
        attn_norm=spec(f"{prefix}.attn_norm.weight", (d,), "bf16", layers=layers),
        ffn=moe_specs(config, f"{prefix}.ffn", layers, num_experts, expert_layers),
        ffn_norm=spec(f"{prefix}.ffn_norm.weight", (d,), "bf16", layers=layers),
        hc_attn=mix_specs(config, f"{prefix}.hc_attn", layers),
        hc_ffn=mix_specs(config, f"{prefix}.hc_ffn", layers),
    )


def attention_input(
    stream: jax.Array,
    pre: jax.Array,
    weights: BlockWeights,
    config: ModelConfig,
    compute: Compute,
) -> Input:
    """The normalised input [T, D] of a block's attention, of streams [T, S, D] and pre [T, S]."""
    norm, eps = weights.attn_norm, config.rms_norm_eps
    if compute.on_gpu:
        return streams.enter(stream, pre, norm, eps, ATTENTION_PLANES, compute)[0]

    def tile(stream: jax.Array, pre: jax.Array) -> jax.Array:
        return rms_norm(collapse(stream, pre, compute), norm, eps, compute)

    return map_rows(compute, tile, stream, pre)


@struct.dataclass
class Middle:
    """A block between its attention and the end of its experts.

    Attributes:
      stream: [T, S, D] residual streams with the attention's output.
      x: [T, D] normalised input of the experts.
      pre: [T, S] collapse weights for the sub-layer after this block.
      post: [T, S], comb: [T, S, S] how the experts' output joins the streams.
    """

    stream: jax.Array
    x: Input
    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def first_half(
    stream: jax.Array,
    pre: jax.Array,
    attend: Attend,
    weights: BlockWeights,
    config: ModelConfig,
    compute: Compute,
) -> Middle:
    """A block up to the input of its experts. See `block`."""
    if compute.on_gpu:
        return _first_half_on_gpu(stream, pre, attend, weights, config, compute)

    def mix_attention(stream: jax.Array) -> tuple[jax.Array, ...]:
        mixes = stream_mixes(stream, weights.hc_attn, config, compute)
        return split_mixes(mixes, weights.hc_attn, config, compute)

    def between(
        stream: jax.Array, output: jax.Array, pre: jax.Array, post: jax.Array, comb: jax.Array
    ) -> Any:
        stream = expand(output, stream, post, comb, compute)
        mixes = stream_mixes(stream, weights.hc_ffn, config, compute)
        x = collapse(stream, pre, compute)
        x = rms_norm(x, weights.ffn_norm, config.rms_norm_eps, compute)
        return stream, x, *split_mixes(mixes, weights.hc_ffn, config, compute)

    x = attention_input(stream, pre, weights, config, compute)
    attn_pre, post, comb = map_rows(compute, mix_attention, stream)
    output = attend(x)
    return Middle(*map_rows(compute, between, stream, output, attn_pre, post, comb))


def _first_half_on_gpu(
    stream: jax.Array,
    pre: jax.Array,
    attend: Attend,
    weights: BlockWeights,
    config: ModelConfig,
    compute: Compute,
) -> Middle:
    """`first_half` in kernels that each do what stands between two products."""
    eps, norms = config.rms_norm_eps, (weights.attn_norm, weights.ffn_norm)
    x, square = streams.enter(stream, pre, norms[0], eps, ATTENTION_PLANES, compute)
    pre, post, comb = mixes_on_gpu(stream, square, weights.hc_attn, config, compute)
    stream, x, square = streams.leave_and_enter(
        attend(x), stream, post, comb, pre, norms[1], eps, EXPERT_PLANES, compute
    )
    return Middle(stream, x, *mixes_on_gpu(stream, square, weights.hc_ffn, config, compute))


def second_half(output: jax.Array, middle: Middle, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """A block from the output [T, D] of its experts on. See `block`."""

    def join(o: jax.Array, s: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
        return expand(o, s, post, comb, compute)

    stream = map_rows(compute, join, output, middle.stream, middle.post, middle.comb)
    return stream, middle.pre


def block(
    stream: jax.Array,
    pre: jax.Array,
    is_image: jax.Array,
    attend: Attend,
    weights: BlockWeights,
    num_experts_per_tok: int,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Runs one block whose experts are here.

    Args:
      stream: [T, S, D] residual streams.
      pre: [T, S] collapse weights left by the sub-layer before.
      is_image: [T] bool.
      attend: the attention of this block, [T, D] -> [T, D], on a GPU parts [P, T, D] of that.
      weights: of one layer.

    Returns:
      The streams after the block, and the collapse weights for the sub-layer that follows.
    """
    middle = first_half(stream, pre, attend, weights, config, compute)
    output = moe(middle.x, is_image, weights.ffn, num_experts_per_tok, config, compute)
    return second_half(output, middle, compute)
