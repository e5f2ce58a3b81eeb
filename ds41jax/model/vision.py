"""The vision tower and its aligner: from the patches of one image to the embeddings of its span.

A ViT with full attention over one image's patches and 2-D rotary positions, then 3x3 neighbours
merged and projected to the text width (official `inference/vision.py`). An image is computed alone,
so its embeddings depend on nothing else in a step.

  N patches (padded), C tokens of the text model, D width of the tower, H heads, K head width

Images come in any grid. `image_span` pads patches to one of a few buckets and passes the grid as
data, so that a handful of compiled programs serve every size.
"""

import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig, VisionConfig
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import dot, linear
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.rows import map_rows
from ds41jax.model.rope import inverse_frequencies
from ds41jax.model.tensors import spec

NORM_EPS = 1e-6
QUERY_TILE = 128  # rows of scores held at once: 75 MB at 9,216 patches and 16 heads
BUCKET_STEP = 128
IMAGE_CHANNELS = 3


class TokenType(enum.IntEnum):
    """What a position of the prompt holds; all but TEXT carry the image token's id."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@struct.dataclass
class Affine:
    """weight [out, in] and bias [out], bfloat16."""

    weight: Any
    bias: Any


@struct.dataclass
class BlockWeights:
    """One ViT block, or all of them stacked on a first axis.

    Attributes:
      norm1, norm2: [D].
      wqkv: [3D, D], the rows of q, k and v in this order.
      wo: [D, D].
      w1: [2 * intermediate_size, D], gate rows then up rows.
      w2: [D, intermediate_size].
    """

    norm1: Any
    wqkv: Affine
    wo: Affine
    norm2: Any
    w1: Any
    w2: Any


@struct.dataclass
class AlignerWeights:
    """w1 [hidden_size, D * ratio^2] and w2 [hidden_size, hidden_size] of the projector."""

    w1: Affine
    w2: Affine


@struct.dataclass
class VisionWeights:
    """Everything that an image needs; names as in the checkpoint without `vision.`."""

    patch_embed: Affine
    blocks: BlockWeights
    norm: Any
    aligner: AlignerWeights
    image_start: Any
    image_end: Any
    image_newline: Any


def vision_specs(config: ModelConfig) -> Any:
    """`VisionWeights` of `TensorSpec`s; None for a model without a vision tower."""
    vision = config.vision
    if vision is None:
        return None
    dim, inter, out = vision.hidden_size, vision.intermediate_size, config.hidden_size
    layers = tuple(range(vision.num_hidden_layers))

    def affine(name: str, rows: int, columns: int, **stack: Any) -> Affine:
        return Affine(
            spec(f"{name}.weight", (rows, columns), "bf16", **stack),
            spec(f"{name}.bias", (rows,), "bf16", **stack),
        )

    block = "vision.blocks.{i}"
    return VisionWeights(
        patch_embed=affine("vision.patch_embed.proj", dim, IMAGE_CHANNELS * vision.patch_size**2),
        blocks=BlockWeights(
            norm1=spec(f"{block}.norm1.weight", (dim,), "bf16", layers=layers),
            wqkv=affine(f"{block}.attn.wqkv", 3 * dim, dim, layers=layers),
            wo=affine(f"{block}.attn.wo", dim, dim, layers=layers),
            norm2=spec(f"{block}.norm2.weight", (dim,), "bf16", layers=layers),
            w1=spec(f"{block}.mlp.w1.weight", (2 * inter, dim), "bf16", layers=layers),
            w2=spec(f"{block}.mlp.w2.weight", (dim, inter), "bf16", layers=layers),
        ),
        norm=spec("vision.norm.weight", (dim,), "bf16"),
        aligner=AlignerWeights(
            w1=affine("aligner.w1", out, dim * vision.downsample_ratio**2),
            w2=affine("aligner.w2", out, out),
        ),
        image_start=spec("image_start", (out,), "bf16"),
        image_end=spec("image_end", (out,), "bf16"),
        image_newline=spec("image_newline", (out,), "bf16"),
    )


def num_image_tokens(n_llm_h: int, n_llm_w: int) -> int:
    """Length of an image's span: its tokens, a new line per row, start and end."""
    return n_llm_h * (n_llm_w + 1) + 2


def token_types(n_llm_h: int, n_llm_w: int) -> np.ndarray:
    """[span] int32 `TokenType`s of an image's span."""
    row = [TokenType.IMAGE] * n_llm_w + [TokenType.NEWLINE]
    return np.array([TokenType.START, *row * n_llm_h, TokenType.END], np.int32)


def affine(x: jax.Array, weights: Affine, compute: Compute) -> jax.Array:
    """x W^T + b over the last axis, rounded once."""
    return compute.round(dot(x, weights.weight) + weights.bias.astype(jnp.float32))


