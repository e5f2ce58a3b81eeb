"""The vision tower, aligner and image span against the official ones."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import generated, manifest
from paths import GOLDEN
from safetensors import safe_open
from safetensors.numpy import load_file

from ds41jax.config import ModelConfig, VisionConfig, parse_config
from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.kernels.norm import rms_norm
from ds41jax.model.tensors import TensorSpec
from ds41jax.model.vision import (
    NORM_EPS,
    VisionWeights,
    affine,
    aligner,
    image_span,
    padded_image_span,
    patch_buckets,
    rotary_tables,
    token_types,
    vision_specs,
    vision_tower,
    vit_attention,
    vit_block,
)

REFERENCE, FLOAT32 = REFERENCE, FLOAT32
LIMITS = {REFERENCE: 0.008, FLOAT32: 1e-4}  # relative rms, recorded with the golden data
OFFICIAL_CONFIG = Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json"
TINY_SHARD = GOLDEN / "tiny" / "model-00001-of-00004.safetensors"


def load_config(path: Path) -> ModelConfig:
    return parse_config(json.loads(path.read_text()))


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None
    return config.vision


def load_vision(config: ModelConfig, read: Callable[[str], Any]) -> VisionWeights:
    """Fills the specs with the tensors that `read` gives by name."""

    def load(spec: TensorSpec) -> jax.Array:
        stack = np.stack([read(name) for _, name, _ in spec.stored()])
        loaded = stack.reshape(*spec.stack, *spec.shape)
        assert loaded.dtype == spec.abstract().dtype
        return jnp.asarray(loaded)

    return jax.tree.map(load, vision_specs(config))


def rel_rms(found: Any, expected: Any) -> float:
    """rms of the difference over rms of the expected values."""
    found, expected = (np.asarray(x).astype(np.float64) for x in (found, expected))
    assert found.shape == expected.shape
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def changed(found: Any, expected: np.ndarray) -> float:
    """Share of elements that differ at all.

    One rounding left out stays below the limit on the error but changes 20 % to 50 % of a block's
    elements; another order of summation changes few.
    """
    return float(np.mean(np.asarray(found) != expected))


def flat(patches: np.ndarray) -> jax.Array:
    return jnp.asarray(patches.reshape(len(patches), -1))


@functools.cache
def tiny() -> tuple[VisionConfig, VisionWeights]:
    config = load_config(GOLDEN / "tiny" / "config.json")
    with safe_open(TINY_SHARD, "np") as shard:
        return vision_of(config), load_vision(config, shard.get_tensor)


@functools.cache
def tiny_ops() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "ops" / "vision.safetensors")


@functools.cache
def tiny_run() -> dict[str, np.ndarray]:
    names = ("patches", "vit_out", "aligner_out", "aligner_out_smooth", "span_types")
    with safe_open(GOLDEN / "tiny_runs.safetensors", "np") as run:
        return {name: run.get_tensor(f"img.{name}") for name in names}


RUN_GRID = (6, 8)


def jitted(function: Callable[..., Any], config: VisionConfig, compute: Compute) -> Any:
    """Compiled as in use, where XLA could drop roundings that the eager path keeps."""
    return jax.jit(functools.partial(function, config=config, compute=compute))


def random_patches(grid: tuple[int, int], seed: int = 0) -> np.ndarray:
    shape = (grid[0] * grid[1], 3, 14, 14)
    values = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    return values.astype(jnp.bfloat16)


def is_vision(name: str) -> bool:
    return name.startswith(("vision.", "aligner.", "image_"))


def test_specs_are_the_checkpoint() -> None:
    specs = jax.tree.leaves(vision_specs(load_config(GOLDEN / "tiny" / "config.json")))
    declared = {name: (dtype, list(shape)) for s in specs for name, dtype, shape in s.files()}
    with safe_open(TINY_SHARD, "np") as shard:
        names = shard.keys()
        slices = {name: shard.get_slice(name) for name in names if is_vision(name)}
        stored = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    assert declared == stored


def test_released_size() -> None:
    specs = jax.tree.leaves(vision_specs(load_config(OFFICIAL_CONFIG)))
    stored = [file for spec in specs for file in spec.files()]
    assert len(stored) == 2 + 32 * 8 + 1 + 4 + 3
    assert sum(2 * int(np.prod(shape)) for _, _, shape in stored) == 970_536_960


def test_patch_embedding_and_rotary_tables() -> None:
    config, weights = tiny()
    ops = tiny_ops()
    embedded = jax.jit(functools.partial(affine, compute=REFERENCE))(
        flat(ops["image.patches"]), weights.patch_embed
    )
    expected = ops["patch_embed"].astype(np.float32)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(expected) + 1e-30)) - 7)
    assert np.all(np.abs(np.asarray(embedded, np.float32) - expected) <= ulp)
    cos, sin = rotary_tables(int(ops["image.grid"][1]), len(expected), config)
    np.testing.assert_allclose(cos, ops["rope.cos"][:, 0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, ops["rope.sin"][:, 0], rtol=0, atol=1e-6)


def test_first_block() -> None:
    config, weights = tiny()
    ops = tiny_ops()
    x = jnp.asarray(ops["patch_embed"])
    rotary = rotary_tables(int(ops["image.grid"][1]), len(x), config)
    valid = jnp.ones(len(x), bool)
    first = jax.tree.map(lambda leaf: leaf[0], weights.blocks)
    h = rms_norm(x, first.norm1, NORM_EPS, REFERENCE)
    attention = jitted(vit_attention, config, REFERENCE)(first, h, rotary, valid)
    assert rel_rms(attention, ops["block0.attn_out"]) <= LIMITS[REFERENCE]
    assert changed(attention, ops["block0.attn_out"]) <= 0.1
    out = jitted(vit_block, config, REFERENCE)(first, x, rotary, valid)
    assert rel_rms(out, ops["block0.out"]) <= LIMITS[REFERENCE]
    assert changed(out, ops["block0.out"]) <= 0.1


def test_tower_and_aligner_with_padded_edges() -> None:
    config, weights = tiny()
    ops = tiny_ops()
    grid_h, grid_w, *llm = ops["image.grid"].tolist()
    assert (grid_h % 3, grid_w % 3) == (2, 0)
    patches = flat(ops["image.patches"])
    features = jitted(vision_tower, config, REFERENCE)(weights, patches, grid_h, grid_w)
    assert rel_rms(features, ops["vit.out"]) <= LIMITS[REFERENCE]
    given = jnp.asarray(ops["vit.out"])
    tokens = aligner(weights.aligner, given, grid_h, grid_w, llm[0] * llm[1], config, REFERENCE)
    assert rel_rms(tokens, ops["aligner.out"]) <= LIMITS[REFERENCE]


def test_span_of_the_recorded_run() -> None:
    """The whole path, through the padded program."""
    config, weights = tiny()
    run = tiny_run()
    features = jitted(vision_tower, config, REFERENCE)(weights, flat(run["patches"]), *RUN_GRID)
    assert rel_rms(features, run["vit_out"]) <= LIMITS[REFERENCE]
    types = token_types(2, 3)
    np.testing.assert_array_equal(types, run["span_types"])
    for compute, recorded in (REFERENCE, "aligner_out"), (FLOAT32, "aligner_out_smooth"):
        span = image_span(weights, run["patches"], *RUN_GRID, config, compute)
        assert span.dtype == compute.dtype
        assert span.shape == (10, 128)
        assert rel_rms(span[types == 1], run[recorded]) <= LIMITS[compute]
        for kind, mark in (0, "image_start"), (2, "image_newline"), (3, "image_end"):
            rows = np.asarray(span[types == kind])
            np.testing.assert_array_equal(rows, np.broadcast_to(getattr(weights, mark), rows.shape))


@pytest.mark.parametrize("grid", [(1, 1), (1, 20), (13, 2), (7, 11)])
def test_span_is_the_unpadded_computation(grid: tuple[int, int]) -> None:
    config, weights = tiny()
    patches = random_patches(grid)
    llm = (-(-grid[0] // 3), -(-grid[1] // 3))
    features = vision_tower(weights, flat(patches), *grid, config, FLOAT32)
    tokens = aligner(weights.aligner, features, *grid, llm[0] * llm[1], config, FLOAT32)
    span = image_span(weights, patches, *grid, config, FLOAT32)
    types = token_types(*llm)
    assert len(span) == len(types)
    assert rel_rms(span[types == 1], tokens) <= 1e-6


@pytest.mark.parametrize("compute", [REFERENCE, FLOAT32])
def test_padding_does_not_matter(compute: Compute) -> None:
    """Same bits whatever the padding holds; a larger bucket only reorders sums."""
    config, weights = tiny()
    grid = (7, 11)
    patches = flat(random_patches(grid))
    spans = {}
    for bucket, filling in (128, 0), (128, 1000), (256, 0), (640, 0):
        padded = jnp.full((bucket, patches.shape[1]), filling, patches.dtype)
        padded = padded.at[: len(patches)].set(patches)
        full = padded_image_span(weights, padded, jnp.array(grid), config, compute)
        spans[bucket, filling] = np.asarray(full[: 3 * 5 + 2])
    np.testing.assert_array_equal(spans[128, 0], spans[128, 1000])
    limit = LIMITS[REFERENCE] if compute is REFERENCE else 1e-6
    assert rel_rms(spans[256, 0], spans[128, 0]) <= limit
    assert rel_rms(spans[640, 0], spans[128, 0]) <= limit


def test_images_of_a_bucket_share_a_program() -> None:
    config, weights = tiny()
    program: Any = padded_image_span
    image_span(weights, random_patches((5, 5)), 5, 5, config, FLOAT32)
    compiled = program._cache_size()
    for grid in (4, 9), (9, 4), (1, 60), (11, 11):
        image_span(weights, random_patches(grid), *grid, config, FLOAT32)
    assert program._cache_size() == compiled


def test_buckets() -> None:
    assert patch_buckets(vision_of(load_config(OFFICIAL_CONFIG)))[-6:] == (
        1792,
        2304,
        3456,
        4608,
        6912,
        9216,
    )
    assert patch_buckets(tiny()[0]) == (128, 256, 384, 512, 640)


def test_wrong_patches_are_refused() -> None:
    config, weights = tiny()
    with pytest.raises(ValueError, match="a grid of 4 x 4 needs patches"):
        image_span(weights, random_patches((4, 5)), 4, 4, config, FLOAT32)
    with pytest.raises(ValueError, match="a grid of 0 x 4 needs patches"):
        image_span(weights, random_patches((0, 4)), 0, 4, config, FLOAT32)
    with pytest.raises(ValueError, match="an image of 66 tokens: at most 64"):
        image_span(weights, random_patches((3, 189)), 3, 189, config, FLOAT32)


@functools.cache
def official() -> tuple[VisionConfig, dict[str, np.ndarray], dict[str, Any]]:
    config = vision_of(load_config(OFFICIAL_CONFIG))
    return (
        config,
        load_file(GOLDEN / "official" / "vision.safetensors"),
        manifest()["slices"]["vision"],
    )


@functools.cache
def official_block() -> Any:
    specs = vision_specs(load_config(OFFICIAL_CONFIG)).blocks
    return jax.tree.map(lambda spec: jnp.asarray(generated(spec.name.format(i=3))), specs)


@pytest.mark.parametrize("compute", [REFERENCE, FLOAT32])
def test_official_block(compute: Compute) -> None:
    config, recorded, info = official()
    x = jnp.asarray(generated("h.x")).astype(compute.dtype)
    grid_h, grid_w = info["grid"]
    assert len(x) == grid_h * grid_w
    weights, rows = official_block(), np.array(info["rows"])
    rotary, valid = rotary_tables(grid_w, len(x), config), jnp.ones(len(x), bool)
    out = np.asarray(jitted(vit_block, config, compute)(weights, x, rotary, valid))[rows]
    prefix = "" if compute is REFERENCE else "smooth."
    assert rel_rms(out, recorded[f"{prefix}block_out"]) <= LIMITS[compute]
    if compute is REFERENCE:
        h = rms_norm(x, weights.norm1, NORM_EPS, compute)
        attention = jitted(vit_attention, config, compute)(weights, h, rotary, valid)
        assert rel_rms(np.asarray(attention)[rows], recorded["block_attn"]) <= LIMITS[compute]


@pytest.mark.parametrize("compute", [REFERENCE, FLOAT32])
def test_official_aligner(compute: Compute) -> None:
    config, recorded, info = official()
    specs = vision_specs(load_config(OFFICIAL_CONFIG)).aligner
    weights = jax.tree.map(lambda spec: jnp.asarray(generated(spec.name)), specs)
    x = jnp.asarray(generated("h.aligner_in")).astype(compute.dtype)
    count, width = info["aligner_tokens"]
    run = jitted(functools.partial(aligner, num_tokens=count), config, compute)
    tokens = np.asarray(run(weights, x, *info["grid"]))
    assert tokens.shape == (count, width)
    prefix = "" if compute is REFERENCE else "smooth."
    found = tokens[np.array(info["aligner_rows"])]
    assert rel_rms(found, recorded[f"{prefix}aligner_out"]) <= LIMITS[compute]
