"""Sampling: filters against numpy, ties, and draws that depend on seed and index alone."""

import numpy as np
import pytest

from ds41jax.engine.sampling import SamplingParams, choose_tokens, sampling_rows

V = 50


def choose(logits, params, index):
    return np.asarray(choose_tokens(np.asarray(logits, np.float32), sampling_rows(params, index)))


def logits(rows, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32)


def test_temperature_zero_is_argmax_with_ties_to_the_lowest_id():
    x = logits(3)
    x[1, [7, 3, 20]] = 99
    assert list(choose(x, [SamplingParams()] * 3, [0, 1, 2])) == list(x.argmax(-1))
    assert choose(x, [SamplingParams()] * 3, [0, 1, 2])[1] == 3


@pytest.mark.parametrize(
    "params, kept",
    [
        ({"top_k": 3}, lambda p, order: order[:3]),
        ({"min_p": 0.2}, lambda p, order: [i for i in order if p[i] >= 0.2 * p.max()]),
        ({"top_p": 0.6}, lambda p, order: order[: 1 + int((np.cumsum(p[order]) < 0.6).sum())]),
        ({"top_p": 1e-6}, lambda p, order: order[:1]),
        (
            {"top_k": 10, "top_p": 0.5},
            lambda p, order: order[
                : 1 + int((np.cumsum(p[order[:10]]) / p[order[:10]].sum() < 0.5).sum())
            ],
        ),
    ],
)
def test_filters_keep_what_numpy_keeps_and_draw_all_of_it(params, kept):
    x = logits(1, seed=3)
    scaled = x[0] / 0.8
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    wanted = set(map(int, kept(p, np.argsort(-scaled, kind="stable"))))
    sampling = SamplingParams(temperature=0.8, seed=5, **params)
    drawn = choose(np.repeat(x, 2000, 0), [sampling] * 2000, list(range(2000)))
    assert set(drawn) <= wanted
    likely = {i for i in wanted if p[i] / p[list(wanted)].sum() > 0.01}
    assert likely <= set(drawn)


def test_top_k_takes_the_lowest_ids_among_equals():
    x = np.zeros((400, V), np.float32)
    drawn = choose(x, [SamplingParams(temperature=1, top_k=4, seed=1)] * 400, list(range(400)))
    assert set(drawn) == {0, 1, 2, 3}


def test_draws_follow_the_distribution():
    x = logits(1, seed=9)[:, :6]
    n = 6000
    drawn = choose(np.repeat(x, n, 0), [SamplingParams(temperature=1, seed=2)] * n, list(range(n)))
    p = np.exp(x[0] - x[0].max())
    expected = n * p / p.sum()
    chi2 = ((np.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum()
    assert chi2 < 20.5  # 5 degrees of freedom: exceeded once in a thousand


def test_a_draw_depends_on_seed_and_index_alone():
    x = logits(8, seed=4)
    params = [SamplingParams(temperature=1, seed=s) for s in (1, 2, 2**40 + 1, 1, 5, 6, 7, 8)]
    index = [0, 3, 0, 9, 4, 4, 4, 4]
    together = choose(x, params, index)
    alone = [choose(x[i : i + 1], params[i : i + 1], index[i : i + 1])[0] for i in range(8)]
    assert list(together) == alone
    same = choose(np.repeat(x[:1], 64, 0), [SamplingParams(temperature=2, seed=3)] * 64, [7] * 64)
    assert len(set(same)) == 1
    other = choose(
        np.repeat(x[:1], 64, 0),
        [SamplingParams(temperature=2, seed=s) for s in range(64)],
        [7] * 64,
    )
    assert len(set(other)) > 8


def test_seeds_differ_beyond_32_bits():
    x = np.zeros((2, 4096), np.float32)
    params = [SamplingParams(temperature=1, seed=s) for s in (1, 1 + 2**32)]
    first, second = choose(x, params, [0, 0])
    assert first != second


def test_forbidden_tokens_are_never_drawn():
    x = logits(500, seed=6)
    x[:, 10:] = -np.inf
    drawn = choose(x, [SamplingParams(temperature=50, seed=1)] * 500, list(range(500)))
    assert drawn.max() < 10


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_out_of_range_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
