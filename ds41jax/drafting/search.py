"""The greedy search for the shape with most tokens per time (dSpark policy, search)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Traffic(Protocol):
    """What the search needs of `traffic.LaneTraffic`."""

    total_us: float
    next_us: list[float]

    def add(self, request: int) -> None: ...


@dataclass(frozen=True)
class Shape:
    """How many drafts of each request to verify.

    Attributes:
      tokens: expected to be emitted in the round; time_us: predicted for it.
    """

    lengths: tuple[int, ...]
    tokens: float
    time_us: float

    @property
    def rate(self) -> float:
        return self.tokens / self.time_us


def best_shape(
    gains: Sequence[Sequence[float]], base_us: float, row_us: float, traffic: Traffic
) -> Shape:
    """Adds drafts one at a time, each time the one that leaves most tokens per time (the first on
    ties), through losses up to the full shape; returns the best shape on the way (the longest on
    ties).

    Args:
      gains: per request and draft, the expected tokens that it adds, never rising.
      base_us: time of the round with the anchors alone, without traffic.
      row_us: time of one more row, without traffic.
    """
    lengths = [0] * len(gains)
    tokens, time_us = float(len(gains)), base_us + traffic.total_us
    best = Shape(tuple(lengths), tokens, time_us)
    open_requests = [r for r, g in enumerate(gains) if g]
    while open_requests:
        top, chosen = -1.0, -1
        for r in open_requests:
            rate = (tokens + gains[r][lengths[r]]) / (time_us + row_us + traffic.next_us[r])
            if rate > top:
                top, chosen = rate, r
        tokens += gains[chosen][lengths[chosen]]
        time_us += row_us + traffic.next_us[chosen]
        lengths[chosen] += 1
        traffic.add(chosen)
        if lengths[chosen] == len(gains[chosen]):
            open_requests.remove(chosen)
        if tokens / time_us >= best.rate:
            best = Shape(tuple(lengths), tokens, time_us)
    return best
