"""Which snapshots to give up: the least value for what their going really frees.

A page is freed when its last reference goes. So a snapshot whose pages others hold frees nothing by
itself, and a set of snapshots may free together what none frees alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds41jax.cache.radix import Entry


@dataclass(frozen=True, eq=False)
class Candidate:
    """A snapshot that may go: its worth in tokens, and the pages that it holds, each once."""

    entry: Entry
    value: float
    pages: np.ndarray


def reclaimable(references: np.ndarray, holdings: Iterable[np.ndarray]) -> np.ndarray:
    """[pages] bool: pages that nobody holds but the owners of `holdings`, who all could let go."""
    held = np.zeros_like(references)
    for pages in holdings:
        held[pages] += 1
    return (held > 0) & (held == references)


def choose_for_pages(
    candidates: Sequence[Candidate], references: np.ndarray, need: int
) -> list[Candidate] | None:
    """Candidates whose going frees at least `need` pages; None if all of them would not do.

    Greedy by value per page, a page shared by n references counting as 1/n; then whoever turned out
    to be unnecessary stays, the most valuable first.
    """
    can_go = reclaimable(references, (c.pages for c in candidates))
    if int(can_go.sum()) < need:
        return None
    left = references.copy()
    useful = [c for c in candidates if can_go[c.pages].any()]
    victims: list[Candidate] = []
    freed = 0
    while freed < need:
        victim = min(useful, key=lambda c: _value_per_page(c, left, can_go))
        useful.remove(victim)
        victims.append(victim)
        left[victim.pages] -= 1
        freed += int((left[victim.pages] == 0).sum())
    for victim in sorted(victims, key=lambda c: -c.value):
        lost = int((left[victim.pages] == 0).sum())
        if freed - lost >= need:
            left[victim.pages] += 1
            freed -= lost
            victims.remove(victim)
    return victims


def _value_per_page(candidate: Candidate, left: np.ndarray, can_go: np.ndarray) -> float:
    pages = candidate.pages[can_go[candidate.pages]]
    return candidate.value / float((1 / left[pages]).sum())


def least_valuable(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one to give up when a place is needed, whatever its size; the oldest among equals."""
    return min(candidates, key=lambda c: (c.value, c.entry.last_used), default=None)


def bank_bytes(
    candidates: Sequence[Candidate], slot_bytes: int, page_bytes: int, pool_size: int
) -> int:
    """Bytes of some snapshots: a slot each, and every page that any of them holds once."""
    held = np.zeros(pool_size, bool)
    for c in candidates:
        held[c.pages] = True
    return len(candidates) * slot_bytes + int(held.sum()) * page_bytes
