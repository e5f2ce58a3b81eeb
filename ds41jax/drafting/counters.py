"""Counts that every policy keeps, for its statistics (dSpark policy, statistics block)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds41jax.drafting.logits import sigmoid

if TYPE_CHECKING:
    from ds41jax.drafting.policy import RoundOutcome

POSITIONS = 7


@dataclass
class Counters:
    """Totals since the policy was made. Lists by position hold seven entries, position 1 first.

    Drafts that the policy declined to verify count neither as accepted nor as rejected.
    """

    rounds: int = 0
    request_rounds: int = 0
    verified_rows: int = 0
    verified_drafts: int = 0
    accepted_drafts: int = 0
    draft_rows_histogram: list[int] = field(default_factory=lambda: [0] * (POSITIONS + 1))
    width_rounds: dict[int, int] = field(default_factory=dict)
    reached: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    accepted: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    raw_confidence: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)

    def add(self, outcome: "RoundOutcome") -> None:
        """Counts a round."""
        self.rounds += 1
        self.request_rounds += len(outcome.requests)
        self.verified_rows += outcome.rows
        if outcome.width:
            self.width_rounds[outcome.width] = self.width_rounds.get(outcome.width, 0) + 1
        for request in outcome.requests:
            self.verified_drafts += request.length
            self.accepted_drafts += request.accepted
            self.draft_rows_histogram[request.length] += 1
            logits = request.draft.confidence_logits
            for position in range(request.reached):
                self.reached[position] += 1
                self.accepted[position] += position < request.accepted
                if logits:
                    self.raw_confidence[position] += sigmoid(logits[position])

    def stats(self) -> dict[str, Any]:
        """Totals and, per position, how the head's confidence compares with acceptance."""
        return {
            "rounds": self.rounds,
            "request_rounds": self.request_rounds,
            "verified_rows": self.verified_rows,
            "verified_drafts": self.verified_drafts,
            "accepted_drafts": self.accepted_drafts,
            "draft_rows_histogram": list(self.draft_rows_histogram),
            "width_rounds": dict(self.width_rounds),
            "confidence_reliability": [self._reliability(n) for n in range(POSITIONS)],
        }

    def _reliability(self, position: int) -> dict[str, Any]:
        reached = self.reached[position]
        return {
            "position": position + 1,
            "reached": reached,
            "mean_raw_confidence": self.raw_confidence[position] / reached if reached else None,
            "accept_rate": self.accepted[position] / reached if reached else None,
        }
