"""The greedy search for the shape with most tokens per time (dSpark policy, search)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


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


def best_even_shape(gains: Sequence[Sequence[float]], base_us: float, row_us: float) -> Shape:
    """`best_shape` where every row costs the same: the next draft is then always the likeliest.

    So one sort of all drafts replaces the search; gains never rise within a request, which keeps
    its drafts in order. Arguments as there.
    """
    owners = [r for r, own in enumerate(gains) for _ in own]
    flat = np.array([gain for own in gains for gain in own])
    order = np.argsort(-flat, kind="stable")  # the first request on ties
    tokens = len(gains) + np.concatenate([[0.0], np.cumsum(flat[order])])
    times = base_us + row_us * np.arange(len(tokens))
    rates = tokens / times
    added = len(rates) - 1 - int(rates[::-1].argmax())  # the longest on ties
    lengths = [0] * len(gains)
    for place in order[:added].tolist():
        lengths[owners[place]] += 1
    return Shape(tuple(lengths), float(tokens[added]), float(times[added]))


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
