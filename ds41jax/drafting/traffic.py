"""How many bytes of experts a verification will read (dSpark policy, traffic forecast).

Tokens near each other use many experts in common. So the rows of a round are priced as if they
routed like the request's last committed tokens, at four alignments, and an expert costs its bytes
once per 16 rows of the whole lane.
"""

from collections.abc import Sequence

import numpy as np

from ds41jax.drafting.placement import GROUP_ROWS, Placement
from ds41jax.drafting.policy import RequestDraft

HISTORY_TOKENS = 24
WINDOWS = 4
LOOK_BACK = 3  # tokens whose experts count as known
NOVELTY_START = 2.5
NOVELTY_MEMORY = 0.995


def push_routes(history: np.ndarray | None, rows: np.ndarray, committed: int) -> np.ndarray:
    """The history after `committed` of a round's rows [rows, layers, experts per token] joined it:
    newest first, at most `HISTORY_TOKENS` long."""
    newest = rows[:committed][::-1]
    joined = newest if history is None else np.concatenate([newest, history])
    return joined[:HISTORY_TOKENS]


def expert_groups(rows: np.ndarray, num_experts: int) -> tuple[int, ...]:
    """Per layer, the groups of up to 16 rows over all experts that a pass reads.

    Args:
      rows: [rows, layers, experts per token] expert ids of all rows of the lane.
    """
    layers = rows.shape[1]
    cells = rows + (np.arange(layers) * num_experts)[:, None]
    counts = np.bincount(cells.ravel(), minlength=layers * num_experts)
    groups = -(-counts // GROUP_ROWS)
    return tuple(int(n) for n in groups.reshape(layers, num_experts).sum(1))


def update_novelty(novelty: list[float], history: np.ndarray | None, committed: np.ndarray) -> None:
    """Follows, per layer, how many experts of a token are none of its previous three tokens'.

    Args:
      novelty: per layer of the model; changed in place.
      history: routes before the round, newest first; committed: [n, layers, experts per token]
        routes of the round's committed rows, oldest first.
    """
    before = committed[:0] if history is None else history[:LOOK_BACK][::-1]
    tokens = np.concatenate([before, committed])
    average = np.asarray(novelty)
    for at in range(max(len(before), LOOK_BACK), len(tokens)):
        known = tokens[at - LOOK_BACK : at, : len(novelty)]  # [3, layers, k]
        fresh = tokens[at, : len(novelty)]
        is_known = (fresh[None, :, :, None] == known[:, :, None, :]).any((0, 3))
        average = NOVELTY_MEMORY * average + (1 - NOVELTY_MEMORY) * (~is_known).sum(1)
    novelty[:] = average.tolist()


class LaneTraffic:
    """Time that reading experts takes in a shape of the lane, as drafts are added to it.

    Starts with the anchors alone. Bytes are priced at once in microseconds, at each layer's class.

    Attributes:
      total_us: of the shape so far.
      next_us: per request, what its next draft would add; 0 where it has none left.
    """

    def __init__(
        self,
        lane: Sequence[RequestDraft],
        lengths: Sequence[int],
        placement: Placement,
        us_per_mb: Sequence[float],
        novelty: Sequence[float],
    ):
        """
        Args:
          lengths: per request, the most drafts that will be added.
          us_per_mb: per class of the placement.
          novelty: per layer of the model, new experts of a further row.
        """
        self._layers = placement.layers
        group_us = [
            us * c.expert_bytes / 1e6
            for us, c in zip(us_per_mb, placement.classes, strict=True)
            for _ in c.layers
        ]
        anchor_us = placement.experts_per_token * sum(group_us)
        draft_us = sum(us * novelty[n] for us, n in zip(group_us, self._layers, strict=True))
        self._lengths = list(lengths)
        self._rows = [0] * len(lane)
        self._unknown = [
            _unknown_us(r.routes, 1 + k, anchor_us, draft_us)
            for r, k in zip(lane, lengths, strict=True)
        ]
        self._count_windows(lane, group_us, placement)
        self.total_us = 0.0
        self.next_us = [0.0] * len(lane)
        for request in range(len(lane)):
            self.total_us += self._price(request)
            self._take(request)
        self._refresh()

    def add(self, request: int) -> None:
        """Adds the next draft of a request to the shape."""
        self.total_us += self.next_us[request]
        self._take(request)
        self._refresh()

    def _count_windows(
        self, lane: Sequence[RequestDraft], group_us: Sequence[float], placement: Placement
    ) -> None:
        """Lays out one counter per window, layer and expert; the last one stands for no expert.

        Counters are bytes, and a row's cells are found when it is next: small arrays stay in the
        allocator's hands, where large ones would be mapped afresh for every decision.
        """
        layers, experts = len(self._layers), placement.num_experts
        self._known = any(r.routes is not None and len(r.routes) for r in lane) and layers > 0
        if not self._known:
            return
        width = placement.experts_per_token
        self._counts = np.zeros(WINDOWS * layers * experts + 1, np.uint8)
        self._cell_us = np.tile(np.repeat(np.asarray(group_us) / WINDOWS, width), WINDOWS)
        self._starts = np.arange(WINDOWS * layers).reshape(WINDOWS, layers, 1) * experts
        self._tokens = [
            self._padded(r.routes, k, width) for r, k in zip(lane, self._lengths, strict=True)
        ]
        self._next_cells = np.stack([self._cells(request, 0) for request in range(len(lane))])
        self._counts[-1] = 1  # no expert is never a new group

    def _padded(self, routes: np.ndarray | None, length: int, width: int) -> np.ndarray:
        """The timed layers of as much history as the windows need; -1 where there is none."""
        tokens = np.full((length + WINDOWS, len(self._layers), width), -1)
        if routes is not None:
            known = routes[: len(tokens), self._layers]
            tokens[: len(known)] = known
        return tokens

    def _cells(self, request: int, row: int) -> np.ndarray:
        """[windows * layers * experts per token] counters that a row touches."""
        tokens = self._tokens[request][row : row + WINDOWS]
        cells = np.where(tokens < 0, len(self._counts) - 1, tokens + self._starts)
        return cells.ravel()

    def _routed_us(self, cells: np.ndarray) -> np.ndarray:
        """Microseconds of the groups that rows with these cells would open; sums the last axis."""
        priced: np.ndarray = (self._counts.take(cells) % GROUP_ROWS == 0) @ self._cell_us
        return priced

    def _price(self, request: int) -> float:
        """Microseconds of a request's next row given the counts so far."""
        cost = self._unknown[request][self._rows[request]]
        if self._known:
            cost += float(self._routed_us(self._next_cells[request]))
        return cost

    def _take(self, request: int) -> None:
        """Counts a request's next row."""
        row = self._rows[request]
        self._rows[request] += 1
        if not self._known:
            return
        cells = self._next_cells[request]
        self._counts[cells] = self._counts[cells] + 1
        self._counts[-1] = 1
        if row < self._lengths[request]:
            self._next_cells[request] = self._cells(request, row + 1)

    def _refresh(self) -> None:
        """Prices the next draft of every request."""
        routed = self._routed_us(self._next_cells).tolist() if self._known else None
        for request, row in enumerate(self._rows):
            if row > self._lengths[request]:
                self.next_us[request] = 0.0
                continue
            self.next_us[request] = self._unknown[request][row] + (
                routed[request] if routed else 0.0
            )


def _unknown_us(
    routes: np.ndarray | None, rows: int, anchor_us: float, draft_us: float
) -> list[float]:
    """Per row, the price of the windows that reach past the history: an anchor reads its experts,
    a draft the novel ones."""
    known = 0 if routes is None else len(routes)
    missing = [sum(w + row >= known for w in range(WINDOWS)) / WINDOWS for row in range(rows)]
    return [m * (draft_us if row else anchor_us) for row, m in enumerate(missing)]
