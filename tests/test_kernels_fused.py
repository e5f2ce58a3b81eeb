"""Kernels that do what stands between two products: against their definitions, and lowered."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu
from oracle import assert_within, page_tables, plain_batch, rel_rms, tiny_model

from ds41jax.formats import Format, decode, encode
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.experts import expert_mlp
from ds41jax.kernels.flash_decode import RingAndStep
from ds41jax.kernels.gpu import StackEntry
from ds41jax.kernels.latents import latents
from ds41jax.kernels.linear import operand, quantized_linear, quantized_parts
from ds41jax.kernels.quantize import Input, Prepared
from ds41jax.kernels.rotation import Turn
from ds41jax.kernels.sparse_attention import rotated_attention
from ds41jax.kernels.store import store_rows
from ds41jax.kernels.streams import enter, leave_and_enter
from ds41jax.model import backbone, text_layer
from ds41jax.model.state import CacheShape, init_state

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)
EPS = 1e-20
ROWS = (1, 6, 16)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def bits(seed: int, *shape: int) -> jax.Array:
    return normal(seed, *shape).astype(jnp.bfloat16)


def turns(rows: int, pairs: int) -> Turn:
    angles = normal(9, rows, pairs) * 40
    return Turn(jnp.cos(angles), jnp.sin(angles))


def values(x: Input) -> np.ndarray:
    return np.asarray(x.values if isinstance(x, Prepared) else x, np.float32)


def assert_near(got: Any, want: Any) -> None:
    """Equal but for a sum's order, which moves one value in some hundreds by a rounding."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
    assert (got != want).mean() < 0.01


def assert_quantised(x: Prepared) -> None:
    """The planes are what FP8_GROUP makes of the values, exactly."""
    exact = REFERENCE.fake_quantize(x.values, Format.FP8_GROUP)
    for count, planes in x.planes.items():
        np.testing.assert_array_equal(planes.astype(jnp.float32), gpu.planes(exact, count))


def streams(rows: int) -> tuple[jax.Array, ...]:
    """Parts of an output, streams, post, comb, pre, norm: 160 columns, no power of two."""
    mixes = [abs(normal(i, rows, *s)) for i, s in enumerate(((4,), (4, 4), (4,)))]
    norm = bits(7, 2, 160)
    return normal(3, 3, rows, 160), bits(4, rows, 4, 160), *mixes, StackEntry(norm, 1)


def leave(args: tuple[Any, ...], compute: Compute) -> tuple[Any, ...]:
    if not compute.on_gpu:
        args = (*args[:-1], args[-1].stack[1])
    return leave_and_enter(*args, EPS, (2, 4), compute)


def test_streams_are_written_and_collapsed_as_defined() -> None:
    stream, x, square = leave(streams(7), INTERPRET)
    expected_stream, expected, expected_square = leave(streams(7), REFERENCE)
    assert_near(stream, expected_stream)
    assert_near(values(x), expected)
    np.testing.assert_allclose(square, expected_square, rtol=1e-5)
    assert_quantised(x)


def test_streams_are_entered_as_defined() -> None:
    _, stream, _, _, pre, norm = streams(7)
    x, square = enter(stream, pre, norm, EPS, (2,), INTERPRET)
    expected, expected_square = enter(stream, pre, norm.stack[1], EPS, (2,), REFERENCE)
    assert_near(values(x), expected)
    np.testing.assert_allclose(square, expected_square, rtol=1e-6)
    assert_quantised(x)
    assert list(x.planes) == [2]


def low_rank_inputs(rows: int) -> tuple[Any, Any, Turn]:
    parts = normal(1, 3, rows, 96), normal(2, 3, rows, 64)
    norms = StackEntry(bits(3, 2, 96), 1), StackEntry(bits(4, 2, 64), 1)
    return parts, norms, turns(rows, 8)


def test_latents_match_their_definition() -> None:
    parts, norms, angles = low_rank_inputs(9)
    latent, row = latents(parts, norms, angles, EPS, INTERPRET)
    plain = tuple(n.stack[1] for n in norms)
    expected, expected_row = latents(parts, plain, angles, EPS, REFERENCE)
    assert_near(values(latent), expected)
    assert_quantised(latent)
    np.testing.assert_array_equal(row.scales, expected_row.scales)
    codes, expected_codes = (np.asarray(r.codes, np.float32) for r in (row, expected_row))
    assert (codes != expected_codes).mean() < 0.01


def test_products_that_share_a_launch_have_the_bits_of_their_own() -> None:
    weights = [encode(normal(i, n, 256), Format.FP8_BLOCK) for i, n in enumerate((192, 64, 96))]
    x = bits(5, 6, 256)
    for pair in (weights[:2], weights[::2]):  # of equal tiles, and of unequal ones
        together = quantized_parts(x, tuple(pair), INTERPRET)
        for parts, w in zip(together, pair, strict=True):
            np.testing.assert_array_equal(
                INTERPRET.round(gpu.add_parts(parts)), quantized_linear(x, w, INTERPRET)
            )


def test_shared_expert_matches_its_definition() -> None:
    shapes = ((64, 128), (128, 64), (64, 128))
    matrices = [encode(normal(i, *s) / 4, Format.FP8_BLOCK) for i, s in enumerate(shapes)]
    x = bits(6, 5, 128)
    got, want = (
        np.asarray(expert_mlp(x, [operand(w, c) for w in matrices], None, 1.5, c), np.float64)
        for c in (INTERPRET, REFERENCE)
    )
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


