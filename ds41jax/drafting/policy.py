"""The interface of verification-length policies: what they see, decide and learn from.

A round drafts a block for each request of a lane, asks the policy how many drafts to verify, runs
the target on the anchors and those drafts, and tells the policy what happened. A policy's whole
knowledge is its `state`, a dataclass of plain values: `choose` and `choose_width` only read it,
`observe` and `forget` alone change it. So the engine and the simulator run the same code, and equal
observations give equal decisions. Nothing here knows devices, tokens or grammar.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from ds41jax.drafting.counters import Counters
from ds41jax.drafting.plain import from_plain, to_plain

MAX_DRAFTS = 7
MAX_REQUESTS = 16

RequestId = int


@dataclass(frozen=True)
class RequestDraft:
    """What is known of one request before its verification.

    Attributes:
      request_id: stays the same through the request's life.
      available: drafts that may be verified, after grammar and budget; 0 to 7.
      confidence_logits: per draft position, the logit of its acceptance given that all before it
        were accepted, as the drafter's head says it. Empty before drafting; else at least
        `available` long.
      routes: [tokens, layers, experts per token] expert ids of the last committed tokens, newest
        first (see `traffic.push_routes`), or None if unknown.
    """

    request_id: RequestId
    available: int
    confidence_logits: tuple[float, ...] = ()
    routes: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.available <= MAX_DRAFTS:
            raise ValueError(
                f"request {self.request_id}: {self.available} drafts, allowed are 0 to {MAX_DRAFTS}"
            )
        if self.confidence_logits and len(self.confidence_logits) < self.available:
            raise ValueError(
                f"request {self.request_id}: {len(self.confidence_logits)} confidence logits "
                f"for {self.available} drafts"
            )

    def logits(self, count: int) -> tuple[float, ...]:
        """The confidence logits of the first `count` drafts."""
        if len(self.confidence_logits) < count:
            raise ValueError(f"request {self.request_id}: no confidence logits; draft first")
        return self.confidence_logits[:count]


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request in a round.

    Attributes:
      draft: as it was given to `choose`.
      length: drafts verified.
      accepted: drafts accepted; the anchor and these are committed.
      cut: the accept loop ended (budget, stop) before it compared the next draft, so that position
        was neither accepted nor rejected.
      routes: [1 + length, layers, experts per token] expert ids of the verified rows, or None.
    """

    draft: RequestDraft
    length: int
    accepted: int
    cut: bool = False
    routes: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.length <= self.draft.available:
            raise ValueError(
                f"request {self.draft.request_id}: {self.accepted} accepted of {self.length} "
                f"verified of {self.draft.available} available drafts"
            )

    @property
    def reached(self) -> int:
        """Positions whose draft was compared with the target's token."""
        return min(self.length, self.accepted + (0 if self.cut else 1))


@dataclass(frozen=True)
class RoundOutcome:
    """What a round took and gave.

    Attributes:
      requests: in the order of the lane that `choose` saw.
      total_us: wall time of the whole round, draft included; None if it says nothing (a round that
        compiled, or was not timed): then no time is learnt from it.
      shared: another lane ran at the same time.
      layer_us: per layer, wall time from the previous layer's FFN completion to its own; an entry
        is None where the layer was not timed. None if no layer is.
      layer_groups: per layer, groups of up to 16 rows over all experts (see
        `traffic.expert_groups`): what `layer_us` read from memory. Needed where `layer_us` is.
      width: drafts per block that the drafter made; 0 if it did not run.
      draft_us: wall time of the drafter alone, if measured.
    """

    requests: tuple[RequestOutcome, ...]
    total_us: float | None = None
    shared: bool = False
    layer_us: tuple[float | None, ...] | None = None
    layer_groups: tuple[int, ...] | None = None
    width: int = 0
    draft_us: float | None = None

    def __post_init__(self) -> None:
        if self.layer_us is not None and (
            self.layer_groups is None or len(self.layer_groups) != len(self.layer_us)
        ):
            raise ValueError("layer_us needs layer_groups of the same length")
        for us in (self.total_us, self.draft_us, *(self.layer_us or ())):
            if us is not None and not 0 <= us < math.inf:
                raise ValueError(f"a time of {us} microseconds: pass None where nothing was timed")

    @property
    def rows(self) -> int:
        """Rows of the target pass: anchors and verified drafts."""
        return sum(1 + r.length for r in self.requests)


@dataclass
class PolicyState:
    """What a policy knows, as plain values; policies that learn add fields."""

    counters: Counters = field(default_factory=Counters)


class Policy(ABC):
    """Decides how many drafts of each request to verify.

    Attributes:
      limit: most drafts of a request that it ever verifies.
      state: everything that it learnt.
    """

    name: ClassVar[str]

    def __init__(self, limit: int, state: PolicyState):
        if not 1 <= limit <= MAX_DRAFTS:
            raise ValueError(f"draft limit {limit}: expected 1 to {MAX_DRAFTS}")
        self.limit = limit
        self.state = state

    def choose_width(self, lane: Sequence[RequestDraft], *, shared: bool = False) -> int:
        """How many drafts the drafter should make; `available` of `lane` is what a request may use
        at most, its confidence logits are not known yet."""
        return self.limit

    def choose(self, lane: Sequence[RequestDraft], *, shared: bool = False) -> list[int]:
        """How many drafts to verify: per request, 0 to its available ones.

        Args:
          lane: at most 16 requests.
          shared: another lane runs at the same time.
        """
        if len(lane) > MAX_REQUESTS:
            raise ValueError(f"{len(lane)} requests in a lane, at most {MAX_REQUESTS}")
        return self._choose(lane, shared) if lane else []

    @abstractmethod
    def _choose(self, lane: Sequence[RequestDraft], shared: bool) -> list[int]: ...

    def observe(self, outcome: RoundOutcome) -> None:
        """Learns from a finished round."""
        self.state.counters.add(outcome)

    def forget(self, request_id: RequestId) -> None:
        """Drops what is kept for a request that has ended."""
        return None

    def stats(self) -> dict[str, Any]:
        """The policy block of the statistics, as plain values."""
        return {
            "mode": self.name,
            "draft_limit": self.limit,
            **self.state.counters.stats(),
        }

    def copy(self) -> Self:
        """A policy with the same knowledge that learns apart from this one."""
        twin = copy.copy(self)
        twin.state = copy.deepcopy(self.state)
        return twin

    def dump_state(self) -> dict[str, Any]:
        """The state as JSON values, for `load_state` of a policy made with the same options."""
        plain: dict[str, Any] = to_plain(self.state)
        return plain

    def load_state(self, plain: Mapping[str, Any]) -> None:
        """Takes over a dumped state.

        Raises:
          ValueError: if it is not the state of such a policy.
        """
        self.state = from_plain(type(self.state), plain)
