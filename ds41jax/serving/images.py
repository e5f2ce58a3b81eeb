"""Images of a request: loaded within bounds, decoded, and laid into the prompt.

Any fault refuses the whole request; an image is never left out silently.
"""

import asyncio
import base64
import binascii
import hashlib
import io
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import deepseek_recipe as recipe
import numpy as np
from PIL import Image

from ds41jax.config import VisionConfig
from ds41jax.engine.request import ImageSpan
from ds41jax.model.image_processor import preprocess
from ds41jax.serving.errors import ApiError, invalid
from ds41jax.serving.fetch import fetch

MAX_IMAGES = 16
MAX_IMAGE_BYTES = 32 << 20
MAX_TOTAL_BYTES = 64 << 20
MAX_PIXELS = 64_000_000  # a decoded image of this size takes 192 MB
TOTAL_SECONDS = 60
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|webp|gif)(?:;[\w=-]+)*?(;base64)?,", re.IGNORECASE)


@dataclass(frozen=True)
class LoadedImage:
    """A decoded image: its span, starting at 0 for now, and the span's length in tokens."""

    span: ImageSpan
    n_tokens: int


async def load_images(
    sources: Sequence[recipe.ImageSource],
    vision: VisionConfig | None,
    decoders: asyncio.Semaphore,
    private: bool,
) -> list[LoadedImage]:
    """The images of a prompt.

    Args:
      decoders: bounds how many images are decoded at once.
      private: allow URLs that lead to addresses which are not public.

    Raises:
      ApiError: 400 naming the image.
    """
    if not sources:
        return []
    if vision is None:
        raise invalid("messages", "This model takes no images.", "no_vision")
    if len(sources) > MAX_IMAGES:
        raise invalid("messages", f"{len(sources)} images; the limit is {MAX_IMAGES}.", "too_large")
    try:
        async with asyncio.timeout(TOTAL_SECONDS):
            loaded = await asyncio.gather(*(_bytes(source, private) for source in sources))
    except TimeoutError as error:
        message = f"loading the images took more than {TOTAL_SECONDS} seconds"
        raise invalid("messages", message, "image_timeout") from error
    total = sum(len(data) for data in loaded)
    if total > MAX_TOTAL_BYTES:
        raise invalid("messages", f"images of {total} bytes; the limit is {MAX_TOTAL_BYTES}.")
    paths = [source.path.lstrip(".") for source in sources]

    async def decoded(data: bytes, path: str) -> LoadedImage:
        async with decoders:
            return await asyncio.to_thread(_decode, data, path, vision)

    return list(await asyncio.gather(*map(decoded, loaded, paths)))


def place_images(
    ids: Sequence[int], images: Sequence[LoadedImage], image_id: int
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Widens each placeholder to its image's span; returns the ids and the spans in place."""
    out: list[int] = []
    placed: list[ImageSpan] = []
    for id in ids:
        if id != image_id:
            out.append(id)
            continue
        image = images[len(placed)]
        placed.append(replace(image.span, start=len(out)))
        out += [image_id] * image.n_tokens
    return out, tuple(placed)


async def _bytes(source: recipe.ImageSource, private: bool) -> bytes:
    path = source.path.lstrip(".") or "messages"
    if source.kind == "bytes" and source.data is not None:
        data = source.data
    elif source.data_url is not None:
        data = _from_data_url(source.data_url, path)
    else:
        data = await fetch(source.url or "", path, MAX_IMAGE_BYTES, private)
    if len(data) > MAX_IMAGE_BYTES:
        raise _fault(path, f"the image is larger than {MAX_IMAGE_BYTES} bytes")
    return data


def _from_data_url(url: str, path: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise _fault(path, "a data URL must be of type png, jpeg, webp or gif")
    body = url[head.end() :]
    if head[1] is None:
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _fault(path, "the data URL is not valid base64") from error


def _decode(data: bytes, path: str, vision: VisionConfig) -> LoadedImage:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise _fault(path, f"the image has more than {MAX_PIXELS} pixels")
            image.load()
            patches, plan = preprocess(image, vision)
    except ApiError:
        raise
    except Exception as error:  # PIL raises many types for malformed files
        raise _fault(path, "the image cannot be read") from error
    digest = hashlib.sha256(np.array([plan.n_vit_h, plan.n_vit_w], np.int64).tobytes())
    digest.update(np.ascontiguousarray(patches).tobytes())
    span = ImageSpan(0, patches, plan.n_vit_h, plan.n_vit_w, digest.digest())
    return LoadedImage(span, plan.n_tokens)


def _fault(path: str, message: str) -> ApiError:
    return invalid(path, f"{path}: {message}.", "invalid_image")
