"""The online fits of the draft policies: times and confidence."""

import math

import numpy as np
import pytest

from ds41jax.drafting.calibration import PlattScale, acceptances, lane_acceptances
from ds41jax.drafting.estimator import RobustFit, solve
from ds41jax.drafting.logits import MAX_LOGIT, clamp_logit, sigmoid
from ds41jax.drafting.placement import NVFP4_SCALE_BYTES, Placement, expert_bytes, remote_layers
from ds41jax.drafting.policy import RequestDraft, RequestOutcome, RoundOutcome
from ds41jax.drafting.time_model import new_time_model

TRUTH = (420.0, 9.0, 4.7)  # microseconds per layer, row and megabyte


def layer_fit():
    return new_time_model(Placement((remote_layers((1,), 4_700_160),))).layers[0]


def feed(fit, truth, samples, rng, noise=0.02, stall=0.0):
    for _ in range(samples):
        rows = float(rng.integers(1, 49))
        x = (1.0, rows, 10 + 6 * rows + 80 * rng.random())
        y = float(np.dot(x, truth)) * (1 + noise * rng.standard_normal())
        fit.update(x, y + (50_000.0 if rng.random() < stall else 0.0))


def test_solve_small_systems():
    rng = np.random.default_rng(0)
    for size in (1, 3, 4):
        half = rng.standard_normal((size, size + 2))
        matrix, right = half @ half.T, rng.standard_normal(size)
        assert solve(matrix.tolist(), right.tolist()) == pytest.approx(
            np.linalg.solve(matrix, right)
        )


def test_synthetic_truth_is_recovered():
    fit = layer_fit()
    feed(fit, TRUTH, 2000, np.random.default_rng(1))
    assert fit.theta == pytest.approx(TRUTH, rel=0.04)
    assert 1000 / fit.theta[2] == pytest.approx(1000 / TRUTH[2], rel=0.03)


def test_first_samples_follow_the_published_arithmetic():
    fit = RobustFit([10.0, 2.0], [0.5, 0.5], 0.9)
    fit.update((1.0, 3.0), 20.0)
    assert fit.scale == 4.0  # |20 - 16|
    gram, moment = np.array([[1.0, 3.0], [3.0, 9.0]]), np.array([20.0, 60.0])
    first = np.linalg.solve(gram + 0.5 * np.eye(2), moment + 0.5 * np.array([10.0, 2.0]))
    assert fit.theta == pytest.approx(first)
    residual = abs(30.0 - first @ [1.0, 4.0])
    fit.update((1.0, 4.0), 30.0)
    assert fit.scale == pytest.approx(0.97 * 4.0 + 0.03 * residual)
    assert fit.moment == pytest.approx([0.9 * 20 + 30, 0.9 * 60 + 120])


def test_bandwidth_change_is_tracked():
    """A link that slows by half is known within 5 % in less than 500 rounds of 19 layers."""
    rng, fit = np.random.default_rng(2), layer_fit()
    feed(fit, TRUTH, 19 * 300, rng)
    slow = (*TRUTH[:2], 2 * TRUTH[2])
    rounds = 0
    while abs(fit.theta[2] / slow[2] - 1) > 0.05 and rounds < 500:
        feed(fit, slow, 19, rng)
        rounds += 1
    assert rounds < 500


def test_stalls_do_not_move_theta():
    fit = layer_fit()
    rng = np.random.default_rng(3)
    feed(fit, TRUTH, 1000, rng)
    feed(fit, TRUTH, 1000, rng, stall=0.01)
    assert fit.theta == pytest.approx(TRUTH, rel=0.06)


def test_coefficients_are_never_negative():
    fit = layer_fit()
    feed(fit, (1000.0, -20.0, 1.0), 500, np.random.default_rng(4))
    assert min(fit.theta) == 0.0
    assert fit.theta[1] == 0.0


