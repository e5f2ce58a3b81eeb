"""A linear fit of times that follows change and shrugs off stalls (dSpark policy, estimator).

Recursive least squares with exponential forgetting, Huber weights, a weak prior and non-negative
coefficients. Pure Python: at three or four coefficients numpy's call overhead costs more than the
arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

ROBUST_AFTER = 8  # samples before residuals are weighted and clipped
HUBER_SCALES = 3.0
CLIP_SCALES = 6.0
SCALE_MEMORY = 0.97
MIN_SCALE = 1e-3


@dataclass
class RobustFit:
    """y ~ x . theta with d non-negative coefficients, times in microseconds.

    Attributes:
      prior, strength: [d] theta before any sample and how firmly it is held, in squared units of x.
      forgetting: weight of the past per new sample.
      theta: [d]; gram: [d, d] weighted sum of x xT; moment: [d] weighted sum of y x.
      scale: running mean of the absolute residual.
    """

    prior: list[float]
    strength: list[float]
    forgetting: float
    theta: list[float] = field(default_factory=list)
    gram: list[list[float]] = field(default_factory=list)
    moment: list[float] = field(default_factory=list)
    scale: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        size = len(self.prior)
        self.theta = self.theta or list(self.prior)
        self.gram = self.gram or [[0.0] * size for _ in range(size)]
        self.moment = self.moment or [0.0] * size

    def predict(self, x: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(x, self.theta, strict=True))

    def update(self, x: Sequence[float], y: float) -> None:
        """Takes in one sample."""
        residual = abs(y - self.predict(x))
        weight = 1.0
        if self.samples >= ROBUST_AFTER and residual > HUBER_SCALES * self.scale:
            weight = HUBER_SCALES * self.scale / residual
        self._track_scale(residual)
        self.samples += 1
        keep, moment = self.forgetting, self.moment
        for i, row in enumerate(self.gram):
            weighted = weight * x[i]
            moment[i] = keep * moment[i] + weighted * y
            for j, other in enumerate(x):
                row[j] = keep * row[j] + weighted * other
        self.theta = self._solve()

    def _track_scale(self, residual: float) -> None:
        if self.samples == 0:
            self.scale = max(residual, 1.0)
            return
        if self.samples >= ROBUST_AFTER:
            residual = min(residual, CLIP_SCALES * self.scale)
        self.scale = max(SCALE_MEMORY * self.scale + (1 - SCALE_MEMORY) * residual, MIN_SCALE)

    def _solve(self) -> list[float]:
        """Solves (gram + diag(strength)) theta = moment + strength * prior; while a coefficient is
        negative, the first such one is fixed at zero and the others are solved again."""
        strength = self.strength
        matrix = [list(row) for row in self.gram]
        for i, held in enumerate(strength):
            matrix[i][i] += held
        right = [m + s * p for m, s, p in zip(self.moment, strength, self.prior, strict=True)]
        free = list(range(len(right)))
        theta = solve(matrix, right)
        while min(theta) < 0.0:
            free.remove(next(i for i, value in enumerate(theta) if value < 0.0))
            part = solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
            theta = [0.0] * len(right)
            for i, value in zip(free, part, strict=True):
                theta[i] = value
        return theta


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solves a small positive definite system; needs no pivots."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        pivot = rows[i]
        for j in range(i + 1, size):
            row = rows[j]
            factor = row[i] / pivot[i]
            if factor:
                for k in range(i + 1, size + 1):
                    row[k] -= factor * pivot[k]
    result = [0.0] * size
    for i in reversed(range(size)):
        row = rows[i]
        total = row[size]
        for k in range(i + 1, size):
            total -= row[k] * result[k]
        result[i] = total / row[i]
    return result
