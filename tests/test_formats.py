"""Number formats: every quantiser, table and packing, bit for bit, in numpy, jax and under jit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, E4M3, assert_same, recorded

from ds41jax.config import FP8_BLOCK
from ds41jax.formats import Format, Numerics, QuantizedArray, decode, encode, values
from ds41jax.formats.quantized import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    expand_blocks,
    pack_nibbles,
    power_of_two_exponent,
    unpack_nibbles,
)

Encode = Callable[[np.ndarray, Format], QuantizedArray]
SMALLEST_NORMAL = np.float32(2.0**-126)


@functools.partial(jax.jit, static_argnames="format")
def encode_jitted(x: jax.Array, format: Format) -> QuantizedArray:
    return encode(x, format)


ENCODERS: dict[str, Encode] = {
    "numpy": encode,
    "jax": lambda x, format: encode(jnp.asarray(x), format),
    "jit": lambda x, format: encode_jitted(jnp.asarray(x), format),
}
# format: (prefix of the recorded keys, key of the scale bytes)
QUANTISERS = {
    Format.FP8_GROUP: ("fp8_g32", "scale_exp"),
    Format.MXFP4: ("fp4_e8m0_g32", "scale_byte"),
    Format.KV_FP4: ("fp4_e4m3_g16", "scale_byte"),
}


def flushed(x: np.ndarray) -> np.ndarray:
    """Denormals as zeros of the same sign: what XLA's CPU backend makes of them."""
    wide = x.astype(np.float32)
    return np.where(np.abs(wide) < SMALLEST_NORMAL, np.copysign(0, wide), wide).astype(x.dtype)


def check_recorded(made: QuantizedArray, format: Format, prefix: str) -> None:
    """Codes, packed bytes and scale bytes of `made`, and the values they stand for."""
    golden = recorded("ops/quant")
    kind, scale_key = QUANTISERS[format]
    codes = np.asarray(made.codes).view(np.uint8)
    if format.packed:
        assert_same(codes, golden[f"{prefix}{kind}.packed"])
        codes = np.asarray(unpack_nibbles(made.codes))
    assert_same(codes, golden[f"{prefix}{kind}.codes"])
    assert_same(np.asarray(made.scales).view(np.uint8), golden[f"{prefix}{kind}.{scale_key}"])
    decoded = np.asarray(decode(made))
    assert_same(decoded, golden[f"{prefix}{kind}.dequant"])
    assert_same(decoded.astype(BF16), golden[f"{prefix}{kind}.inplace_bf16"])


