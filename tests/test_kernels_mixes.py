"""Hyper-connection mixes: the kernel against its definition, and lowered for absent GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.mixes import finish_mixes

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)


SIZES = 4, 20, 1e-6, 1e-20  # streams, iterations, eps of mixes and of norms


def inputs(rows: int, parts: int) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(rows)
    mixes = jnp.asarray(random.normal(size=(parts, rows, 24)) * 2, jnp.float32)
    square = jnp.asarray(random.uniform(1, 9, size=rows), jnp.float32)
    base = jnp.asarray(random.normal(size=24), jnp.float32)
    return mixes, square, base, jnp.asarray([0.5, 1.5, 0.8], jnp.float32)


@pytest.mark.parametrize(("rows", "parts"), [(1, 8), (11, 5)])
def test_kernel_matches_its_definition(rows: int, parts: int) -> None:
    args = inputs(rows, parts)
    got = finish_mixes(*args, *SIZES, INTERPRET)
    want = finish_mixes(*args, *SIZES, REFERENCE)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=4e-6, atol=1e-6)


def test_a_row_does_not_see_its_neighbours() -> None:
    parts, square, *rest = inputs(96, 4)
    together = finish_mixes(parts, square, *rest, *SIZES, INTERPRET)
    for rows in (1, 6, 16):
        alone = finish_mixes(parts[:, :rows], square[:rows], *rest, *SIZES, INTERPRET)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a, b[:rows])


@pytest.mark.parametrize("device", DEVICES)
def test_official_shapes_lower_for_gpus(device: str) -> None:
    shape = jax.ShapeDtypeStruct
    args = [shape(s, jnp.float32) for s in ((64, 96, 24), (96,), (24,), (3,))]

    def finish(*args: jax.Array) -> tuple[jax.Array, ...]:
        return finish_mixes(*args, *SIZES, PALLAS)

    assert '"mixes"' in lower_for_gpu(finish, *args, device=device)
