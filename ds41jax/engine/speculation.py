"""Which drafts a round verifies: what the grammar allows and the policy finds worth it."""

import time
from collections.abc import Sequence as Seq

import numpy as np

from ds41jax.drafting.policy import Policy, RequestDraft, RequestOutcome, RoundOutcome
from ds41jax.engine.compile_counter import compilations
from ds41jax.engine.grammar_matcher import masks_for_draft, without
from ds41jax.engine.grammar_schema import ConstraintError
from ds41jax.engine.sequence import Phase, Sequence, SequenceFault


class Speculation:
    """Between the sequences and the drafting policy, round by round.

    Attributes:
      offered: of each sequence in the last round, the drafts that the policy could choose from.
    """

    def __init__(self, policy: Policy, block: int, mask_words: int, eos: int):
        """`block`: drafts of a sequence at most, 0 without a drafter; `eos` ends an output."""
        self.policy, self.block, self._eos = policy, block, eos
        self._free = np.full((1, mask_words), -1, np.int32)
        self.offered: list[list[int]] = []
        self._lane: list[RequestDraft] = []
        self._begun = 0.0
        self._compiled = 0

    def choose(self, running: Seq[Sequence]) -> tuple[list[list[int]], list[np.ndarray] | None]:
        """The drafts to verify of each sequence, and mask rows if any is constrained."""
        self._begun, self._compiled = time.perf_counter(), compilations()
        walks = [self._walk(s) for s in running]
        drafts = self.offered = [own for own, _ in walks]
        if self.block:
            self._lane = [
                RequestDraft(s.number, len(own), s.confidence)
                for s, own in zip(running, drafts, strict=True)
            ]
            lengths = self.policy.choose(self._lane)
            drafts = [own[:k] for own, k in zip(drafts, lengths, strict=True)]
        return drafts, self._joined([rows for _, rows in walks], drafts)

    def masks(self, sequences: Seq[Sequence]) -> list[np.ndarray] | None:
        """Mask rows of sequences that verify nothing."""
        return self._joined([self._masked(s, [])[1] for s in sequences], [[] for _ in sequences])

    def _walk(self, sequence: Sequence) -> tuple[list[int], np.ndarray | None]:
        """Drafts within the budget, cut where the grammar rejects one; and their masks."""
        own = sequence.draft_ids[: max(0, min(self.block, sequence.remaining - 1))]
        return self._masked(sequence, own)

    def _masked(self, sequence: Sequence, drafts: list[int]) -> tuple[list[int], np.ndarray | None]:
        kept, rows = _walk(sequence, drafts)
        early = sequence.request.min_tokens - sequence.emitted
        if early <= 0:
            return kept, rows
        if rows is None:
            rows = np.repeat(self._free, 1 + len(kept), axis=0)
        without(rows[:early], [self._eos, *sequence.request.stop_token_ids])
        return kept, rows

    def _joined(
        self, rows: Seq[np.ndarray | None], drafts: Seq[Seq[int]]
    ) -> list[np.ndarray] | None:
        if all(own is None for own in rows):
            return None
        return [
            np.repeat(self._free, 1 + len(d), axis=0) if own is None else own[: 1 + len(d)]
            for d, own in zip(drafts, rows, strict=True)
        ]

    def observe(self, running: Seq[Sequence], drafts: Seq[Seq[int]], accepted: Seq[int]) -> None:
        """Tells the policy what the round took and gave; a time with compiling in it is none."""
        if not self.block:
            return
        outcomes = tuple(
            RequestOutcome(draft, len(own), taken, cut=s.phase is Phase.DONE)
            for s, draft, own, taken in zip(running, self._lane, drafts, accepted, strict=True)
        )
        micros = None
        if compilations() == self._compiled:
            micros = (time.perf_counter() - self._begun) * 1e6
        self.policy.observe(RoundOutcome(outcomes, micros, width=self.block))


def _walk(sequence: Sequence, drafts: list[int]) -> tuple[list[int], np.ndarray | None]:
    """The drafts that the sequence's constraint allows, and the masks of their rows."""
    if sequence.matcher is None:
        return drafts, None
    try:
        kept, rows = masks_for_draft(sequence.matcher, drafts)
    except ConstraintError as error:
        raise SequenceFault(sequence, "invalid", f"constraint: {error}") from error
    return drafts[:kept], rows
