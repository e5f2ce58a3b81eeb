"""Made-up text for the simulator: how often drafts are accepted, and how experts recur."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ds41jax.drafting.logits import MAX_LOGIT
from ds41jax.drafting.policy import MAX_DRAFTS

TRAINED_BLOCK = 5
QUADRATURE = 41


@dataclass(frozen=True)
class Content:
    """A kind of text.

    Attributes:
      name: for tables.
      rates: mean conditional acceptance per draft position; the last one goes on.
      spread: standard deviation of a draft's true acceptance logit; 0 makes all drafts alike.
      noise: standard deviation of what the confidence head misjudges, in logits.
      gain, offset: the head's logit is gain * (true + noise) + offset; over-confident by default.
    """

    name: str
    rates: tuple[float, ...]
    spread: float = 3.0
    noise: float = 0.5
    gain: float = 1.2
    offset: float = 0.4

    def __post_init__(self) -> None:
        if not self.rates or not all(0 < rate < 1 for rate in self.rates):
            raise ValueError(f"content {self.name}: rates {self.rates}, expected within 0 and 1")

    @cached_property
    def centres(self) -> tuple[float, ...]:
        """Per position 1 to 7, the mean logit that gives the position's rate."""
        rates = [self.rates[min(n, len(self.rates) - 1)] for n in range(MAX_DRAFTS)]
        return tuple(_centre(rate, self.spread) for rate in rates)

    def draft(
        self, rng: np.random.Generator, count: int
    ) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """One block: the head's logits, and whether each draft is right if all before it are."""
        true = np.asarray(self.centres[:count]) + self.spread * rng.standard_normal(count)
        heard = self.gain * (true + self.noise * rng.standard_normal(count)) + self.offset
        right = rng.random(count) < _sigmoid(true)
        return tuple(np.clip(heard, -MAX_LOGIT, MAX_LOGIT).tolist()), tuple(right.tolist())


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))


def _centre(rate: float, spread: float) -> float:
    """The m for which the mean of sigmoid(m + spread * normal) is `rate`, by bisection."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE)
    weights = weights / weights.sum()
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(weights @ _sigmoid(middle + spread * nodes)) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


PUBLISHED_RATES = {
    "code": 0.960,
    "reasoning": 0.813,
    "math": 0.889,
    "fable": 0.504,
    "hello": 0.576,
    "topic": 0.653,
    "natural JSON": 0.723,
    "schema JSON": 0.858,
    "multilingual": 0.639,
    "counting": 0.993,
}


def published_contents() -> list[Content]:
    """The contents of the published acceptance table (dSpark policy, results).

    Each has one rate at all positions, fitted so that the balance policy emits the published tokens
    a round on one coordinator. What share of its drafts is then accepted follows; only the spread,
    one for all contents, was fitted to that.
    """
    return [Content(name, (rate,)) for name, rate in PUBLISHED_RATES.items()]


@dataclass
class RouteWalk:
    """Expert ids of successive tokens: each keeps most of the experts of the token before.

    Attributes:
      novelty: experts of a token that its predecessor does not have, on average.
    """

    rng: np.random.Generator
    layers: int = 40
    num_experts: int = 384
    experts_per_token: int = 6
    novelty: float = 2.5
    _last: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.layers, self.num_experts)
        self._last = self.rng.random(shape).argsort(1)[:, : self.experts_per_token]

    def step(self, count: int) -> np.ndarray:
        """[count, layers, experts per token] of the next tokens; see `commit`."""
        rows, row = [], self._last
        for _ in range(count):
            row = self._successor(row)
            rows.append(row)
        return np.stack(rows)

    def commit(self, row: np.ndarray) -> None:
        """The text goes on after a token with these experts [layers, experts per token]."""
        self._last = row

    def _successor(self, row: np.ndarray) -> np.ndarray:
        changed = self.rng.random(row.shape) < self.novelty / self.experts_per_token
        result = row.copy()
        while changed.any():
            result[changed] = self.rng.integers(self.num_experts, size=int(changed.sum()))
            same = result[:, :, None] == result[:, None, :]
            changed &= same.sum(2) > 1
        return result