def assert_first_rows(alone: Any, together: Any, rows: int) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_array_equal(a.astype(jnp.float32), b[:rows].astype(jnp.float32))

    jax.tree.map(check, alone, together)


def test_a_row_of_streams_does_not_see_its_neighbours() -> None:
    args = streams(96)
    together = leave(args, INTERPRET)
    for rows in ROWS:
        mine = (args[0][:, :rows], *(a[:rows] for a in args[1:-1]), args[-1])
        assert_first_rows(leave(mine, INTERPRET), together, rows)


def test_a_row_of_latents_does_not_see_its_neighbours() -> None:
    parts, norms, angles = low_rank_inputs(96)
    together = latents(parts, norms, angles, EPS, INTERPRET)
    for rows in ROWS:
        mine = [p[:, :rows] for p in parts], norms, jax.tree.map(lambda a, n=rows: a[:n], angles)
        assert_first_rows(latents(*mine, EPS, INTERPRET), together, rows)


def test_rows_are_stored_as_defined() -> None:
    ring = encode(normal(1, 2, 3, 8, 64), Format.FP8_GROUP)
    rows = encode(normal(2, 4, 64), Format.FP8_GROUP)
    at = jnp.asarray([0, 3, 2, 0], jnp.int32), jnp.asarray([7, 1, 0, 2], jnp.int32)  # 3: dropped
    got, want = (store_rows(ring, 1, *at, rows, c) for c in (INTERPRET, REFERENCE))
    np.testing.assert_array_equal(got.codes.astype(jnp.float32), want.codes.astype(jnp.float32))
    np.testing.assert_array_equal(got.scales, want.scales)


def test_rotated_attention_matches_its_definition() -> None:
    heads, width, queries, scale = 8, 64, 5, 0.125
    ring, step = (
        encode(normal(i, *s), Format.FP8_GROUP)
        for i, s in ((1, (2, 3, 48, width)), (2, (queries, width)))
    )
    slots = jnp.asarray([2, 0], jnp.int32)
    index = np.random.default_rng(3).integers(-1, 96 + queries, (queries, 70))
    index = jnp.asarray(index, jnp.int32)
    joined = jax.tree.map(
        lambda a, b: jnp.concatenate([a[1, slots].reshape(96, -1), b]), ring, step
    )
    q, angles, sink = bits(4, queries, heads, width), turns(queries, 8), normal(5, 2, heads)
    rows = RingAndStep(ring.at_layer(1), slots, step)
    got = rotated_attention(q, angles, ((rows, index),), StackEntry(sink, 1), scale, 2, INTERPRET)
    want = rotated_attention(q, angles, ((joined, index),), sink[1], scale, 2, REFERENCE)
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == (queries, 2, 2, heads // 2 * width // 2)
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


def test_a_layer_on_the_kernels_is_near_the_definition() -> None:
    """A KV and index source of the tiny model, six rows of a sequence."""
    model = tiny_model()
    config = dataclasses.replace(model.config, engram_layer_ids=())
    index = config.index_source_layer_ids[0]
    tables = page_tables(config, pages=2)
    made = plain_batch(config, [(0, 40, 46)], tables, buckets=(6,))
    batch = jax.tree.map(jnp.asarray, made)

    @functools.partial(jax.jit, static_argnames="compute")
    def run(compute: Compute) -> tuple[jax.Array, Any]:
        state = init_state(config, CacheShape(1, int(tables.size)), compute)
        stream = bits(1, 6, config.hc_mult, config.hidden_size)
        pre = abs(normal(2, 6, config.hc_mult))
        carry = backbone.start(stream, pre, state, batch, config, compute)
        carry = text_layer.layer(carry, index, model.params, batch, config, compute)
        return carry.stream, carry.state

    (stream, state), (want, want_state) = run(INTERPRET), run(REFERENCE)
    assert_within(rel_rms, stream, want, 2e-2)
    for name in ("window", "pages", "index_pages"):
        found, expected = (decode(getattr(s, name)) for s in (state, want_state))
        assert_within(rel_rms, found, expected, 2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 96])
def test_official_shapes_lower_for_gpus(device: str, rows: int) -> None:
    shape, f32, bf16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16

    def both(stream: Any, pre: Any, norm: Any, parts: Any, comb: Any, low: Any, norms: Any, t: Any):
        entry = StackEntry(norm, 3)
        entered = enter(stream, pre, entry, EPS, (2,), PALLAS)
        left = leave_and_enter(parts, stream, pre, comb, pre, entry, EPS, (2, 4), PALLAS)
        entries = tuple(StackEntry(n, 3) for n in norms)
        return entered, left, latents(low, entries, t, EPS, PALLAS)

    pre, comb = shape((rows, 4), f32), shape((rows, 4, 4), f32)
    low = [shape((10, rows, n), f32) for n in (1280, 512)]
    norms = [shape((40, n), bf16) for n in (1280, 512)]
    angles = Turn(*[shape((rows, 32), f32)] * 2)
    args = shape((rows, 4, 5120), bf16), pre, shape((40, 5120), bf16)
    parts = shape((4, rows, 5120), f32)
    text = lower_for_gpu(both, *args, parts, comb, low, norms, angles, device=device)
    assert all(f'"{kernel}"' in text for kernel in ("enter", "leave_and_enter", "latents"))
