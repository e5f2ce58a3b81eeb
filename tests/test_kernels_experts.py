"""Routed experts: the kernels against their definition, and lowered for GPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.formats import Format, QuantizedArray, encode
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels, Phase
from ds41jax.kernels.expert_plan import block_plan, sorted_plan
from ds41jax.kernels.experts import routed_experts

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PREFILL = Compute(kernels=Kernels.INTERPRET, phase=Phase.PREFILL)
PALLAS = Compute(kernels=Kernels.PALLAS)
D, F, E, K = 128, 64, 5, 2

Matrices = tuple[QuantizedArray, QuantizedArray, QuantizedArray]


def matrices(layer: int = 1) -> Matrices:
    random = np.random.default_rng(0)

    def stack(*shape: int) -> QuantizedArray:
        values = random.normal(size=shape).astype(np.float32) / 4
        return encode(jnp.asarray(values), Format.MXFP4).at_layer(layer)

    return stack(2, E, F, D), stack(2, E, D, F), stack(2, E, F, D)


def step(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(rows)
    ids = np.stack([random.permutation(E)[:K] for _ in range(rows)])
    x = jnp.asarray(random.normal(size=(rows, D)), jnp.bfloat16)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(random.uniform(size=(rows, K)), jnp.float32)


@pytest.mark.parametrize(("rows", "compute"), [(1, INTERPRET), (50, INTERPRET), (180, PREFILL)])
def test_kernels_match_their_definition(rows: int, compute: Compute) -> None:
    x, ids, weights = step(rows)
    got = routed_experts(x, ids, weights, matrices(), 1.5, compute)
    want = np.asarray(routed_experts(x, ids, weights, matrices(), 1.5, REFERENCE))
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


def test_a_row_does_not_see_its_neighbours() -> None:
    x, ids, weights = step(24)
    together = routed_experts(x, ids, weights, matrices(), 1.5, INTERPRET)
    for rows in (1, 6):
        alone = routed_experts(x[:rows], ids[:rows], weights[:rows], matrices(), 1.5, INTERPRET)
        np.testing.assert_array_equal(alone, together[:rows])


def test_plan_puts_every_pair_in_one_block_of_its_expert() -> None:
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 3, 70), jnp.int32).at[5].set(-1)
    for plan in (block_plan(ids, INTERPRET), sorted_plan(ids, 3, 64)):
        seen = []
        for expert, pairs in zip(*(np.asarray(a) for a in plan), strict=True):
            mine = pairs[pairs < 70]
            if expert >= 0:
                assert (np.asarray(ids)[mine] == expert).all()
                seen += list(mine)
        assert sorted(seen) == [p for p in range(70) if p != 5]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 96])
def test_official_shapes_lower_for_gpus(device: str, rows: int) -> None:
    shape = jax.ShapeDtypeStruct

    def stack(n: int, k: int) -> QuantizedArray:
        codes = shape((40, 384, n, k // 2), jnp.uint8)
        scales = shape((40, 384, n, k // 32), jnp.uint8)
        return QuantizedArray(codes, scales, shape((), jnp.int32), format=Format.MXFP4)

    def experts(x: jax.Array, ids: jax.Array, weights: jax.Array, *w: QuantizedArray) -> jax.Array:
        return routed_experts(x, ids, weights, (w[0], w[1], w[2]), 10.0, PALLAS)

    x, ids = shape((rows, 5120), jnp.bfloat16), shape((rows, 6), jnp.int32)
    weights = shape((rows, 6), jnp.float32)
    w = stack(2304, 5120), stack(5120, 2304), stack(2304, 5120)
    text = lower_for_gpu(experts, x, ids, weights, *w, device=device)
    for kernel in ("expert_plan", "expert_up", "expert_act", "expert_down"):
        assert f'"{kernel}"' in text