def test_round_residual_needs_every_layer():
    placement = Placement((remote_layers((1, 2), 4_700_160),))
    model = new_time_model(placement)
    request = RequestOutcome(RequestDraft(0, 0), 0, 0)
    partly = RoundOutcome((request,), 1000.0, layer_us=(50.0, 60.0, None), layer_groups=(6, 6, 6))
    model.observe(partly, placement)
    assert (model.layers[0].samples, model.round.samples) == (1, 0)
    fully = RoundOutcome((request,), 1000.0, layer_us=(50.0, 60.0, 70.0), layer_groups=(6, 6, 6))
    model.observe(fully, placement)
    assert (model.layers[0].samples, model.round.samples) == (3, 1)
    assert model.round.moment[0] == pytest.approx(870.0)


def test_bias_integrates_what_predictions_miss():
    model = new_time_model(Placement())
    model.correct(1030.0, 1000.0)
    assert model.bias_us == pytest.approx(0.6)
    model.correct(1e9, 1000.0)
    assert model.bias_us == pytest.approx(0.6 + 0.02 * 500)


@pytest.mark.parametrize(
    ("shards", "scale_bytes", "expected"),
    [
        (1, 1 / 32, 18_800_640),
        (2, 1 / 32, 9_400_320),
        (4, 1 / 32, 4_700_160),
        (4, NVFP4_SCALE_BYTES, 4_976_640),
    ],
)
def test_expert_bytes(shards, scale_bytes, expected):
    assert expert_bytes(shards=shards, scale_bytes=scale_bytes) == expected


@pytest.mark.parametrize("seed", range(5))
def test_calibration_unlearns_over_confidence(seed):
    """Says 0.99, is right in 80 %: a few hundred outcomes bring it to 0.80."""
    rng, scale = np.random.default_rng(seed), PlattScale()
    trail = []
    for _ in range(500):
        raw = math.log(99) + 0.3 * rng.standard_normal()
        scale.update(raw, bool(rng.random() < 0.8))
        trail.append(scale.acceptance(math.log(99)))
        assert scale.slope >= 0
    assert np.mean(trail[300:]) == pytest.approx(0.8, abs=0.06)


def test_calibration_never_inverts():
    """Where confidence misleads, it is ignored, not turned round."""
    rng, scale = np.random.default_rng(7), PlattScale()
    for _ in range(2000):
        raw = 2 * rng.standard_normal()
        scale.update(raw, bool(rng.random() < sigmoid(-raw)))
        assert scale.acceptance(-3.0) <= scale.acceptance(3.0)
    assert scale.slope < 0.1


def test_a_lane_is_calibrated_as_its_drafts_are():
    rng = np.random.default_rng(3)
    scales = [PlattScale(rng.uniform(0, 3), rng.uniform(-8, 8)) for _ in range(7)]
    logits = [tuple(rng.normal(0, 9, n).tolist()) for n in (5, 0, 3, 1)]
    logits.append((math.nan, math.inf, -math.inf))
    found = lane_acceptances(scales, logits)
    assert found.shape == (5, 5)
    for row, own in zip(found, logits, strict=True):
        np.testing.assert_allclose(row[: len(own)], acceptances(scales, own), rtol=1e-12)
    assert lane_acceptances(scales, [(), ()]).shape == (2, 0)


def test_calibration_learns_a_known_scale():
    rng, scale = np.random.default_rng(8), PlattScale()
    for _ in range(3000):
        raw = 2 * rng.standard_normal()
        scale.update(raw, bool(rng.random() < sigmoid(0.6 * raw - 0.5)))
    assert (scale.slope, scale.offset) == pytest.approx((0.6, -0.5), abs=0.3)


def test_logits_are_clamped():
    assert clamp_logit(math.nan) == -MAX_LOGIT
    assert sigmoid(math.inf) == pytest.approx(1 - 1e-6)
    assert sigmoid(-math.inf) == pytest.approx(1e-6)
