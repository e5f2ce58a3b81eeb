"""Small kernels over rows, quantisation and routing: against their definitions, and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.formats import Format
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.gpu import planes
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
        return quantized_planes(x, 4, PALLAS), *chosen

    shape = jax.ShapeDtypeStruct
    scores = shape((96, 384), jnp.float32)
    text = lower_for_gpu(both, shape((96, 2304), jnp.bfloat16), scores, scores, device=device)
    assert '"quantize"' in text and '"route"' in text
