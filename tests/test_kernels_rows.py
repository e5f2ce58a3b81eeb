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
from ds41jax.kernels.routing import choose_experts

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
    products = jnp.asarray(random.normal(size=(5, 40)), jnp.float32)
    bias = jnp.asarray(random.normal(size=(5, 40)) / 4, jnp.float32)
    products, bias = products.at[2].set(0.5), bias.at[2].set(0.25)
    ids, weights = choose_experts(products, bias, 6, True, 1.5, INTERPRET)
    expected_ids, expected = choose_experts(products, bias, 6, True, 1.5, REFERENCE)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_official_shapes_lower_for_gpus(device: str) -> None:
    def both(x: jax.Array, products: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        chosen = choose_experts(products, bias, 6, True, 1.5, PALLAS)
        return quantized_planes(x, 4, PALLAS), mean_square(x, PALLAS), *chosen

    shape = jax.ShapeDtypeStruct
    scores = shape((96, 384), jnp.float32)
    text = lower_for_gpu(both, shape((96, 2304), jnp.bfloat16), scores, scores, device=device)
    assert all(f'"{kernel}"' in text for kernel in ("quantize", "route", "mean_square"))