@pytest.mark.parametrize("format", QUANTISERS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_quantiser(encoder: str, format: Format) -> None:
    made = ENCODERS[encoder](recorded("ops/quant")["x"], format)
    assert made.shape == (88, 128)
    check_recorded(made, format, "")


@pytest.mark.parametrize("format", QUANTISERS)
def test_jitted_fake_quantiser(format: Format) -> None:
    """The in-place form through one program, where XLA could drop roundings."""
    golden = recorded("ops/quant")
    kind, _ = QUANTISERS[format]

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = Numerics.REFERENCE.fake_quantize(x, format)
        return found, Numerics.REFERENCE.round(found)

    dequant, inplace = run(golden["x"])
    assert_same(dequant, golden[f"{kind}.dequant"])
    assert_same(inplace, golden[f"{kind}.inplace_bf16"])


@pytest.mark.parametrize("format", QUANTISERS)
def test_denormals_in_numpy(format: Format) -> None:
    check_recorded(encode(recorded("ops/quant")["denormal.x"], format), format, "denormal.")


@pytest.mark.parametrize("format", QUANTISERS)
@pytest.mark.parametrize("encoder", ["jax", "jit"])
def test_denormals_in_jax_are_flushed(encoder: str, format: Format) -> None:
    """XLA reads denormal inputs as zeros of their sign and is otherwise the same."""
    x = recorded("ops/quant")["denormal.x"]
    assert np.any(flushed(x) != x)
    assert_same(ENCODERS[encoder](x, format), encode(flushed(x), format))
    kept = np.all(flushed(x) == x, axis=1)
    assert_same(ENCODERS[encoder](x[kept], format), encode(x[kept], format))


@pytest.mark.parametrize("xp", [np, jnp])
def test_value_tables(xp: Any) -> None:
    golden = recorded("ops/quant")
    assert_same(decode_e2m1(xp.arange(16, dtype=np.uint8)), golden["e2m1_table"])
    e4m3 = xp.asarray(np.arange(256, dtype=np.uint8).view(E4M3)).astype(np.float32)
    np.testing.assert_array_equal(e4m3, golden["e4m3_table"])
    assert np.isnan(np.asarray(e4m3)[[0x7F, 0xFF]]).all()
    e8m0 = np.asarray(decode_e8m0(xp.arange(255, dtype=np.uint8)))
    assert_same(e8m0[1:], golden["e8m0_table"][1:])
    assert (e8m0[0], golden["e8m0_table"][0]) == (0, 2.0**-127)  # a code that nothing emits


@pytest.mark.parametrize("xp", [np, jnp])
def test_e2m1_rounds_to_nearest_even_code(xp: Any) -> None:
    table = decode_e2m1(np.arange(8, dtype=np.uint8))
    assert_same(encode_e2m1(xp.asarray(table)), np.arange(8, dtype=np.uint8))
    ties = (table[1:] + table[:-1]) / 2
    even = np.arange(7) + np.arange(7) % 2
    assert_same(encode_e2m1(xp.asarray(ties)), even.astype(np.uint8))
    assert_same(encode_e2m1(xp.asarray(-ties)), (even + 8).astype(np.uint8))
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))
    assert_same(encode_e2m1(xp.asarray(below)), np.arange(7, dtype=np.uint8))
    assert_same(encode_e2m1(xp.asarray(above)), np.arange(1, 8, dtype=np.uint8))


@pytest.mark.parametrize("xp", [np, jnp])
def test_power_of_two_exponent(xp: Any) -> None:
    exact = np.float32(2.0) ** np.arange(-126, 127, dtype=np.float32)
    exponents = np.arange(1, 254, dtype=np.uint8)
    assert_same(power_of_two_exponent(xp.asarray(exact)), exponents)
    above = np.nextafter(exact, np.float32(np.inf))
    assert_same(power_of_two_exponent(xp.asarray(above)), exponents + np.uint8(1))


@pytest.mark.parametrize("xp", [np, jnp])
def test_packing(xp: Any) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (3, 5, 8), dtype=np.uint8)
    packed = pack_nibbles(xp.asarray(codes))
    assert packed.shape == (3, 5, 4)
    assert_same(packed, codes[..., ::2] + 16 * codes[..., 1::2])
    assert_same(unpack_nibbles(packed), codes)
    assert_same(pack_nibbles(xp.asarray(np.array([1, 15], np.uint8))), np.array([0xF1], np.uint8))


def kv_groups() -> np.ndarray:
    """Every bfloat16 magnitude as the maximum of a group; all mantissas below the others' maximum.

    Scales are no powers of two here, so an inexact division moves ties to other codes.
    """
    every = np.arange(0x7F80, dtype=np.uint16).view(BF16).astype(np.float32)
    alone = np.pad(every[:, None], ((0, 0), (0, 15)))
    mantissas = np.arange(128, 256, dtype=np.float32) / 128
    below = np.concatenate([mantissas * np.float32(2.0**n) for n in range(-3, 3)])
    groups = [alone]
    for largest in mantissas * 4:
        rest = below[below <= largest]
        rest = np.pad(rest, (0, -len(rest) % 15)).reshape(-1, 15)
        groups.append(np.pad(rest, ((0, 0), (1, 0)), constant_values=largest))
    return np.concatenate(groups)


