"""Image plans and pixels against the official image processor's."""

import dataclasses
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paths import GOLDEN
from PIL import Image
from safetensors.numpy import load_file

from ds41jax.config import VisionConfig, parse_config
from ds41jax.model.image_processor import plan_image, preprocess
from ds41jax.model.vision import token_types

RELEASED = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
    max_wh_ratio=None,
)
LEVEL = 1 / 127.5  # one step of an 8-bit pixel: resampling may round either way
RECORDED: dict[str, Any] = json.loads((GOLDEN / "encoding" / "image_plan.json").read_text())
GRID_PLANS = json.loads((GOLDEN / "ops" / "image_grid_plan.json").read_text())


def tiny_config() -> VisionConfig:
    vision = parse_config(json.loads((GOLDEN / "tiny" / "config.json").read_text())).vision
    assert vision is not None
    return vision


def by_size(plans: list[dict[str, int]]) -> Any:
    return pytest.mark.parametrize("plan", plans, ids=lambda p: f"{p['width']}x{p['height']}")


@by_size(RECORDED["plans"])
def test_plan(plan: dict[str, int]) -> None:
    made = dataclasses.asdict(plan_image(plan["width"], plan["height"], RELEASED))
    made["n_image_tokens"] = made.pop("n_tokens")
    assert made == {name: plan[name] for name in made}


@by_size(GRID_PLANS)
def test_grid_plan(plan: dict[str, int]) -> None:
    made = dataclasses.asdict(plan_image(plan["width"], plan["height"], RELEASED))
    assert {name: made[name] for name in plan if name in made} | {
        name: plan[name] for name in ("width", "height")
    } == plan


def test_wide_images_are_planned_at_the_ratio_limit() -> None:
    limited = dataclasses.replace(RELEASED, max_wh_ratio=8.0)
    assert plan_image(9000, 700, limited) == plan_image(5600, 700, RELEASED)
    assert plan_image(700, 9000, limited) == plan_image(700, 9000, RELEASED)


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_fits(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for width, height in np.exp(draw.uniform(0, 11, (500, 2))).astype(int).tolist():
        plan = plan_image(width, height, RELEASED)
        assert plan.n_tokens <= RELEASED.max_image_tokens
        assert plan.n_tokens == len(token_types(plan.n_llm_h, plan.n_llm_w))
        assert (plan.best_width, plan.best_height) == (plan.n_vit_w * 14, plan.n_vit_h * 14)


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (-3, 5)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{size[0]}x{size[1]}"):
        plan_image(*size, RELEASED)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_budget_below_one_token_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_image_tokens={tokens}"):
        plan_image(640, 480, dataclasses.replace(RELEASED, max_image_tokens=tokens))


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1)])
def test_an_image_that_would_vanish_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="too thin"):
        preprocess(Image.new("RGB", size), RELEASED)


@pytest.mark.parametrize("layout", RECORDED["layouts"], ids=str)
def test_token_types(layout: dict[str, Any]) -> None:
    types = token_types(layout["n_llm_h"], layout["n_llm_w"])
    assert types.dtype == np.int32
    assert types.tolist() == layout["types"]


@pytest.mark.parametrize("image", RECORDED["images"], ids=lambda image: image["file"])
def test_pixels(image: dict[str, Any]) -> None:
    recorded = np.load(GOLDEN / "encoding" / image["patches"])
    with Image.open(GOLDEN / "encoding" / image["file"]) as picture:
        assert (picture.mode, *picture.size) == (image["mode"], image["width"], image["height"])
        patches, plan = preprocess(picture, RELEASED)
    assert [plan.n_vit_h, plan.n_vit_w] == recorded["n_vit"].tolist()
    assert [plan.n_llm_h, plan.n_llm_w] == recorded["n_llm"].tolist()
    assert plan.n_tokens == image["n_image_tokens"]
    assert patches.dtype == ml_dtypes.bfloat16
    values = patches.astype(np.float32)
    found = values[recorded["patch_index"]]
    np.testing.assert_allclose(found, recorded["patches"], rtol=0, atol=LEVEL)
    means = values.reshape(len(values), -1).mean(axis=1)
    np.testing.assert_allclose(means, recorded["patch_mean"], rtol=0, atol=LEVEL)


def test_pixels_of_the_tiny_model() -> None:
    recorded = load_file(GOLDEN / "ops" / "vision.safetensors")
    patches, plan = preprocess(Image.fromarray(recorded["image_u8"]), tiny_config())
    grid = [plan.n_vit_h, plan.n_vit_w, plan.n_llm_h, plan.n_llm_w]
    assert grid == recorded["image.grid"].tolist()
    expected = recorded["image.patches"].astype(np.float32)
    np.testing.assert_allclose(patches.astype(np.float32), expected, rtol=0, atol=LEVEL)
    types = token_types(plan.n_llm_h, plan.n_llm_w)
    np.testing.assert_array_equal(types, recorded["image.token_types"])


def test_exif_orientation_is_ignored() -> None:
    """As in the official processor, which converts without transposing."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    turned = Image.fromarray(pixels)
    turned.getexif()[0x0112] = 6
    plain, plan = preprocess(Image.fromarray(pixels), tiny_config())
    patches, plan_of_turned = preprocess(turned, tiny_config())
    assert plan_of_turned == plan
    np.testing.assert_array_equal(patches, plain)


def test_a_squeezed_image_has_no_padding() -> None:
    """Beyond the ratio limit the whole width is squeezed in; below it grey borders stay."""
    config = dataclasses.replace(tiny_config(), max_wh_ratio=2.0)
    white = 1.0
    squeezed, _ = preprocess(Image.new("RGB", (300, 50), "white"), config)
    assert np.all(squeezed == white)
    padded, _ = preprocess(Image.new("RGB", (91, 61), "white"), config)
    assert not np.all(padded == white)
