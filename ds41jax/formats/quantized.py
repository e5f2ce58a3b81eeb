"""The checkpoint's and the caches' number formats: encode, decode, packing, `QuantizedArray`.

Every function takes numpy or jax arrays and returns the same kind, with equal bits. The rules are
those of the official quantisers (`inference/kernel.py`: act_quant, fp4_act_quant):

  format      value          group             scale
  FP8_GROUP   E4M3           32 columns        2^ceil(log2(max(amax, 1e-4) / 448)), E8M0
  FP8_BLOCK   E4M3           32 x 32 block     the same
  MXFP4       E2M1, packed   32 columns        2^ceil(log2(max(amax, 6 * 2^-126) / 6)), E8M0
  KV_FP4      E2M1, packed   16 columns        e4m3(max(amax, 6 * 2^-9) / 6)

E2M1 pairs are packed along columns: the even column in the low nibble. Rounding is to nearest, ties
to the even code. E8M0 scales are held as uint8 exponents biased by 127: Triton cannot parse the
dtype itself.
"""

import dataclasses
import enum
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax import lax

Array = jax.Array | np.ndarray

E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between code n and n + 1


class Format(enum.Enum):
    """How the codes and scales of a `QuantizedArray` stand for values."""

    FP8_GROUP = "fp8_group"
    FP8_BLOCK = "fp8_block"
    MXFP4 = "mxfp4"
    KV_FP4 = "kv_fp4"

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return 16 if self is Format.KV_FP4 else 32

    @property
    def packed(self) -> bool:
        """Whether two columns share a byte of codes."""
        return self in (Format.MXFP4, Format.KV_FP4)


@struct.dataclass
class QuantizedArray:
    """Codes and scales of a matrix (or a stack of them), never widened in device memory.

    Attributes:
      codes: [..., rows, columns] float8_e4m3fn, or [..., rows, columns / 2] uint8 for packed
        formats.
      scales: one per group, [..., rows, columns / group]; for FP8_BLOCK [..., ceil(rows / 32),
        ceil(columns / 32)]. uint8 (E8M0), or float8_e4m3fn for KV_FP4.
      layer: None, or an index into the first axis: the array then stands for that one entry of its
        stack. Kernels read it in place; `decode` slices first.
    """

    codes: Any
    scales: Any
    layer: Any = None
    format: Format = struct.field(pytree_node=False, default=Format.FP8_BLOCK)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that this array stands for."""
        *lead, columns = self.codes.shape
        if self.layer is not None:
            lead = lead[1:]
        return (*lead, columns * 2 if self.format.packed else columns)

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    def map(self, function: Any) -> "QuantizedArray":
        """Applies an indexing or reshaping function of leading axes to codes and scales alike."""
        return dataclasses.replace(self, codes=function(self.codes), scales=function(self.scales))

    def at_layer(self, layer: Any) -> "QuantizedArray":
        """The entry `layer` of a stack, without moving data."""
        return dataclasses.replace(self, layer=layer)


def _xp(x: Array) -> ModuleType:
    return jnp if isinstance(x, jax.Array) else np


def _bits(x: Array) -> Array:
    if isinstance(x, jax.Array):
        return lax.bitcast_convert_type(x, jnp.int32)
    return x.view(np.int32)


def _float_from_bits(x: Array) -> Array:
    if isinstance(x, jax.Array):
        return lax.bitcast_convert_type(x, jnp.float32)
    return x.view(np.float32)


def power_of_two_exponent(x: Array) -> Array:
    """E8M0 code of 2^ceil(log2(x)) for positive normal float32 `x`, from its bits; uint8."""
    bits = _bits(x)
    return (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)


def decode_e8m0(scales: Array) -> Array:
    """2^(code - 127) as float32. Code 0 gives 0, not 2^-127: no quantiser here emits it."""
    return _float_from_bits(scales.astype(np.int32) << 23)


def encode_e2m1(x: Array, steps: Array | float = 1.0) -> Array:
    """Nearest E2M1 code (uint8, 0..15) of x / steps, at most 6 in size; ties to the even code.

    Nothing is divided: XLA turns division by a broadcast array into a product with the reciprocal,
    which moves ties. The products of midpoints and E4M3 steps are exact.
    """
    xp = _xp(x)
    a = xp.abs(x)
    magnitude = xp.zeros(x.shape, np.uint8)
    for code, midpoint in enumerate(E2M1_MIDPOINTS):
        limit = np.float32(midpoint) * steps
        magnitude += (a > limit if code % 2 == 0 else a >= limit).astype(np.uint8)
    return magnitude | (xp.signbit(x).astype(np.uint8) << 3)


def decode_e2m1(codes: Array) -> Array:
    """Values of E2M1 codes (uint8, 0..15) as float32, from bits: a GPU kernel has no table."""
    c = codes.astype(np.int32)
    exponent, mantissa = (c >> 1) & 3, c & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    xp = _xp(codes)
    half = _float_from_bits(xp.full_like(c, 126 << 23)) * mantissa.astype(np.float32)
    magnitude = xp.where(exponent > 0, _float_from_bits(normal), half)
    return xp.where((c & 8) != 0, -magnitude, magnitude)


def pack_nibbles(codes: Array) -> Array:
    """[..., n] uint8 codes to [..., n / 2] bytes, even columns in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Array) -> Array:
    """[..., n] bytes to [..., 2 n] uint8 codes, the low nibble first."""
    xp = _xp(packed)
    pairs = xp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _groups(x: Array, group: int) -> Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _e4m3(x: Array) -> Array:
    """E4M3 codes of float32 values within +-448.

    jax values are rounded by arithmetic first: XLA may drop a pair of conversions there and back
    (it allows itself excess precision), but not this.
    """
    if not isinstance(x, jax.Array):
        return x.astype(E4M3)
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(x * 512) * np.float32(1 / 512)
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal).astype(jnp.float8_e4m3fn)


