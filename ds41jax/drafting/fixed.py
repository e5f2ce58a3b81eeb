"""Verifies every draft."""

from collections.abc import Sequence

from ds41jax.drafting.policy import MAX_DRAFTS, Policy, PolicyState, RequestDraft


class FixedPolicy(Policy):
    """Verifies all drafts up to a limit: the control arm."""

    name = "fixed"

    def __init__(self, limit: int = MAX_DRAFTS):
        super().__init__(limit, PolicyState())

    def _choose(self, lane: Sequence[RequestDraft], shared: bool) -> list[int]:
        return [min(request.available, self.limit) for request in lane]