def add(x: jax.Array, y: jax.Array, compute: Compute) -> jax.Array:
    """The residual sum, rounded."""
    return compute.round(x.astype(jnp.float32) + y.astype(jnp.float32))


def rotary_tables(
    grid_w: jax.Array | int, num_patches: int, config: VisionConfig
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [N, K / 2] float32 of the patches in reading order.

    The first half of the angles turns with the row, the second with the column, at the same
    frequencies. Rows past the image's last patch are padding and hold no meaning.
    """
    frequencies = inverse_frequencies(config.head_dim // 2, config.rope_theta, None)
    index = jnp.arange(num_patches)
    places = jnp.stack([index // grid_w, index % grid_w], axis=1).astype(jnp.float32)
    angles = (places[:, :, None] * frequencies).reshape(num_patches, -1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate_halves(x: jax.Array, rotary: tuple[jax.Array, jax.Array], compute: Compute) -> jax.Array:
    """Rotates pairs (i, i + K / 2) of x [N, H, K], not adjacent ones as the text model does."""
    cos, sin = (table[:, None, :] for table in rotary)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return compute.round(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))


def vit_attention(
    weights: BlockWeights,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    valid: jax.Array,
    config: VisionConfig,
    compute: Compute,
) -> jax.Array:
    """Every patch attends to all valid ones. x [N, D] is already normalised; `valid` [N] bool.

    Scores, softmax and the weighted sum are float32 with one rounding at the end (the official code
    leaves the inner rounding to a fused kernel).
    """
    heads, width = config.num_attention_heads, config.head_dim
    qkv = affine(x, weights.wqkv, compute).reshape(x.shape[0], 3, heads, width)
    q = rotate_halves(qkv[:, 0], rotary, compute).astype(jnp.float32)
    k = rotate_halves(qkv[:, 1], rotary, compute).astype(jnp.float32)
    v = qkv[:, 2].astype(jnp.float32)

    def attend(rows: jax.Array) -> jax.Array:
        scores = jnp.einsum("thk,nhk->htn", rows, k, precision=lax.Precision.HIGHEST)
        scores = jnp.where(valid, scores * width**-0.5, -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("htn,nhk->thk", probabilities, v, precision=lax.Precision.HIGHEST)

    mixed = compute.round(map_rows(compute.defined, attend, q, tile=QUERY_TILE))
    return affine(mixed.reshape(x.shape), weights.wo, compute)


def vit_mlp(weights: BlockWeights, x: jax.Array, compute: Compute) -> jax.Array:
    """silu(gate) * up, projected back; each step is rounded. x [N, D] is already normalised."""
    gate, up = jnp.split(linear(x, weights.w1, compute).astype(jnp.float32), 2, axis=-1)
    gate = compute.round(jax.nn.silu(gate)).astype(jnp.float32)
    return linear(compute.round(gate * up), weights.w2, compute)


def vit_block(
    weights: BlockWeights,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    valid: jax.Array,
    config: VisionConfig,
    compute: Compute,
) -> jax.Array:
    """One pre-norm block. x [N, D]; see `vit_attention` for the rest."""
    h = rms_norm(x, weights.norm1, NORM_EPS, compute)
    x = add(x, vit_attention(weights, h, rotary, valid, config, compute), compute)
    h = rms_norm(x, weights.norm2, NORM_EPS, compute)
    return add(x, vit_mlp(weights, h, compute), compute)


def vision_tower(
    weights: VisionWeights,
    patches: jax.Array,
    grid_h: jax.Array | int,
    grid_w: jax.Array | int,
    config: VisionConfig,
    compute: Compute,
) -> jax.Array:
    """Features [N, D] of patches [N, 3 * patch_size^2], of which the first grid_h * grid_w exist.

    The blocks are scanned, so that 32 of them compile as fast as one.
    """
    num_patches = patches.shape[0]
    valid = jnp.arange(num_patches) < grid_h * grid_w
    rotary = rotary_tables(grid_w, num_patches, config)

    def step(x: jax.Array, block: BlockWeights) -> tuple[jax.Array, None]:
        return vit_block(block, x, rotary, valid, config, compute), None

    x, _ = lax.scan(step, affine(patches, weights.patch_embed, compute), weights.blocks)
    return rms_norm(x, weights.norm, NORM_EPS, compute)


def aligner(
    weights: AlignerWeights,
    x: jax.Array,
    grid_h: jax.Array | int,
    grid_w: jax.Array | int,
    num_tokens: int,
    config: VisionConfig,
    compute: Compute,
) -> jax.Array:
    """Merges each ratio x ratio square of patches into one token of the text width.

    Args:
      weights: the projector.
      x: [N, D] features, the first grid_h * grid_w of them in reading order.
      grid_h: rows of patches.
      grid_w: columns of patches.
      num_tokens: tokens to compute, at least the grid's; those past it are padding.
      config: the tower's.
      compute: rounding.

    Returns:
      [num_tokens, hidden_size] in reading order. Squares that reach over the edge are completed
      with zeros. Channels lead the merged axis: column c * ratio^2 + dy * ratio + dx.
    """
    ratio = config.downsample_ratio
    token = jnp.arange(num_tokens)[:, None]
    offset = jnp.arange(ratio**2)
    columns = -(-grid_w // ratio)
    row = token // columns * ratio + offset // ratio
    column = token % columns * ratio + offset % ratio
    inside = (row < grid_h) & (column < grid_w)
    squares = jnp.where(inside[..., None], x[jnp.where(inside, row * grid_w + column, 0)], 0)
    merged = squares.swapaxes(1, 2).reshape(num_tokens, -1)
    hidden = affine(merged, weights.w1, compute).astype(jnp.float32)
    hidden = compute.round(jax.nn.gelu(hidden, approximate=False))
    return affine(hidden, weights.w2, compute)


def patch_buckets(config: VisionConfig) -> tuple[int, ...]:
    """Ascending patch counts that programs are compiled for: the largest image's and 3/4, 1/2,
    3/8, ... of it, in whole steps of 128.

    The largest is one row of tokens, which spends least on new lines. With 1,024 tokens an image,
    of at least 1,510 patches, six programs serve every size.
    """
    most = (config.max_image_tokens - num_image_tokens(1, 0)) * config.downsample_ratio**2
    buckets = {BUCKET_STEP}
    while most > BUCKET_STEP:
        buckets |= {-(-size // BUCKET_STEP) * BUCKET_STEP for size in (most, most * 3 // 4)}
        most //= 2
    return tuple(sorted(buckets))


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def padded_image_span(
    weights: VisionWeights,
    patches: jax.Array,
    grid: jax.Array,
    config: VisionConfig,
    compute: Compute,
) -> jax.Array:
    """Embeddings of an image's span, padded: one compiled program per patch bucket.

    Args:
      weights: of the tower, aligner and marks.
      patches: [bucket, 3 * patch_size^2], the first grid[0] * grid[1] of them real.
      grid: [2] int32 rows and columns of patches.
      config: the tower's.
      compute: rounding.

    Returns:
      [max_image_tokens, hidden_size]; rows past the span's `num_image_tokens` hold no meaning.
    """
    grid_h, grid_w = grid
    x = vision_tower(weights, patches, grid_h, grid_w, config, compute)
    size = config.max_image_tokens
    tokens = aligner(weights.aligner, x, grid_h, grid_w, size, config, compute)
    marks = [weights.image_start, weights.image_newline, weights.image_end]
    start, newline, end = (mark.astype(tokens.dtype) for mark in marks)
    columns = -(-grid_w // config.downsample_ratio)
    rows = -(-grid_h // config.downsample_ratio)
    place = jnp.arange(size)
    row, column = (place - 1) // (columns + 1), (place - 1) % (columns + 1)
    span = tokens[jnp.clip(row * columns + column, 0, size - 1)]
    span = jnp.where((column == columns)[:, None], newline, span)
    span = jnp.where((place == 0)[:, None], start, span)
    return jnp.where((place == rows * (columns + 1) + 1)[:, None], end, span)


def image_span(
    weights: VisionWeights,
    patches: np.ndarray,
    grid_h: int,
    grid_w: int,
    config: VisionConfig,
    compute: Compute,
) -> jax.Array:
    """Embeddings of the whole span of one image, ready to stand for its tokens' embeddings.

    Args:
      weights: of the tower, aligner and marks.
      patches: [grid_h * grid_w, 3, patch_size, patch_size] in reading order, in [-1, 1]; bfloat16,
        or rounded to it here.
      grid_h: rows of patches.
      grid_w: columns of patches.
      config: the tower's.
      compute: rounding.

    Returns:
      [span, hidden_size]: start, then every row of image tokens with its new line, then end.

    Raises:
      ValueError: the patches do not have this shape, or the span exceeds `max_image_tokens`.
    """
    shape = (grid_h * grid_w, IMAGE_CHANNELS, config.patch_size, config.patch_size)
    if patches.shape != shape or min(grid_h, grid_w) < 1:
        raise ValueError(f"a grid of {grid_h} x {grid_w} needs patches {shape}: {patches.shape}")
    ratio = config.downsample_ratio
    length = num_image_tokens(math.ceil(grid_h / ratio), math.ceil(grid_w / ratio))
    if length > config.max_image_tokens:
        raise ValueError(f"an image of {length} tokens: at most {config.max_image_tokens}")
    bucket = next(size for size in patch_buckets(config) if size >= shape[0])
    # The host pads: on the device every image size would compile a padding of its own.
    padded = np.zeros((bucket, math.prod(shape[1:])), ml_dtypes.bfloat16)
    padded[: shape[0]] = patches.reshape(shape[0], -1)
    grid = np.array([grid_h, grid_w], np.int32)
    return padded_image_span(weights, padded, grid, config, compute)[:length]
