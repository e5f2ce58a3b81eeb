"""What a round costs, fitted while it runs (dSpark policy, time model).

With N rows, R requests and, per class of layers, L layers and M megabytes of experts:

    T = A + B N + C R + sum over classes of [L (alpha + beta N) + gamma M] + bias   (microseconds)

Where no layer is timed there are no classes, and T = A + B N + C R + bias is fitted to whole
rounds: expert traffic is then part of B, the same for a row that shares its experts with others as
for one that does not, and no bandwidth is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ds41jax.drafting.estimator import RobustFit
from ds41jax.drafting.placement import LayerClass, Placement
from ds41jax.drafting.policy import RoundOutcome

PRIOR_SAMPLES = 0.01  # a stronger prior would bias bandwidth along the near-null rows/bytes line
USUAL_ROWS = 6.0
ROUND_PRIOR = (8000.0, 300.0, 200.0)
DRAFT_PRIOR = (2800.0, 100.0, 400.0, 50.0)
LAYER_FORGETTING, ROUND_FORGETTING = 0.998, 0.98
WARM_ROUNDS, WARM_LAYER_SAMPLES = 12, 120
BIAS_STEP, BIAS_CLIP = 0.02, 0.5


@dataclass
class TimeModel:
    """The fits of one regime: a lane alone, or beside another.

    Attributes:
      layers: per class of layers, over (1, rows, megabytes) of a layer.
      round: over (1, rows, requests), what the layers leave of a round.
      draft: over (1, requests, wide, wide requests), the drafter.
      bias_us: running correction of the predicted round.
    """

    layers: list[RobustFit]
    round: RobustFit
    draft: RobustFit
    bias_us: float = 0.0

    @property
    def warm(self) -> bool:
        """Whether enough was seen to trust the fits."""
        return self.round.samples >= WARM_ROUNDS and all(
            fit.samples >= WARM_LAYER_SAMPLES for fit in self.layers
        )

    @property
    def us_per_mb(self) -> list[float]:
        return [fit.theta[2] for fit in self.layers]

    def base_us(self, requests: int, placement: Placement) -> float:
        """A round of anchors only, without expert traffic."""
        base, per_row, per_request = self.round.theta
        total = base + per_row * requests + per_request * requests + self.bias_us
        for fit, c in zip(self.layers, placement.classes, strict=True):
            total += len(c.layers) * (fit.theta[0] + fit.theta[1] * requests)
        return max(total, 1.0)

    def row_us(self, placement: Placement) -> float:
        """One more row, without expert traffic."""
        return self.round.theta[1] + sum(
            len(c.layers) * fit.theta[1]
            for fit, c in zip(self.layers, placement.classes, strict=True)
        )

    def draft_us(self, requests: int, wide: bool) -> float:
        """The drafter, narrow or wide."""
        return self.draft.predict(_draft_row(requests, wide))

    def observe(self, outcome: RoundOutcome, placement: Placement, apart_us: float = 0.0) -> None:
        """Learns from the timed layers and, if all were timed, from the rest of the round.

        Args:
          apart_us: part of the round that is fitted apart from it.
        """
        layers_us: float | None = 0.0
        for fit, c in zip(self.layers, placement.classes, strict=True):
            spent = _observe_layers(fit, c, outcome)
            layers_us = None if spent is None or layers_us is None else layers_us + spent
        if outcome.total_us is not None and layers_us is not None:
            rest = max(outcome.total_us - layers_us - apart_us, 0.0)
            self.round.update((1.0, float(outcome.rows), float(len(outcome.requests))), rest)

    def observe_draft(self, requests: int, wide: bool, draft_us: float) -> None:
        self.draft.update(_draft_row(requests, wide), draft_us)

    def correct(self, observed_us: float, predicted_us: float) -> None:
        """Moves the bias towards what predictions, which contain it, keep missing."""
        clip = BIAS_CLIP * abs(predicted_us)
        self.bias_us += BIAS_STEP * max(-clip, min(clip, observed_us - predicted_us))

    def stats(self, placement: Placement) -> dict[str, Any]:
        names = ("intercept_us", "us_per_row", "us_per_mb")
        return {
            "warm": self.warm,
            "layers": [
                {
                    "class": c.name,
                    **_fit_stats(fit, names),
                    "effective_gb_per_s": 1000.0 / fit.theta[2] if fit.theta[2] > 0 else None,
                }
                for fit, c in zip(self.layers, placement.classes, strict=True)
            ],
            "round": _fit_stats(self.round, ("intercept_us", "us_per_row", "us_per_request")),
            "draft": _fit_stats(
                self.draft,
                ("intercept_us", "us_per_request", "wide_us", "wide_us_per_request"),
            ),
        }


def new_time_model(
    placement: Placement, round_prior: tuple[float, float, float] = ROUND_PRIOR
) -> TimeModel:
    """A model that knows the priors alone."""
    n0 = PRIOR_SAMPLES
    layers = [
        RobustFit(list(c.prior), [n0, n0 * USUAL_ROWS**2, n0 * c.usual_mb**2], LAYER_FORGETTING)
        for c in placement.classes
    ]
    round_fit = RobustFit(list(round_prior), [n0, n0 * USUAL_ROWS**2, n0], ROUND_FORGETTING)
    return TimeModel(layers, round_fit, RobustFit(list(DRAFT_PRIOR), [n0] * 4, ROUND_FORGETTING))


def _observe_layers(fit: RobustFit, c: LayerClass, outcome: RoundOutcome) -> float | None:
    """Feeds a class's timed layers; returns their time together, None if one was not timed."""
    if outcome.layer_us is None or outcome.layer_groups is None:
        return None
    total, complete = 0.0, True
    rows = float(outcome.rows)
    for layer in c.layers:
        us = outcome.layer_us[layer]
        if us is None:
            complete = False
            continue
        total += us
        fit.update((1.0, rows, outcome.layer_groups[layer] * c.expert_bytes / 1e6), us)
    return total if complete else None


def _draft_row(requests: int, wide: bool) -> tuple[float, float, float, float]:
    return 1.0, float(requests), float(wide), float(wide * requests)


def _fit_stats(fit: RobustFit, names: Sequence[str]) -> dict[str, Any]:
    return {
        **dict(zip(names, fit.theta, strict=True)),
        "samples": fit.samples,
        "residual_scale_us": fit.scale,
    }


@dataclass
class PredictionStats:
    """How far predicted round times were from measured ones."""

    rounds: int = 0
    error_us: float = field(default=0.0)
    absolute_relative_error: float = field(default=0.0)

    def add(self, observed_us: float, predicted_us: float) -> None:
        self.rounds += 1
        self.error_us += observed_us - predicted_us
        self.absolute_relative_error += abs(observed_us - predicted_us) / observed_us

    def stats(self) -> dict[str, Any]:
        count = self.rounds
        return {
            "rounds": count,
            "mean_error_us": self.error_us / count if count else None,
            "mean_abs_relative_error": self.absolute_relative_error / count if count else None,
        }