def test_kv_codes_of_every_bfloat16_quotient() -> None:
    x = kv_groups()
    made = encode(x, Format.KV_FP4)
    jitted = encode_jitted(jnp.asarray(x), Format.KV_FP4)
    assert_same(jitted, made)
    assert_same(encode(jnp.asarray(x), Format.KV_FP4), made)
    quotients = np.abs(x).astype(np.float64) / np.repeat(made.scales, 16, 1).astype(np.float64)
    assert_same(unpack_nibbles(made.codes), nearest_e2m1(np.minimum(quotients, 6)))


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of non-negative float64 values, from the table of values alone."""
    table = decode_e2m1(np.arange(8, dtype=np.uint8)).astype(np.float64)
    upper = np.searchsorted(table, x).clip(1, 7)
    below, above = x - table[upper - 1], table[upper] - x
    take_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    return (upper - take_lower).astype(np.uint8)


def random_matrix(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    magnitude = np.exp2(rng.integers(-9, 9, shape)).astype(np.float32)
    return rng.standard_normal(shape).astype(np.float32) * magnitude


@pytest.mark.parametrize("shape", [(32, 32), (40, 64), (64, 40), (1, 100), (33, 31), (2, 70, 65)])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_fp8_block(encoder: str, shape: tuple[int, ...]) -> None:
    x = random_matrix(*shape)
    made = ENCODERS[encoder](x, Format.FP8_BLOCK)
    *lead, rows, columns = shape
    assert made.codes.shape == made.shape == shape
    blocks = (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    assert made.scales.shape == blocks
    for index in np.ndindex(*blocks):
        block = x[block_slices(index)]
        scale = np.exp2(np.ceil(np.log2(np.abs(block).max() / np.float64(448))))
        assert np.exp2(np.float64(made.scales[index]) - 127) == scale
        assert_same(np.asarray(made.codes)[block_slices(index)], (block / scale).astype(E4M3))
    decoded = np.asarray(decode(made))
    assert np.all(np.abs(decoded - x) <= np.maximum(np.abs(x) * 2.0**-4, min_step(made)))
    again = encode(decoded, Format.FP8_BLOCK)
    assert_same(decode(again), decoded)


def block_slices(index: tuple[int, ...]) -> tuple[Any, ...]:
    *lead, i, j = index
    rows, columns = (slice(n * FP8_BLOCK, (n + 1) * FP8_BLOCK) for n in (i, j))
    return (*lead, rows, columns)


def min_step(made: QuantizedArray) -> np.ndarray:
    """Half a step of the smallest E4M3 numbers under each element's scale."""
    scales = decode_e8m0(np.asarray(made.scales))
    return expand_blocks(scales, *made.shape[-2:]) * np.float32(2.0**-10)


@pytest.mark.parametrize("format", Format)
def test_pointing_into_a_stack(format: Format) -> None:
    stack = encode(random_matrix(3, 64, 96), format)
    alone = encode(random_matrix(3, 64, 96)[1], format)
    picked = stack.at_layer(1)
    assert picked.shape == alone.shape == (64, 96)
    assert_same(decode(picked), decode(alone))
    assert_same(values(stack.map(lambda x: x[1])), decode(alone))
    assert stack.nbytes == stack.codes.nbytes + stack.scales.nbytes


def test_zero_and_saturated_groups() -> None:
    """All-zero groups take the smallest scale; E4M3 scales saturate and the codes clamp."""
    assert_same(decode(encode(np.zeros((1, 32), np.float32), Format.KV_FP4)), np.zeros((1, 32)))
    huge = encode(np.full((1, 16), 1e6, np.float32), Format.KV_FP4)
    assert_same(decode(huge), np.full((1, 16), 448 * 6, np.float32))


def test_rounding_of_each_numerics() -> None:
    x = jnp.asarray(random_matrix(4, 64))
    assert_same(jax.jit(Numerics.REFERENCE.round)(x), np.asarray(x).astype(BF16))
    assert_same(Numerics.FLOAT32.round(x), x)
    assert_same(Numerics.FLOAT32.quantize(x, Format.KV_FP4), x)
