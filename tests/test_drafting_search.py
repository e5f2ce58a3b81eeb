"""The traffic forecast and the greedy search, against brute force."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from ds41jax.drafting.logits import running_products
from ds41jax.drafting.placement import Placement, local_layers, remote_layers
from ds41jax.drafting.policy import RequestDraft
from ds41jax.drafting.search import best_even_shape, best_shape
from ds41jax.drafting.traffic import (
    WINDOWS,
    LaneTraffic,
    expert_groups,
    push_routes,
    update_novelty,
)

PLACEMENT = Placement(
    (local_layers((1, 3), 2_000_000), remote_layers((2,), 1_000_000)),
    num_experts=12,
    experts_per_token=3,
)
US_PER_MB = (0.5, 4.0)
NOVELTY = [9.0, 2.5, 1.5, 2.0]


def no_traffic(requests):
    return LaneTraffic(
        [RequestDraft(n, 0) for n in range(requests)], [0] * requests, Placement(), (), ()
    )


class ConstantTraffic:
    """Every draft costs the same."""

    def __init__(self, requests, us=0.0):
        self.total_us, self.next_us, self.us = 0.0, [us] * requests, us

    def add(self, request):
        self.total_us += self.us


def random_routes(rng, tokens):
    return rng.random((tokens, 4, 12)).argsort(2)[:, :, :3]


def brute_traffic(lane, lengths, placement=PLACEMENT):
    """The forecast of a shape, window by window, straight from its definition."""
    total = 0.0
    for us, c in zip(US_PER_MB, placement.classes, strict=True):
        for layer, window in itertools.product(c.layers, range(WINDOWS)):
            groups, counts = 0.0, np.zeros(placement.num_experts, int)
            for request, length in zip(lane, lengths, strict=True):
                for row in range(1 + length):
                    known = 0 if request.routes is None else len(request.routes)
                    if window + row < known:
                        np.add.at(counts, request.routes[window + row][layer], 1)
                    else:
                        groups += NOVELTY[layer] if row else placement.experts_per_token
            groups += -(-counts // 16).sum()
            total += us * c.expert_bytes / 1e6 * float(groups) / WINDOWS
    return total


@pytest.mark.parametrize("history", [(24, 24, 24), (24, 2, 0), (0, 0, 0), (5, None, 7)])
def test_traffic_equals_its_definition(history):
    rng = np.random.default_rng(0)
    lane = [
        RequestDraft(n, 7, (), None if h is None else random_routes(rng, h))
        for n, h in enumerate(history)
    ]
    lengths = [0, 0, 0]
    traffic = LaneTraffic(lane, [7, 4, 7], PLACEMENT, US_PER_MB, NOVELTY)
    assert traffic.total_us == pytest.approx(brute_traffic(lane, lengths))
    for request in (0, 2, 2, 1, 0, 0, 2, 1, 1, 0, 1, 2, 2, 2, 2, 0, 0, 0):
        lengths[request] += 1
        expected = brute_traffic(lane, lengths)
        assert traffic.total_us + traffic.next_us[request] == pytest.approx(expected)
        traffic.add(request)
        assert traffic.total_us == pytest.approx(expected)
    assert traffic.next_us == [0.0, 0.0, 0.0]


def test_sixteen_rows_share_one_reading():
    routes = np.broadcast_to(np.arange(3), (24, 4, 3))
    lane = [RequestDraft(n, 7, (), routes) for n in range(3)]
    traffic = LaneTraffic(lane, [7] * 3, PLACEMENT, US_PER_MB, NOVELTY)
    steps = []
    for request in [0] * 7 + [1] * 7:
        steps.append(traffic.next_us[request])
        traffic.add(request)
    new_group_us = 3 * (0.5 * 2 * 2.0 + 4.0 * 1.0)
    assert steps == pytest.approx([0.0] * 13 + [new_group_us])  # 3 anchors and 14 drafts: row 17
    assert expert_groups(np.asarray(routes[:17]), 12) == (6, 6, 6, 6)


def test_history_and_novelty():
    rng = np.random.default_rng(1)
    rows = random_routes(rng, 5)
    history = push_routes(None, rows, 4)
    assert (history == rows[:4][::-1]).all()
    assert len(push_routes(random_routes(rng, 24), rows, 5)) == 24
    novelty = [2.5] * 4
    update_novelty(novelty, history, rows[4:])
    known = [set(rows[1:4, layer].ravel()) for layer in range(4)]
    fresh = [len(set(rows[4, layer]) - known[layer]) for layer in range(4)]
    assert novelty == pytest.approx([2.5 + 0.005 * (f - 2.5) for f in fresh])
    update_novelty(novelty, None, rows[:3])  # too little to look back on
    assert novelty == pytest.approx([2.5 + 0.005 * (f - 2.5) for f in fresh])


def exhaustive(gains, base_us, row_us, traffic_of):
    shapes = itertools.product(*(range(len(g) + 1) for g in gains))
    rates = {}
    for shape in shapes:
        tokens = len(gains) + sum(sum(g[:k]) for g, k in zip(gains, shape, strict=True))
        rates[shape] = tokens / (base_us + sum(shape) * row_us + traffic_of(shape))
    return rates


@pytest.mark.parametrize("seed", range(60))
def test_search_agrees_with_exhaustive_search(seed):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 4))
    gains = [running_products(rng.beta(3, 1, int(rng.integers(0, 5)))) for _ in range(requests)]
    base, row = 1000.0 + 9000 * rng.random(), 3000 * rng.random()
    found = best_shape(gains, base, row, ConstantTraffic(requests))
    sorted_once = best_even_shape(gains, base, row)
    assert sorted_once.lengths == found.lengths
    assert sorted_once.rate == pytest.approx(found.rate, rel=1e-12)
    rates = exhaustive(gains, base, row, lambda shape: 0.0)
    assert found.rate == pytest.approx(max(rates.values()), rel=1e-12)
    assert rates[found.lengths] == pytest.approx(found.rate, rel=1e-12)


def test_search_is_close_to_exhaustive_search_with_traffic():
    """Shared experts make rows worth less or more together, so greedy may miss a little."""
    losses = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lane = [RequestDraft(n, 4, (), random_routes(rng, 24)) for n in range(3)]
        gains = [running_products(rng.beta(3, 1, 4)) for _ in lane]
        traffic = LaneTraffic(lane, [4] * 3, PLACEMENT, US_PER_MB, NOVELTY)
        found = best_shape(gains, 60.0, 4.0, traffic)
        rates = exhaustive(gains, 60.0, 4.0, lambda shape, lane=lane: brute_traffic(lane, shape))
        assert rates[found.lengths] == pytest.approx(found.rate)
        losses.append(1 - found.rate / max(rates.values()))
    assert max(losses) < 0.02
    assert np.mean(losses) < 0.002


def test_ties():
    """Equal candidates: the first request grows. Equal rates: the longest shape is returned."""
    found = best_shape([[0.5], [0.5]], 1024.0, 768.0, ConstantTraffic(2))
    assert found.lengths == (0, 0)
    # 2 tokens in 4 us; 2.5 in 5 us; 3 in 6 us: all the same.
    found = best_shape([[0.5], [0.5]], 4.0, 1.0, ConstantTraffic(2))
    assert Fraction(found.tokens) / Fraction(found.time_us) == Fraction(1, 2)
    assert found.lengths == (1, 1)
    # One draft pays, two do not: the first request has it.
    assert best_shape([[0.5], [0.5]], 4.0, 0.9, ConstantTraffic(2)).lengths == (1, 1)
    assert best_shape([[0.75, 0.1], [0.75, 0.1]], 4.0, 1.4, ConstantTraffic(2)).lengths == (1, 1)


def test_first_request_wins_ties():
    class Rising(ConstantTraffic):
        """The first draft is free, all others dear."""

        def add(self, request):
            super().add(request)
            self.next_us = [1000.0] * len(self.next_us)

    assert best_shape([[0.5], [0.5]], 10.0, 1.0, Rising(2)).lengths == (1, 0)


def test_search_goes_through_losses():
    """A dear draft hides a cheap one behind it; the full shape is visited all the same."""

    class DearFirst(ConstantTraffic):
        def add(self, request):
            super().add(request)
            self.next_us = [0.0]

    traffic = DearFirst(1)
    traffic.next_us = [9.0]
    # Rates: 1/8 = 0.125, 2/17 = 0.118, 3/17 = 0.176.
    assert best_shape([[1.0, 1.0]], 8.0, 0.0, traffic).lengths == (2,)


@pytest.mark.parametrize("requests", [1, 2, 8, 16])
def test_certain_drafts_are_always_verified(requests):
    """A draft costs no more than an anchor, and a round has a cost of its own."""
    gains = [[1.0] * 5 for _ in range(requests)]
    base = 8000.0 + 500.0 * requests
    assert best_shape(gains, base, 500.0, ConstantTraffic(requests)).lengths == (5,) * requests


def test_no_classes_no_traffic():
    assert no_traffic(2).total_us == 0.0
