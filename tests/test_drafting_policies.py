"""The policies behind their interface: invariants, warm-up, regimes, copies, options."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41jax.drafting import (
    Placement,
    RequestDraft,
    RequestOutcome,
    RoundOutcome,
    expert_groups,
    local_layers,
    make_policy,
    push_routes,
    remote_layers,
)
from ds41jax.drafting.logits import sigmoid

PLACEMENT = Placement((local_layers((1, 2), 2_000_000), remote_layers((3, 4), 1_000_000)), 24, 3)
MAKERS = {
    "fixed": lambda: make_policy("fixed", limit=5),
    "threshold": lambda: make_policy("threshold", limit=7, threshold=0.5),
    "threshold by position": lambda: make_policy("threshold", mode="position"),
    "suffix": lambda: make_policy("suffix", limit=5),
    "balance": lambda: make_policy("balance"),
    "balance placed": lambda: make_policy("balance", limit=7, placement=PLACEMENT),
    "balance wide": lambda: make_policy("balance", limit=7, select_width=True),
    "balance probing": lambda: make_policy("balance", probe_rounds=8),
}
LOGITS = st.floats(allow_nan=True, allow_infinity=True)


def routes_of(rng, tokens):
    return rng.random((tokens, 5, 24)).argsort(2)[:, :, :3]


@st.composite
def lanes(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    lane = []
    for request_id in range(draw(st.integers(0, 16))):
        available = draw(st.integers(0, 7))
        logits = tuple(draw(st.lists(LOGITS, min_size=7, max_size=7)))
        tokens = draw(st.sampled_from([None, 0, 3, 24]))
        routes = None if tokens is None else routes_of(rng, tokens)
        lane.append(RequestDraft(request_id, available, logits, routes))
    return lane


def outcome_of(lane, lengths, rng, placed, shared=False):
    """A round in which drafts are as good as their confidence, on a machine with simple costs."""
    requests = []
    for draft, length in zip(lane, lengths, strict=True):
        wrong = np.flatnonzero(rng.random(length) > [sigmoid(z) for z in draft.logits(length)])
        accepted = int(wrong[0]) if len(wrong) else length
        rows = routes_of(rng, 1 + length)
        requests.append(RequestOutcome(draft, length, accepted, routes=rows if placed else None))
    rows = sum(1 + k for k in lengths)
    layer_us, groups = None, None
    if placed:
        groups = expert_groups(np.concatenate([r.routes for r in requests]), 24)
        layer_us = tuple(300.0 + 5 * rows + 3.0 * g for g in groups)
    total = 5000.0 + 400 * rows + 100 * len(lane) + sum(layer_us or ())
    return RoundOutcome(
        tuple(requests), total, shared, layer_us, groups, width=5, draft_us=900.0 + 30 * len(lane)
    )


def random_lane(rng, requests=3, available=5):
    return [
        RequestDraft(n, available, tuple(rng.normal(1, 2, 7)), routes_of(rng, 24))
        for n in range(requests)
    ]


def train(policy, rounds, seed=0, placed=True, shared=False, requests=3):
    rng = np.random.default_rng(seed)
    choices = []
    for _ in range(rounds):
        lane = random_lane(rng, requests)
        lengths = policy.choose(lane, shared=shared)
        policy.observe(outcome_of(lane, lengths, rng, placed, shared))
        choices.append(lengths)
    return choices


@pytest.fixture(scope="module")
def trained():
    policies = {name: make() for name, make in MAKERS.items()}
    for policy in policies.values():
        train(policy, 100)
    return policies


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40, deadline=None)
@given(lane=lanes(), shared=st.booleans())
def test_choices_are_possible_repeatable_and_change_nothing(trained, name, lane, shared):
    policy = trained[name]
    before = policy.dump_state()
    lengths = policy.choose(lane, shared=shared)
    assert len(lengths) == len(lane)
    for request, length in zip(lane, lengths, strict=True):
        assert 0 <= length <= min(request.available, policy.limit)
    assert policy.choose(lane, shared=shared) == lengths
    assert 1 <= policy.choose_width(lane, shared=shared) <= policy.limit
    assert json.dumps(policy.dump_state()) == json.dumps(before)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=20, deadline=None)
@given(lane=lanes(), seed=st.integers(0, 2**16), placed=st.booleans())
def test_any_round_can_be_observed(name, lane, seed, placed):
    policy = MAKERS[name]()
    rng = np.random.default_rng(seed)
    for _ in range(15):
        lengths = policy.choose(lane)
        policy.observe(outcome_of(lane, lengths, rng, placed and bool(lane)))
    for request in lane:
        policy.forget(request.request_id)
    stats = json.loads(json.dumps(policy.stats(), allow_nan=False))
    assert stats["rounds"] == 15
    assert stats["request_rounds"] == 15 * len(lane)
    assert sum(stats["draft_rows_histogram"]) == stats["request_rounds"]
    assert stats["verified_drafts"] == sum(
        k * n for k, n in enumerate(stats["draft_rows_histogram"])
    )


@pytest.mark.parametrize("name", MAKERS)
def test_copies_and_replays_decide_alike(name):
    policy = MAKERS[name]()
    train(policy, 40)
    twin, loaded, again = policy.copy(), MAKERS[name](), MAKERS[name]()
    loaded.load_state(json.loads(json.dumps(policy.dump_state())))
    train(again, 40)
    kept = policy.dump_state()
    choices = train(twin, 40, seed=1)
    assert policy.dump_state() == kept, "a copy learns apart"
    for other in (policy, loaded, again):
        assert train(other, 40, seed=1) == choices
        assert other.dump_state() == twin.dump_state()


@pytest.mark.parametrize("placed", [True, False])
def test_everything_is_verified_until_warm(placed):
    policy = make_policy("balance", placement=PLACEMENT if placed else None)
    choices = train(policy, 100, placed=placed)
    # 120 samples of a class with two layers take 60 rounds; without classes 12 rounds do.
    warm = 60 if placed else 12
    assert all(lengths == [5, 5, 5] for lengths in choices[:warm])
    assert any(lengths != [5, 5, 5] for lengths in choices[warm:])
    stats = policy.stats()
    assert stats["solo"]["warm"] and stats["selected_rounds"] == 100 - warm
    assert not stats["shared"]["warm"]
    assert stats["prediction"]["mean_abs_relative_error"] < 0.02


def test_untimed_layers_never_warm_the_policy():
    policy = make_policy("balance", placement=PLACEMENT)
    assert all(lengths == [5, 5, 5] for lengths in train(policy, 50, placed=False))
    assert not policy.stats()["solo"]["warm"]


def test_a_cold_regime_borrows_the_warm_one():
    policy = make_policy("balance")
    train(policy, 60, placed=False)
    bias = dict(policy.stats()["time_bias_us"])
    rng = np.random.default_rng(5)
    lane = random_lane(rng)
    assert policy.choose(lane, shared=True) == policy.choose(lane)
    policy.observe(outcome_of(lane, [1, 1, 1], rng, False, shared=True))
    assert policy.stats()["time_bias_us"] == bias
    assert policy.stats()["shared"]["round"]["samples"] == 1


def test_fitted_costs_are_reported():
    policy = make_policy("balance", placement=PLACEMENT)
    for seed in range(60):
        train(policy, 6, seed=seed, requests=1 + seed % 8)
    stats = policy.stats()["solo"]
    for row, megabytes in zip(stats["layers"], (2.0, 1.0), strict=True):
        fitted = (row["intercept_us"], row["us_per_row"], row["us_per_mb"])
        assert fitted == pytest.approx((300, 5, 3 / megabytes), rel=0.1)
        assert row["effective_gb_per_s"] == pytest.approx(1000 / row["us_per_mb"])
    assert stats["round"]["us_per_row"] == pytest.approx(400, rel=0.05)


def test_likely_drafts_of_any_request_come_first():
    policy = make_policy("balance")
    train(policy, 60, placed=False)
    sure, doubtful = (9.0,) * 5, (-9.0,) * 5
    lane = [RequestDraft(0, 5, doubtful), RequestDraft(1, 5, sure), RequestDraft(2, 5, doubtful)]
    assert policy.choose(lane) == [0, 5, 0]


def test_cut_rounds_teach_no_rejection():
    policy = make_policy("balance")
    draft = RequestDraft(0, 5, (2.0,) * 5)
    policy.observe(RoundOutcome((RequestOutcome(draft, 5, 2, cut=True),), 1000.0))
    policy.observe(RoundOutcome((RequestOutcome(draft, 5, 2),), 1000.0))
    rows = policy.stats()["confidence_reliability"]
    assert [r["reached"] for r in rows] == [2, 2, 1, 0, 0, 0, 0]
    assert rows[2]["accept_rate"] == 0.0


def test_untimed_rounds_teach_acceptance_only():
    policy = make_policy("balance")
    draft = RequestDraft(0, 5, (2.0,) * 5)
    policy.observe(RoundOutcome((RequestOutcome(draft, 5, 5),)))
    stats = policy.stats()
    assert stats["solo"]["round"]["samples"] == 0
    assert stats["confidence_reliability"][4]["logit_offset"] > 0


def test_a_locked_position_is_probed():
    """A calibration that went wrong early stays wrong as published, and heals with probes."""
    published, probing = make_policy("balance"), make_policy("balance", probe_rounds=8)
    for policy in (published, probing):
        train(policy, 20, placed=False)
        policy.state.calibration[3].slope, policy.state.calibration[3].offset = 0.0, -4.0
        rng = np.random.default_rng(2)
        for _ in range(300):
            lane = [RequestDraft(0, 5, tuple(rng.normal(3, 1, 5)))]
            lengths = policy.choose(lane)
            request = RequestOutcome(lane[0], lengths[0], lengths[0])
            policy.observe(RoundOutcome((request,), 5000.0 + 400 * (1 + lengths[0])))
    assert published.choose(lane)[0] == 3
    assert probing.choose(lane)[0] == 5


def test_suffix_removal():
    policy = make_policy("suffix", limit=5, costs_us=(20_000.0, 800.0, 600.0))
    lane = [RequestDraft(0, 5, (9.0,) * 5), RequestDraft(1, 5, (9.0, 9.0, -9.0, 9.0, 9.0))]
    assert policy.choose(lane) == [5, 2]
    assert policy.time_us(2, 7) == 20_000 + 800 * 9 + 600 * (12 + 17.5)


def test_thresholds():
    lane = [RequestDraft(0, 4, (2.2, 0.85, 0.85, 2.2))]  # 0.9, 0.7, 0.7, 0.9
    assert make_policy("threshold", threshold=0.5).choose(lane) == [2]
    assert make_policy("threshold", threshold=0.5, mode="position").choose(lane) == [4]
    assert make_policy("threshold", threshold=0.0).choose(lane) == [4]
    assert make_policy("threshold", threshold=1.0).choose(lane) == [0]


def wide_round(policy, rng, late_rate, draft_extra_us):
    """One request; positions 6 and 7 are accepted at `late_rate`, the others nearly always."""
    width = policy.choose_width([RequestDraft(0, 7)])
    draft = RequestDraft(0, width, (4.0,) * width)
    length = policy.choose([draft])[0]
    right = [rng.random() < (0.98 if n < 5 else late_rate) for n in range(length)]
    accepted = right.index(False) if False in right else length
    draft_us = 900.0 + (draft_extra_us if width == 7 else 0.0)
    outcome = RoundOutcome(
        (RequestOutcome(draft, length, accepted),),
        5000.0 + 300 * (1 + length) + draft_us,
        width=width,
        draft_us=draft_us,
    )
    policy.observe(outcome)
    return width


@pytest.mark.parametrize(
    ("late_rate", "extra_us", "wide"), [(0.98, 100.0, True), (0.05, 900.0, False)]
)
def test_width_follows_what_late_drafts_bring(late_rate, extra_us, wide):
    policy = make_policy("balance", limit=7, select_width=True)
    rng = np.random.default_rng(3)
    widths = [wide_round(policy, rng, late_rate, extra_us) for _ in range(400)]
    assert widths[:12] == [5, 7] * 6, "the warm-up alternates"
    late = widths[200:]
    assert (late.count(7) > 190) if wide else (late.count(5) > 190)
    assert {5, 7} == set(late), "the other width is tried every 64 rounds"
    drafted_us = policy.state.solo.draft_us(1, wide)
    assert drafted_us == pytest.approx(900 + extra_us * wide, rel=0.05)
    policy.forget(0)
    assert policy.state.width.requests == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("best", {}, "draft policy 'best': expected one of fixed, threshold, suffix, balance"),
        ("fixed", {"limit": 0}, "draft limit 0"),
        ("fixed", {"limit": 8}, "draft limit 8"),
        ("fixed", {"threshold": 0.5}, "no option 'threshold'; it takes limit"),
        ("threshold", {"threshold": 1.5}, "threshold 1.5"),
        ("threshold", {"mode": "sum"}, "threshold mode 'sum'"),
        ("suffix", {"costs_us": (0.0, 1.0, 1.0)}, "suffix costs"),
        ("balance", {"select_width": True}, "width selection needs draft limit 7"),
        ("balance", {"probe_rounds": -1}, "probe_rounds -1"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, **options)


def test_bad_rounds_are_named():
    with pytest.raises(ValueError, match="9 drafts"):
        RequestDraft(0, 9)
    with pytest.raises(ValueError, match="2 confidence logits for 3 drafts"):
        RequestDraft(0, 3, (0.0, 0.0))
    with pytest.raises(ValueError, match="3 accepted of 2"):
        RequestOutcome(RequestDraft(0, 3), 2, 3)
    with pytest.raises(ValueError, match="layer_groups"):
        RoundOutcome((), 1.0, layer_us=(1.0,))
    with pytest.raises(ValueError, match="nan microseconds"):
        RoundOutcome((), float("nan"))
    with pytest.raises(ValueError, match="17 requests"):
        make_policy("fixed").choose([RequestDraft(n, 1) for n in range(17)])
    with pytest.raises(ValueError, match="draft first"):
        make_policy("threshold").choose([RequestDraft(0, 3)])
    outcome = RoundOutcome((), 1.0, layer_us=(1.0,), layer_groups=(1,))
    with pytest.raises(ValueError, match="1 entries"):
        make_policy("balance", placement=PLACEMENT).observe(outcome)
    undrafted = RoundOutcome((), 1.0, width=5)
    with pytest.raises(ValueError, match="draft_us"):
        make_policy("balance", limit=7, select_width=True).observe(undrafted)
    with pytest.raises(ValueError, match="two classes"):
        Placement((local_layers((1, 2), 1), remote_layers((2,), 1)))


def test_foreign_states_are_refused():
    policy = make_policy("balance")
    with pytest.raises(ValueError, match="expected the fields"):
        policy.load_state(make_policy("fixed").dump_state())
    state = policy.dump_state()
    state["selected_rounds"] = "many"
    with pytest.raises(ValueError, match="expected <class 'int'>"):
        policy.load_state(state)


def test_histories_feed_the_forecast():
    """The same lane costs less where its rows share experts."""
    policy = make_policy("balance", placement=PLACEMENT)
    train(policy, 80)
    rng = np.random.default_rng(9)
    same = np.repeat(routes_of(rng, 1), 24, axis=0)
    alike = [RequestDraft(0, 5, (1.0,) * 5, push_routes(None, same, 24))]
    varied = [RequestDraft(0, 5, (1.0,) * 5, routes_of(rng, 24))]
    assert policy.predict_us(alike, [5]) < policy.predict_us(varied, [5])
    assert policy.predict_us(alike, [0]) == pytest.approx(policy.predict_us(varied, [0]))
