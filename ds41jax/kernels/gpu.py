"""What the Pallas kernels share: how they are called, and number formats turned into BF16.

Every kernel goes through Pallas' Triton lowering, the one path that reaches sm_90, sm_100 and
sm_120 from one source, and uses nothing that only one of them has.

Codes are read as 16-bit lanes (`lanes`) and decoded in registers, two lanes at a time, by integer
operations on packed pairs: with an operation for every code, decoding and not memory would bound a
decode step. Code j of every lane makes plane j, so activations are stored in planes too. Lanes of
16 bits also keep Pallas' offsets right: it counts elements in 32 bits up to 2^32 bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats import QuantizedArray
from ds41jax.formats.quantized import decode_e2m1
from ds41jax.kernels.compute import Compute, Kernels

# Scales up to 2^65 and values down to 2^-62 stay normal in BF16 when weights are held at 2^-64.
SCALE_SHIFT = 64

# An E2M1 code n is spread to sign and magnitude by one product, n * (2^i + 2^j), and masked. The
# fma adds -0: it is a product alone, by the scale.
_LANES = """{{ .reg .b32 a, b, z; mov.b32 z, 0x80008000; {}
  fma.rn.bf16x2 $0, a, $2, z; }}"""
_E2M1 = (
    "and.b32 a, $1, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0;",
    "and.b32 a, $1, 0x00F000F0; mul.lo.u32 a, a, 0x104; and.b32 a, a, 0x81C081C0;",
    "shr.u32 a, $1, 2; and.b32 a, a, 0x03C003C0; mul.lo.u32 a, a, 0x41; and.b32 a, a, 0x81C081C0;",
    "shr.u32 a, $1, 6; and.b32 a, a, 0x01C001C0; lop3.b32 a, $1, z, a, 0xEA;",
)
_E4M3 = (
    "shl.b32 a, $1, 4; and.b32 a, a, 0x07F007F0; shl.b32 b, $1, 8; lop3.b32 a, b, z, a, 0xEA;",
    "shr.u32 a, $1, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, $1, z, a, 0xEA;",
)


def call(
    kernel: Callable[..., None],
    compute: Compute,
    grid: tuple[int, ...],
    out_shape: Any,
    warps: int = 4,
    stages: int = 3,
    name: str | None = None,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` for Triton, or in the interpreter where `compute` says so."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=compute.kernels is Kernels.INTERPRET,
        name=name,
        input_output_aliases=aliases or {},
    )


def lanes(codes: jax.Array, dtype: Any = jnp.uint16) -> jax.Array:
    """Bytes of codes [..., n] as lanes of two (or four, uint32), [..., n / 2], in place."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, size), dtype)


@struct.dataclass
class StackEntry:
    """Entry `layer` of a stack of unquantised weights [L, ...], for kernels to read in place."""

    stack: jax.Array
    layer: jax.Array | int


def entry(w: Any) -> tuple[jax.Array, jax.Array]:
    """An unquantised weight or `StackEntry` as (layer [1] int32, stack [L, ...]), in place."""
    if isinstance(w, StackEntry):
        return jnp.asarray(w.layer, jnp.int32).reshape(1), w.stack
    return jnp.zeros(1, jnp.int32), w[None]


def stack(w: QuantizedArray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A weight as (layer [1] int32, lanes [L, ...], scales [L, ...]), in place."""
    if w.layer is None:
        return jnp.zeros(1, jnp.int32), lanes(w.codes)[None], w.scales[None]
    return jnp.asarray(w.layer, jnp.int32).reshape(1), lanes(w.codes), w.scales


def planes(x: jax.Array, count: int) -> jax.Array:
    """Columns [..., n] to [..., count, n / count]: plane j holds columns j, j + count, ..."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, count), -1, -2)


def e8m0_factor(scales: jax.Array, format_bias: int) -> jax.Array:
    """BF16 factor that turns a code's bits, placed in BF16, into its value times 2^-64.

    Args:
      scales: uint8 E8M0 codes from 62 (2^-65) on.
      format_bias: 126 for E2M1, 120 for E4M3, the difference of BF16's exponent bias and theirs.
    """
    exponent = scales.astype(jnp.int32) + (format_bias - SCALE_SHIFT)
    return lax.bitcast_convert_type((exponent << 7).astype(jnp.int16), jnp.bfloat16)


def expand(factors: jax.Array, times: int) -> jax.Array:
    """[rows, groups] to [rows, groups * times], every column repeated."""
    rows, groups = factors.shape
    return jnp.broadcast_to(factors[:, :, None], (rows, groups, times)).reshape(
        rows, groups * times
    )


def decode_e2m1_lanes(codes: jax.Array, factors: jax.Array, compute: Compute) -> list[jax.Array]:
    """The four planes of E2M1 lanes, in BF16 at 2^-64; `factors` has the lanes' shape."""
    if compute.kernels is Kernels.INTERPRET:
        nibbles = [(codes >> shift) & 15 for shift in (0, 4, 8, 12)]
        return [_scaled(decode_e2m1(n), factors, 126) for n in nibbles]
    return [_assemble(body, codes, factors) for body in _E2M1]


def decode_e4m3_lanes(codes: jax.Array, factors: jax.Array, compute: Compute) -> list[jax.Array]:
    """The two planes of E4M3 lanes, in BF16 at 2^-64; `factors` has the lanes' shape."""
    if compute.kernels is Kernels.INTERPRET:
        halves = [(codes >> shift).astype(jnp.uint8) for shift in (0, 8)]
        halves = [lax.bitcast_convert_type(h, jnp.float8_e4m3fn) for h in halves]
        return [_scaled(h.astype(jnp.float32), factors, 120) for h in halves]
    return [_assemble(body, codes, factors) for body in _E4M3]


def _scaled(values: Any, factors: jax.Array, format_bias: int) -> jax.Array:
    return (values * (factors.astype(jnp.float32) * 2.0**-format_bias)).astype(jnp.bfloat16)


def _assemble(body: str, codes: jax.Array, factors: jax.Array) -> jax.Array:
    [out] = triton.elementwise_inline_asm(
        _LANES.format(body),
        args=[codes, factors],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return out


def add_parts(parts: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """[splits, ...] float32 parts of sums, added in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def rounded(x: jax.Array, compute: Compute) -> jax.Array:
    """float32 rounded to bfloat16 values. Triton keeps the conversions that XLA would drop."""
    if compute.kernels is Kernels.INTERPRET:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[m, k] by [k, n] in float32, on the matrix units."""
    return triton.dot(a, b)
