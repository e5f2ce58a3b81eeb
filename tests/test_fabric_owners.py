"""Owner plans: the native one, the traced one and one written out in Python are the same."""

import ctypes

import jax
import numpy as np
import pytest

from ds41jax.fabric.library import Geometry, native
from ds41jax.fabric.owners import balanced_owners, fixed_owners

EXPERTS, CHOICES = 64, 6


def hashed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def written_out(ids: np.ndarray, layer: int, groups: tuple[int, ...]) -> list[int]:
    counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    used = [e for e in range(EXPERTS) if counts[e]]
    cost = {e: 4 + -(-int(counts[e]) // 16) for e in used}
    owners = [groups[e % len(groups)] for e in range(EXPERTS)]
    load = [0] * len(groups)
    for e in sorted(used, key=lambda e: (-cost[e], hashed(layer << 16 ^ e), e)):
        best = min(
            range(len(groups)), key=lambda g: load[g] * len(groups) + (g + layer) % len(groups)
        )
        load[best] += cost[e]
        owners[e] = groups[best]
    return owners


def native_owners(ids: np.ndarray, layer: int, groups: tuple[int, ...], balanced: bool) -> list:
    geometry = Geometry(hidden=64, experts=EXPERTS, choices=CHOICES, groups=3, capacity=4096)
    plan = native().handle.ds41jax_plan_owners
    plan.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32),
        *(ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
    )
    plan.restype = None
    out = np.zeros(512, np.uint8)
    alive = sum(1 << g for g in groups)
    ids = np.ascontiguousarray(ids, np.int32)
    plan(
        *(ctypes.byref(geometry), layer, ids.ctypes.data, len(ids)),
        *(int(balanced), alive, out.ctypes.data),
    )
    return out[:EXPERTS].tolist()


def choices(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    skewed = rng.dirichlet(np.full(EXPERTS, 0.3)) + 1e-9
    return np.stack(
        [rng.choice(EXPERTS, CHOICES, replace=False, p=skewed / skewed.sum()) for _ in range(rows)]
    )


@pytest.mark.parametrize("groups", [(0, 1), (0, 1, 2), (1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("rows", [1, 6, 300])
def test_the_three_plans_agree(groups: tuple[int, ...], rows: int) -> None:
    traced = jax.jit(balanced_owners, static_argnums=(3, 4))
    for layer in (0, 7, 39):
        ids = choices(rows, seed=layer * 1000 + rows)
        padded = np.concatenate([ids, np.zeros((5, CHOICES), ids.dtype)])
        live = np.arange(rows + 5) < rows
        expected = written_out(ids, layer, groups)
        assert native_owners(ids, layer, groups, balanced=True) == expected
        found = traced(padded.astype(np.int32), live, layer, EXPERTS, groups)
        assert found.tolist() == expected


def test_fixed_owners_do_not_look_at_the_step() -> None:
    groups = (0, 2)
    expected = [groups[e % 2] for e in range(EXPERTS)]
    assert fixed_owners(EXPERTS, groups).tolist() == expected
    assert native_owners(choices(9, 1), 3, groups, balanced=False) == expected


def test_a_plan_is_balanced() -> None:
    ids = choices(200, seed=4)
    counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    cost = np.where(counts, 4 + -(-counts // 16), 0)
    owners = np.asarray(written_out(ids, 3, (0, 1)))
    loads = [cost[owners == g].sum() for g in (0, 1)]
    assert abs(loads[0] - loads[1]) <= cost.max()
