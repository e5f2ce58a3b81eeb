"""Verifies drafts while the drafter's own confidence holds."""

from collections.abc import Sequence

from ds41jax.drafting.logits import sigmoid
from ds41jax.drafting.policy import MAX_DRAFTS, Policy, PolicyState, RequestDraft

MODES = ("product", "position")


class ThresholdPolicy(Policy):
    """Stops at the first draft whose confidence is below a threshold.

    Knows no costs and no other requests. In mode "product" the confidence of a draft is the chance
    that it and all before it are accepted; in mode "position" it is that of the draft alone.
    """

    name = "threshold"

    def __init__(self, limit: int = MAX_DRAFTS, threshold: float = 0.4, mode: str = "product"):
        super().__init__(limit, PolicyState())
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold {threshold}: expected a probability")
        if mode not in MODES:
            raise ValueError(f"threshold mode {mode!r}: expected one of {', '.join(MODES)}")
        self.threshold = threshold
        self.mode = mode

    def _choose(self, lane: Sequence[RequestDraft], shared: bool) -> list[int]:
        return [self._length(request) for request in lane]

    def _length(self, request: RequestDraft) -> int:
        count = min(request.available, self.limit)
        product = 1.0
        for position, logit in enumerate(request.logits(count)):
            confidence = sigmoid(logit)
            product *= confidence
            if (product if self.mode == "product" else confidence) < self.threshold:
                return position
        return count
