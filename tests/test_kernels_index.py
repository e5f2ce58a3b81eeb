"""Index scores over pages: the kernel against its definition, and lowered for absent GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import DEVICES, lower_for_gpu

from ds41jax.formats import Format, QuantizedArray, encode, values
from ds41jax.kernels.choices import trying
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels
from ds41jax.kernels.index_select import (
    PagedKeys,
    best_blocks,
    best_rows,
    candidate_blocks,
    index_scores,
    paged_index_scores,
    top_rows,
)

INTERPRET = Compute(kernels=Kernels.INTERPRET)
PALLAS = Compute(kernels=Kernels.PALLAS)
HEADS, WIDTH, ROWS = 8, 64, 32


def test_kernel_matches_its_definition() -> None:
    random = np.random.default_rng(0)
    keys = encode(jnp.asarray(random.normal(size=(7, ROWS, WIDTH)), jnp.float32), Format.MXFP4)
    table = jnp.asarray([[6, 2, 0], [5, 1, 3]], jnp.int32)
    q = jnp.asarray(random.normal(size=(4, HEADS, WIDTH)), jnp.float32)
    q = values(encode(q, Format.MXFP4))
    weights = jnp.asarray(random.normal(size=(4, HEADS)), jnp.bfloat16)
    sequences, visible = jnp.asarray([0, 1, 1, 0]), jnp.asarray([96, 40, 0, 33])
    paged = PagedKeys(keys, table)
    got = np.asarray(paged_index_scores(q, weights, paged, sequences, visible, INTERPRET))
    for t in range(4):
        mine = values(keys.map(lambda a, t=t: a[table[sequences[t]]])).reshape(-1, WIDTH)
        want = np.asarray(index_scores(q[t], weights[t], mine, REFERENCE))
        seen = int(visible[t])
        np.testing.assert_allclose(got[t, :seen], want[:seen], rtol=2e-2, atol=2e-2)
        assert np.isneginf(got[t, seen:]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_official_shapes_lower_for_gpus(device: str) -> None:
    shape = jax.ShapeDtypeStruct
    pages = QuantizedArray(
        shape((4096, 256, 64), jnp.uint8), shape((4096, 256, 4), jnp.uint8), format=Format.MXFP4
    )
    keys = PagedKeys(pages, shape((16, 1024), jnp.int32))
    row = shape((6,), jnp.int32)

    def score(q: jax.Array, w: jax.Array, keys: PagedKeys, s: jax.Array, v: jax.Array) -> jax.Array:
        return paged_index_scores(q, w, keys, s, v, PALLAS)

    q, weights = shape((6, 32, 128), jnp.float32), shape((6, 32), jnp.bfloat16)
    assert '"index_scores"' in lower_for_gpu(score, q, weights, keys, row, row, device=device)


@pytest.mark.parametrize("n", [40, 300])
def test_best_rows_are_exact_with_ties_to_the_lowest_index(n: int) -> None:
    scores = np.random.default_rng(1).normal(size=(3, n)).round(1)
    scores[1, n // 3 :] = -np.inf
    scores[2, 5:] = -np.inf
    scores = jnp.asarray(scores, jnp.bfloat16).astype(jnp.float32)
    with trying("index_select", scores=64):
        got = best_rows(scores, 16, INTERPRET)
    for t in range(3):
        np.testing.assert_array_equal(got[t], top_rows(scores[t], 16))


def test_best_blocks_are_the_candidate_blocks() -> None:
    scores = np.random.default_rng(2).normal(size=(2, 203)).round(1)
    visible = jnp.asarray([203, 120], jnp.int32)
    scores = jnp.where(jnp.arange(203) < visible[:, None], scores, -jnp.inf)
    scores = scores.astype(jnp.bfloat16).astype(jnp.float32)
    for top in (6, 200):
        got = best_blocks(scores, visible, top, 4, INTERPRET)
        for t in range(2):
            np.testing.assert_array_equal(got[t], candidate_blocks(scores[t], visible[t], top, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_selection_lowers_for_gpus(device: str) -> None:
    scores = jax.ShapeDtypeStruct((6, 1 << 18), jnp.float32)
    text = lower_for_gpu(lambda s: best_rows(s, 512, PALLAS), scores, device=device)
    assert text.count('"best_rows"') >= 1
