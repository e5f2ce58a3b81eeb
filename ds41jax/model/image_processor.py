"""Images on the host: from a decoded picture to the patches that the vision tower reads.

Owns the size plan and the pixel arithmetic; decoding bytes and limiting their size is the server's
work. The pictures are those of the official `inference/image_processor.py`, quirks included: an
EXIF orientation is ignored, an alpha channel is dropped, and padding is grey 127.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from PIL import Image, ImageOps

from ds41jax.config import VisionConfig
from ds41jax.model.vision import num_image_tokens

PADDING = (127, 127, 127)
# The normalised value of each byte. Dividing and shifting in float32 first decides the rounding.
PIXEL_VALUES = ((np.arange(256, dtype=np.float32) / 255 - 0.5) / 0.5).astype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class ImagePlan:
    """What an image becomes: its resized size, its grids of patches and tokens, its span's length.

    Attributes:
      best_width: width in pixels after resizing, a multiple of the patch size.
      best_height: height likewise.
      n_vit_h: rows of patches.
      n_vit_w: columns of patches.
      n_llm_h: rows of image tokens.
      n_llm_w: columns of image tokens.
      n_tokens: tokens of the whole span, with its start, end and new lines.
    """

    best_width: int
    best_height: int
    n_vit_h: int
    n_vit_w: int
    n_llm_h: int
    n_llm_w: int
    n_tokens: int


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """The plan of an image of this size in pixels.

    Small images are enlarged to `min_pixels`; sides are rounded up to whole patches; what then
    costs more than `max_image_tokens` is shrunk, keeping its aspect.

    Raises:
      ValueError: a side is not positive, or no grid of this shape fits `max_image_tokens`.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image needs at least one pixel on each side, got {width}x{height}")
    wide, high = _enlarged(width, height, config)
    patch = config.patch_size
    plan = _plan_of(math.ceil(wide / patch), math.ceil(high / patch), config)
    if plan.n_tokens > config.max_image_tokens >= num_image_tokens(1, 1):
        plan = _plan_of(*_largest_grid(wide, high, config), config)
    if min(plan.n_vit_h, plan.n_vit_w) < 1 or plan.n_tokens > config.max_image_tokens:
        raise ValueError(
            f"an image of {width}x{height} does not fit max_image_tokens={config.max_image_tokens}"
        )
    return plan


def _enlarged(width: float, height: float, config: VisionConfig) -> tuple[float, float]:
    """Sides after the limit on the aspect and the enlargement of small images."""
    if config.max_wh_ratio is not None:
        width = min(width, height * config.max_wh_ratio)
    if width * height >= config.min_pixels:
        return width, height
    ratio = (config.min_pixels / (width * height)) ** 0.5
    return int(width * ratio), int(height * ratio)


def _plan_of(n_vit_w: int, n_vit_h: int, config: VisionConfig) -> ImagePlan:
    n_llm_h = math.ceil(n_vit_h / config.downsample_ratio)
    n_llm_w = math.ceil(n_vit_w / config.downsample_ratio)
    return ImagePlan(
        best_width=n_vit_w * config.patch_size,
        best_height=n_vit_h * config.patch_size,
        n_vit_h=n_vit_h,
        n_vit_w=n_vit_w,
        n_llm_h=n_llm_h,
        n_llm_w=n_llm_w,
        n_tokens=num_image_tokens(n_llm_h, n_llm_w),
    )


def _largest_grid(width: float, height: float, config: VisionConfig) -> tuple[int, int]:
    """(columns, rows) of patches of the largest image of this aspect that costs few enough tokens.

    With h = w * aspect rows of w tokens and a new line, h * (w + 1) + 2 = max_image_tokens is
    quadratic in w. An image too narrow for one column of tokens, or too flat for one row, becomes
    that one column or row.
    """
    aspect = height / width
    columns = math.sqrt((config.max_image_tokens - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    merged = config.downsample_ratio
    if columns < 1:
        return merged, (config.max_image_tokens - 2) // 2 * merged
    if rows < 1:
        return (config.max_image_tokens - 3) * merged, merged
    cell = config.patch_size * merged
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    patch = config.patch_size
    return math.floor(width * scale / patch), math.floor(height * scale / patch)


def preprocess(image: Image.Image, config: VisionConfig) -> tuple[np.ndarray, ImagePlan]:
    """Resizes, pads and normalises a decoded image.

    Returns:
      Patches [n_vit_h * n_vit_w, 3, patch_size, patch_size] bfloat16 in [-1, 1], in reading order,
      and the plan.

    Raises:
      ValueError: the image has no pixels, or cannot be resized to any grid.
    """
    plan = plan_image(image.width, image.height, config)
    pixels = np.asarray(_fitted(image.convert("RGB"), plan, config))
    patch = config.patch_size
    grid = pixels.reshape(plan.n_vit_h, patch, plan.n_vit_w, patch, 3).transpose(0, 2, 4, 1, 3)
    return PIXEL_VALUES[grid].reshape(-1, 3, patch, patch), plan


def _fitted(image: Image.Image, plan: ImagePlan, config: VisionConfig) -> Image.Image:
    """The image at its planned size: squeezed if wider than the limit, else centred on grey."""
    size = (plan.best_width, plan.best_height)
    if config.max_wh_ratio is not None and image.width >= config.max_wh_ratio * image.height:
        return image.resize(size)
    if min(image.width / image.height * size[1], image.height / image.width * size[0]) <= 0.5:
        raise ValueError(
            f"an image of {image.width}x{image.height} is too thin: at its planned size of "
            f"{size[0]}x{size[1]} nothing would be left of its short side"
        )
    return ImageOps.pad(image, size, color=PADDING)
