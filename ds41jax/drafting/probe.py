"""A way out of a wrong belief: a position that is never verified never corrects its calibration.

[Ours] The published policy explores through its warm-up and forgetting alone. Neither moves a
position's calibration once it says that the position does not pay, since only verified drafts are
learnt from. A probe verifies such a position once in a while.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds41jax.drafting.policy import MAX_DRAFTS, RoundOutcome


@dataclass
class ProbeState:
    """Per draft position, rounds in which it was available and not verified, since it last was."""

    declined: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)

    def add(self, outcome: RoundOutcome) -> None:
        available = max((r.draft.available for r in outcome.requests), default=0)
        verified = max((r.length for r in outcome.requests), default=0)
        self.declined[:verified] = [0] * verified
        for position in range(verified, available):
            self.declined[position] += 1

    def extend(
        self, lengths: Sequence[int], gains: Sequence[Sequence[float]], after: int
    ) -> list[int]:
        """Lengths that reach the furthest position declined for `after` rounds, if there is one,
        in the request most likely to get there.

        Args:
          gains: per request and available draft, the expected tokens that it adds.
        """
        extended = list(lengths)
        for position in reversed(range(MAX_DRAFTS)):
            able = [r for r, g in enumerate(gains) if len(g) > position]
            if able and self.declined[position] >= after:
                chosen = max(able, key=lambda r: gains[r][position])
                extended[chosen] = max(extended[chosen], position + 1)
                break
        return extended
