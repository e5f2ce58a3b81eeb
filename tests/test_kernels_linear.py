"""Dense products: the kernel against its definition, and lowered for GPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.formats import Format, QuantizedArray, encode
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.linear import grouped_linear, linear, operand, project, quantized_linear

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)


def rows(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)


def weight(shape: tuple[int, ...], layer: int | None = None) -> QuantizedArray:
    values = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    return encode(jnp.asarray(values), Format.FP8_BLOCK).at_layer(layer)


def assert_close(a: jax.Array, b: jax.Array) -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(("count", "n", "k"), [(1, 64, 64), (5, 192, 256), (17, 96, 640)])
def test_quantized_linear_matches_its_definition(count: int, n: int, k: int) -> None:
    w = weight((2, n, k), layer=1)
    x = rows((count, k))
    got = quantized_linear(x, operand(w, INTERPRET), INTERPRET)
    assert_close(got, quantized_linear(x, operand(w, REFERENCE), REFERENCE))


def test_grouped_linear_matches_its_definition() -> None:
    w = weight((96, 128))
    x = rows((5, 3, 128))
    got = grouped_linear(x, operand(w, INTERPRET), INTERPRET)
    assert_close(got, grouped_linear(x, operand(w, REFERENCE), REFERENCE))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_unquantised_products_match_their_definition(dtype: type) -> None:
    w = rows((24, 256)).astype(dtype) * 1.001
    x = rows((3, 256))
    np.testing.assert_allclose(
        project(x, w, INTERPRET), project(x, w, REFERENCE), rtol=1e-5, atol=1e-5
    )
    assert_close(linear(x, w, INTERPRET), linear(x, w, REFERENCE))


def test_a_row_does_not_see_its_neighbours() -> None:
    w = operand(weight((64, 256)), INTERPRET)
    x = rows((40, 256))
    together = quantized_linear(x, w, INTERPRET)
    for count in (1, 6, 16):
        alone = quantized_linear(x[:count], w, INTERPRET)
        np.testing.assert_array_equal(alone, together[:count])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 96])
def test_official_shapes_lower_for_gpus(device: str, count: int) -> None:
    def products(x: jax.Array, w: QuantizedArray, router: jax.Array, mix: jax.Array) -> tuple:
        return quantized_linear(x, w, PALLAS), project(x, router, PALLAS), project(x, mix, PALLAS)

    shape = jax.ShapeDtypeStruct
    w = QuantizedArray(
        shape((40, 1280, 5120), jnp.float8_e4m3fn),
        shape((40, 40, 160), jnp.uint8),
        layer=shape((), jnp.int32),
        format=Format.FP8_BLOCK,
    )
    x, router = shape((count, 5120), jnp.bfloat16), shape((384, 5120), jnp.bfloat16)
    mix = shape((24, 5120), jnp.float32)
    assert lower_for_gpu(products, x, w, router, mix, device=device).count('"matmul"') >= 3
