"""Whether the drafter should make 5 or 7 drafts (dSpark policy, width selection).

The width is chosen before drafting, so acceptances must be guessed: inside the trained block from a
short average of the request's calibrated confidences, beyond it, where confidence misleads, from
what the request and all requests had accepted there lately.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds41jax.drafting.policy import RequestId, RequestOutcome

NARROW, WIDE = 5, 7  # the trained block, and the extended one
RETRY_ROUNDS = 64  # a width unused for so long is tried again
CONFIDENCE_MEMORY = 0.8
COUNT_MEMORY = 0.98
PRIOR_COUNT = 2.0
FIRST_GUESS = 0.8


@dataclass
class PositionCounts:
    """Decayed counts at the positions beyond the trained block."""

    reached: list[float] = field(default_factory=lambda: [0.0] * (WIDE - NARROW))
    accepted: list[float] = field(default_factory=lambda: [0.0] * (WIDE - NARROW))

    def add(self, outcome: RequestOutcome) -> None:
        for n in range(WIDE - NARROW):
            self.reached[n] = COUNT_MEMORY * self.reached[n] + (outcome.reached > NARROW + n)
            self.accepted[n] = COUNT_MEMORY * self.accepted[n] + (outcome.accepted > NARROW + n)

    def rates(self, prior: Sequence[float]) -> list[float]:
        """Acceptance at each position, shrunk to `prior`."""
        counts = zip(self.accepted, self.reached, prior, strict=True)
        return [(a + PRIOR_COUNT * p) / (r + PRIOR_COUNT) for a, r, p in counts]


@dataclass
class AcceptanceMemory:
    """Recent acceptance of one request, or of all."""

    confidence: list[float] = field(default_factory=lambda: [FIRST_GUESS] * NARROW)
    beyond: PositionCounts = field(default_factory=PositionCounts)

    def add(self, outcome: RequestOutcome, calibrated: Sequence[float]) -> None:
        for n, value in enumerate(calibrated[:NARROW]):
            self.confidence[n] += (1 - CONFIDENCE_MEMORY) * (value - self.confidence[n])
        self.beyond.add(outcome)


@dataclass
class WidthState:
    """What width selection remembers.

    Attributes:
      idle: per width, narrow first, the drafted rounds since it was used.
    """

    overall: AcceptanceMemory = field(default_factory=AcceptanceMemory)
    requests: dict[RequestId, AcceptanceMemory] = field(default_factory=dict)
    idle: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, outcome: RequestOutcome, calibrated: Sequence[float]) -> None:
        """Learns from a request's round; `calibrated` are the acceptances of its whole block."""
        request_id = outcome.draft.request_id
        if request_id not in self.requests:
            self.requests[request_id] = AcceptanceMemory(list(self.overall.confidence))
        self.requests[request_id].add(outcome, calibrated)
        self.overall.add(outcome, calibrated)

    def used(self, width: int) -> None:
        """Counts a drafted round."""
        narrow, wide = self.idle
        self.idle = [0, wide + 1] if width == NARROW else [narrow + 1, 0]

    def due(self, warm: bool) -> int | None:
        """The width that must be tried now: the other one each round until warm, then one that was
        not used for long; None if free to choose."""
        longest = WIDE if self.idle[1] > self.idle[0] else NARROW
        return longest if not warm or max(self.idle) >= RETRY_ROUNDS else None

    def guess(self, request_id: RequestId) -> list[float]:
        """Conditional acceptances expected of a request's positions 1 to 7."""
        memory = self.requests.get(request_id, self.overall)
        return [*memory.confidence, *self.beyond(request_id)]

    def beyond(self, request_id: RequestId) -> list[float]:
        """Conditional acceptances expected of positions 6 and 7."""
        rates = self.overall.beyond.rates([FIRST_GUESS] * (WIDE - NARROW))
        memory = self.requests.get(request_id)
        return rates if memory is None else memory.beyond.rates(rates)
