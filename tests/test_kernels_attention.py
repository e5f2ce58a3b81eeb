"""Sparse attention: the kernel against its definition, and lowered for GPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.formats import Format, QuantizedArray, encode
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.sparse_attention import RingAndStep, Rows, sparse_attention

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)
HEADS, WIDTH, RING, POOL = 8, 64, 48, 200
SCALE = WIDTH**-0.5

Source = tuple[Rows, jax.Array]


def values(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def window(queries: int) -> tuple[Source, Source]:
    """The same window rows as the kernel and as the definition read them."""
    ring = encode(values(0, 2, 3, RING, WIDTH), Format.FP8_GROUP)
    step = encode(values(1, queries, WIDTH), Format.FP8_GROUP)
    slots = jnp.asarray([2, 0], jnp.int32)
    mine = ring.map(lambda a: a[1, slots].reshape(2 * RING, -1))
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine, step)
    index = np.random.default_rng(2).integers(-1, 2 * RING + queries, (queries, 8))
    index = jnp.asarray(index, jnp.int32)
    return (RingAndStep(ring.at_layer(1), slots, step), index), (joined, index)


def chosen(queries: int) -> Source:
    index = np.random.default_rng(4).integers(-1, POOL, (queries, 150))
    return encode(values(3, POOL, WIDTH), Format.KV_FP4), jnp.asarray(index, jnp.int32)


def assert_close(got: jax.Array, want: jax.Array) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("with_pages", [False, True])
def test_kernel_matches_its_definition(with_pages: bool) -> None:
    q, sink = values(5, 3, HEADS, WIDTH).astype(jnp.bfloat16), values(6, HEADS)
    ours, theirs = window(3)
    rest = (chosen(3),) if with_pages else ()
    got = sparse_attention(q, (ours, *rest), sink, SCALE, INTERPRET)
    assert_close(got, sparse_attention(q, (theirs, *rest), sink, SCALE, REFERENCE))


def test_a_query_without_rows_yields_zero() -> None:
    q, sink = values(5, 2, HEADS, WIDTH).astype(jnp.bfloat16), values(6, HEADS)
    (rows, index), _ = window(2)
    out = sparse_attention(q, ((rows, jnp.full_like(index, -1)),), sink, SCALE, INTERPRET)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 96])
def test_official_shapes_lower_for_gpus(device: str, queries: int) -> None:
    shape = jax.ShapeDtypeStruct

    def fp8(layer: jax.ShapeDtypeStruct | None, *lead: int) -> QuantizedArray:
        codes = shape((*lead, 512), jnp.float8_e4m3fn)
        scales = shape((*lead, 16), jnp.uint8)
        return QuantizedArray(codes, scales, layer, format=Format.FP8_GROUP)

    ring, slots = fp8(shape((), jnp.int32), 40, 16, 256), shape((16,), jnp.int32)
    rows = RingAndStep(ring, slots, fp8(None, queries))
    pages = QuantizedArray(
        shape((65536, 256), jnp.uint8),
        shape((65536, 32), jnp.float8_e4m3fn),
        format=Format.KV_FP4,
    )

    def attend(q: jax.Array, sink: jax.Array, *sources: Source) -> jax.Array:
        return sparse_attention(q, sources, sink, 512**-0.5, PALLAS)

    q, sink = shape((queries, 64, 512), jnp.bfloat16), shape((64,), jnp.float32)
    index = shape((queries, 128), jnp.int32), shape((queries, 512), jnp.int32)
    text = lower_for_gpu(attend, q, sink, (rows, index[0]), (pages, index[1]), device=device)
    assert '"sparse_attention"' in text
