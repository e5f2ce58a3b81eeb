"""Platt scaling of the drafter's confidence, learnt online (dSpark policy, confidence
calibration)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ds41jax.drafting.logits import MAX_LOGIT, clamp_logit, sigmoid

MEMORY = 0.998
MIN_CURVATURE = 0.02
MIN_INFORMATION = 1e-3
MIN_DETERMINANT = 1e-12
MAX_SLOPE, MAX_OFFSET = 3.0, 8.0
MAX_SLOPE_STEP, MAX_OFFSET_STEP = 1.0, 2.0


@dataclass
class PlattScale:
    """Acceptance = sigmoid(slope * logit + offset), for one draft position.

    The slope never leaves [0, 3]: a surer draft is never taken for a worse one.

    Attributes:
      information: upper triangle (slope slope, slope offset, offset offset) of the decayed sum of
        curvatures; its inverse is the step size of a Newton step per outcome.
    """

    slope: float = 1.0
    offset: float = 0.0
    information: list[float] = field(default_factory=lambda: [2.0, 0.0, 2.0])

    def acceptance(self, logit: float) -> float:
        """Calibrated probability of acceptance given that all earlier drafts were accepted."""
        return sigmoid(self.slope * clamp_logit(logit) + self.offset)

    def update(self, logit: float, accepted: bool) -> None:
        """Learns from a draft that was reached."""
        x = clamp_logit(logit)
        p = sigmoid(self.slope * x + self.offset)
        curvature = max(p * (1 - p), MIN_CURVATURE)
        aa, ab, bb = self.information
        aa = max(MEMORY * aa + curvature * x * x, MIN_INFORMATION)
        ab = MEMORY * ab + curvature * x
        bb = max(MEMORY * bb + curvature, MIN_INFORMATION)
        self.information = [aa, ab, bb]
        determinant = aa * bb - ab * ab
        if determinant <= MIN_DETERMINANT:
            return
        error = accepted - p
        slope_step = error * (bb * x - ab) / determinant
        offset_step = error * (aa - ab * x) / determinant
        self.slope = _clamp(self.slope + _clamp(slope_step, MAX_SLOPE_STEP), MAX_SLOPE, 0.0)
        self.offset = _clamp(self.offset + _clamp(offset_step, MAX_OFFSET_STEP), MAX_OFFSET)


def _clamp(value: float, high: float, low: float | None = None) -> float:
    return max(-high if low is None else low, min(high, value))


def acceptances(scales: Sequence[PlattScale], logits: Sequence[float]) -> list[float]:
    """Calibrated conditional acceptances of a draft, position by position."""
    return [scale.acceptance(logit) for scale, logit in zip(scales, logits, strict=False)]


def lane_acceptances(
    scales: Sequence[PlattScale], logits: Sequence[tuple[float, ...]]
) -> np.ndarray:
    """`acceptances` of many drafts at once: [drafts, longest] float64, shorter ones padded."""
    width = max(map(len, logits))
    padded = np.array([own + (0.0,) * (width - len(own)) for own in logits])
    padded = padded.reshape(len(logits), width)
    x = np.clip(np.nan_to_num(padded, nan=-MAX_LOGIT), -MAX_LOGIT, MAX_LOGIT)
    slope = np.array([scale.slope for scale in scales[:width]])
    z = slope * x + [scale.offset for scale in scales[:width]]
    believed: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(z, -MAX_LOGIT, MAX_LOGIT)))
    return believed
