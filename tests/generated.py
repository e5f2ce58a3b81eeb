"""Inputs and weights of the official-geometry golden data, made from their names by one rule.

A tensor called `name` is a stream of bytes: PCG64, seeded with the first 8 bytes of SHA-256 of
"salt/name", gives 64-bit words; elements follow in C order, one or two bytes each. The stream is
random access, so rows of the released 98 GB tables cost what those rows cost.

The dtype of a result says what it is:

  kind              dtype            meaning
  fp8, e4m3s        float8_e4m3fn    codes as they stand in the checkpoint or cache; scales
  fp4               uint8            two E2M1 codes a byte, the even column in the low nibble
  e8m0              uint8            scale exponents biased by 127
  bf16, norm, tri   bfloat16         values, exact
  f32, f32pos       float32          values, exact
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from paths import GOLDEN

WORD = 8  # bytes that one step of PCG64 gives
TWO_BYTE_KINDS = ("tri", "f32", "f32pos")


@dataclass(frozen=True)
class GeneratedTensor:
    """One entry of the manifest: how the bytes become elements, and three elements to check."""

    kind: str
    shape: tuple[int, ...]
    p: int
    check: tuple[tuple[int, float], ...]


@functools.cache
def manifest() -> dict[str, Any]:
    """The recorded manifest: `salt`, `slices` (parameters of each slice) and `tensors`."""
    return json.loads((GOLDEN / "official" / "manifest.json").read_text())


@functools.cache
def tensors() -> dict[str, GeneratedTensor]:
    """Every generated tensor by name."""
    return {
        name: GeneratedTensor(t["kind"], tuple(t["shape"]), t["p"], tuple(map(tuple, t["check"])))
        for name, t in manifest()["tensors"].items()
    }


def generated(name: str, rows: slice | None = None) -> np.ndarray:
    """The tensor `name` of the manifest, or the given range of its first axis.

    Args:
      name: official tensor name, or that of an input such as "h.x".
      rows: a contiguous slice of the first axis; only those rows are made.

    Returns:
      [rows, ...] in the dtype of the tensor's kind (see the module's table).
    """
    tensor = tensors()[name]
    start, stop, step = (rows or slice(None)).indices(tensor.shape[0])
    if step != 1 or stop < start:
        raise ValueError(f"{name}: rows must be an ascending contiguous range, got {rows}")
    row_shape = tensor.shape[1:]
    row_bytes = int(np.prod(row_shape, dtype=np.int64)) * (1 + (tensor.kind in TWO_BYTE_KINDS))
    data = _stream(name, start * row_bytes, (stop - start) * row_bytes)
    return _elements(data, tensor.kind, tensor.p).reshape(stop - start, *row_shape)


def _stream(name: str, offset: int, count: int) -> np.ndarray:
    """Bytes [offset, offset + count) of the stream of `name`, as uint8."""
    digest = hashlib.sha256(f"{manifest()['salt']}/{name}".encode()).digest()
    bits = np.random.PCG64(int.from_bytes(digest[:8], "little"))
    bits.advance(offset // WORD)
    skipped = offset % WORD
    words = bits.random_raw(-(-(skipped + count) // WORD))
    return words.astype("<u8").view(np.uint8)[skipped : skipped + count]


def _elements(data: np.ndarray, kind: str, p: int) -> np.ndarray:
    """The flat elements that the bytes stand for."""
    scale = np.float32(2.0**-p)
    match kind:
        case "fp8":
            return ((data & 0x80) | (0x58 + (data & 0x1F))).view(ml_dtypes.float8_e4m3fn)
        case "fp4":
            return data
        case "e8m0":
            return p + data % np.uint8(3)
        case "e4m3s":
            return (0x20 + (data & 15)).view(ml_dtypes.float8_e4m3fn)
        case "bf16":
            return (data.view(np.int8) * scale).astype(ml_dtypes.bfloat16)
        case "norm":
            return ((96 + (data & 63)) * np.float32(1 / 128)).astype(ml_dtypes.bfloat16)
        case "tri":
            pair_sums = data[0::2].astype(np.int16) + data[1::2]
            return ((pair_sums - 255) * scale).astype(ml_dtypes.bfloat16)
        case "f32":
            return data.view("<i2") * scale
        case "f32pos":
            return np.float32(0.5) + data.view("<u2") * np.float32(1 / 65536)
    raise ValueError(f"unknown kind {kind!r}")
