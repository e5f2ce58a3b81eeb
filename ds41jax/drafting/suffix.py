"""The older joint search: from all drafts, drop the last ones that do not pay (dSpark, older
policies)."""

from collections.abc import Sequence

from ds41jax.drafting.logits import running_products, sigmoid
from ds41jax.drafting.policy import MAX_DRAFTS, Policy, PolicyState, RequestDraft

LEGACY_COSTS_US = (19_864.0, 803.0, 636.0)
ANCHOR_EXPERTS, DRAFT_EXPERTS = 6.0, 2.5


class SuffixPolicy(Policy):
    """Removes, from the full shape, the suffix row whose removal improves tokens per time most,
    until none does.

    Time in microseconds is c0 + c1 rows + c2 unique experts, from a table made beforehand; unique
    experts are those a layer reads, taken as `ANCHOR_EXPERTS` a request and `DRAFT_EXPERTS` a
    draft. Acceptances are the drafter's confidences as they are.
    """

    name = "suffix"

    def __init__(
        self,
        limit: int = MAX_DRAFTS,
        costs_us: tuple[float, float, float] = LEGACY_COSTS_US,
    ):
        super().__init__(limit, PolicyState())
        if len(costs_us) != 3 or costs_us[0] <= 0 or min(costs_us) < 0:
            raise ValueError(f"suffix costs {costs_us}: expected (c0 > 0, c1 >= 0, c2 >= 0)")
        self.base_us, self.row_us, self.expert_us = costs_us

    def time_us(self, requests: int, drafts: int) -> float:
        """Predicted time of a round."""
        experts = ANCHOR_EXPERTS * requests + DRAFT_EXPERTS * drafts
        return self.base_us + self.row_us * (requests + drafts) + self.expert_us * experts

    def _choose(self, lane: Sequence[RequestDraft], shared: bool) -> list[int]:
        gains = [
            running_products(map(sigmoid, r.logits(min(r.available, self.limit)))) for r in lane
        ]
        lengths = [len(g) for g in gains]
        tokens = len(lane) + sum(map(sum, gains))
        drafts = sum(lengths)
        while drafts:
            # All rows cost the same here, so the best removal is the least likely last draft.
            last = {r: gains[r][k - 1] for r, k in enumerate(lengths) if k}
            worst = min(last, key=lambda r: last[r])
            shorter = (tokens - last[worst]) / self.time_us(len(lane), drafts - 1)
            if shorter <= tokens / self.time_us(len(lane), drafts):
                break
            tokens -= last[worst]
            lengths[worst] -= 1
            drafts -= 1
        return lengths
