"""Hyper-connection mixes: the kernel against its definition, and lowered for absent GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.mixes import split_mixes

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)


@pytest.mark.parametrize("rows", [1, 11])
def test_kernel_matches_its_definition(rows: int) -> None:
    random = np.random.default_rng(rows)
    mixes = jnp.asarray(random.normal(size=(rows, 24)) * 2, jnp.float32)
    base = jnp.asarray(random.normal(size=24), jnp.float32)
    scale = jnp.asarray([0.5, 1.5, 0.8], jnp.float32)
    got = split_mixes(mixes, base, scale, 4, 20, 1e-6, INTERPRET)
    want = split_mixes(mixes, base, scale, 4, 20, 1e-6, REFERENCE)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_official_shapes_lower_for_gpus(device: str) -> None:
    shape = jax.ShapeDtypeStruct
    args = [shape(s, jnp.float32) for s in ((96, 24), (24,), (3,))]

    def split(mixes: jax.Array, base: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        return split_mixes(mixes, base, scale, 4, 20, 1e-6, PALLAS)

    assert '"mixes"' in lower_for_gpu(split, *args, device=device)