def _clip(x: Array, limit: float) -> Array:
    return _xp(x).clip(x, np.float32(-limit), np.float32(limit))


def _fp8_scale_code(amax: Array) -> Array:
    amax = _xp(amax).maximum(amax, np.float32(1e-4))
    return power_of_two_exponent(amax * np.float32(1 / 448))


def encode(x: Array, format: Format) -> QuantizedArray:
    """Quantises the last axis (FP8_BLOCK: the last two) of `x`.

    Args:
      x: [..., rows, columns] of any float dtype; columns a multiple of the format's group.
      format: the target format.

    Returns:
      The codes and scales; see `QuantizedArray` for their shapes.
    """
    x = x.astype(np.float32)
    if format is Format.FP8_BLOCK:
        return _encode_fp8_block(x)
    xp = _xp(x)
    grouped = _groups(x, format.group)
    amax = xp.abs(grouped).max(axis=-1)
    if format is Format.FP8_GROUP:
        scales = _fp8_scale_code(amax)
        scaled = grouped / decode_e8m0(scales)[..., None]
        codes = _e4m3(_clip(scaled, E4M3_MAX)).reshape(x.shape)
        return QuantizedArray(codes, scales, format=format)
    if format is Format.MXFP4:
        amax = xp.maximum(amax, np.float32(6 * 2.0**-126))
        scales = power_of_two_exponent(amax * np.float32(1 / 6))
        codes = encode_e2m1(grouped / decode_e8m0(scales)[..., None])
    else:
        amax = xp.maximum(amax, np.float32(6 * 2.0**-9))
        scales = _e4m3(xp.minimum(amax / np.float32(6), np.float32(E4M3_MAX)))
        codes = encode_e2m1(grouped, scales.astype(np.float32)[..., None])
    return QuantizedArray(pack_nibbles(codes.reshape(x.shape)), scales, format=format)


def _encode_fp8_block(x: Array) -> QuantizedArray:
    xp = _xp(x)
    *lead, rows, columns = x.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % 32), (0, -columns % 32)]
    blocks = xp.pad(xp.abs(x), pad)
    blocks = blocks.reshape(*lead, blocks.shape[-2] // 32, 32, blocks.shape[-1] // 32, 32)
    scales = _fp8_scale_code(blocks.max(axis=(-3, -1)))
    scaled = x / expand_blocks(decode_e8m0(scales), rows, columns)
    return QuantizedArray(_e4m3(_clip(scaled, E4M3_MAX)), scales, format=Format.FP8_BLOCK)


def expand_blocks(scales: Array, rows: int, columns: int) -> Array:
    """[..., ceil(rows / 32), ceil(columns / 32)] block scales to [..., rows, columns]."""
    xp = _xp(scales)
    return xp.repeat(xp.repeat(scales, 32, axis=-2), 32, axis=-1)[..., :rows, :columns]


def decode(q: QuantizedArray) -> Array:
    """Values of a quantised array (of its entry `layer`, if set) as float32, exact."""
    codes, scales = q.codes, q.scales
    if q.layer is not None:
        codes, scales = codes[q.layer], scales[q.layer]
    if q.format is Format.FP8_BLOCK:
        values = codes.astype(np.float32)
        return values * expand_blocks(decode_e8m0(scales), *values.shape[-2:])
    if q.format.packed:
        codes = unpack_nibbles(codes)
        values = decode_e2m1(codes)
    else:
        values = codes.astype(np.float32)
    steps = scales.astype(np.float32) if q.format is Format.KV_FP4 else decode_e8m0(scales)
    return (_groups(values, q.format.group) * steps[..., None]).reshape(values.shape)
