"""Small kernels over rows, quantisation and routing: against their definitions, and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.formats import Format
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.gpu import planes
from ds41jax.kernels.norm import mean_square
from ds41jax.kernels.quantize import quantized_planes
from ds41jax.kernels.routing import choose_of_parts

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)


@pytest.mark.parametrize("count", [2, 4])
def test_quantised_planes_are_exact(count: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 160)) * 3, jnp.bfloat16)
    got = quantized_planes(x, count, INTERPRET).astype(jnp.float32)
    want = planes(REFERENCE.fake_quantize(x, Format.FP8_GROUP), count)
    np.testing.assert_array_equal(got, want)


def test_mean_squares_match_their_definition_whatever_the_rows() -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(7, 3, 320)), jnp.bfloat16)
    got = mean_square(x, INTERPRET)
    np.testing.assert_allclose(got, mean_square(x, REFERENCE), rtol=1e-6)
    np.testing.assert_array_equal(mean_square(x[:2], INTERPRET), got[:2])


def test_experts_are_chosen_as_defined_with_ties_to_the_lower_id() -> None:
    random = np.random.default_rng(1)
    parts = jnp.asarray(random.normal(size=(3, 5, 40)), jnp.float32).at[:, 2].set(0.5)
    biases = tuple(jnp.asarray(random.normal(size=40) / 4, jnp.float32) for _ in range(2))
    is_image = jnp.arange(5) == 3
    sizes = 6, True, 1.5
    ids, weights = choose_of_parts(parts, biases, is_image, *sizes, INTERPRET)
    expected_ids, expected = choose_of_parts(parts, biases, is_image, *sizes, REFERENCE)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    flat = choose_of_parts(parts, (biases[0] * 0, biases[1]), is_image, *sizes, INTERPRET)
    np.testing.assert_array_equal(flat[0][2], np.arange(6))


def test_quantised_sums_of_parts_are_rounded_first() -> None:
    parts = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2, 96)), jnp.float32)
    got = quantized_planes(parts, 2, INTERPRET)
    want = REFERENCE.round(parts[0] + parts[1] + parts[2])
    np.testing.assert_array_equal(got, quantized_planes(want, 2, INTERPRET))


@pytest.mark.parametrize("device", DEVICES)
def test_official_shapes_lower_for_gpus(device: str) -> None:
    def both(
        x: jax.Array, parts: jax.Array, bias: jax.Array, is_image: jax.Array
    ) -> tuple[jax.Array, ...]:
        chosen = choose_of_parts(parts, (bias, bias), is_image, 6, True, 1.5, PALLAS)
        return quantized_planes(x, 4, PALLAS), mean_square(x, PALLAS), *chosen

    shape = jax.ShapeDtypeStruct
    x, parts = shape((96, 2304), jnp.bfloat16), shape((10, 96, 384), jnp.float32)
    bias, is_image = shape((384,), jnp.float32), shape((96,), jnp.bool_)
    text = lower_for_gpu(both, x, parts, bias, is_image, device=device)
    assert all(f'"{kernel}"' in text for kernel in ("quantize", "route", "mean_square"))
