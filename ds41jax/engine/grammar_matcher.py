"""Which tokens may come next: a compiled grammar, and a position in it.

Masks are rows of int32 words, bit `i % 32` of word `i // 32` for token i; a set bit allows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ds41jax.engine.grammar_schema import ConstraintError


def mask_words(vocab_size: int) -> int:
    """Words of a mask row."""
    return -(-vocab_size // 32)


def row_of(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """A mask row [words] that allows exactly these tokens."""
    bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def without(rows: np.ndarray, ids: Sequence[int]) -> None:
    """Forbids tokens in mask rows [n, words], but for rows that allow nothing else."""
    bits = ~row_of(ids, rows.shape[1] * 32)
    kept = rows & bits
    rows[:] = np.where(kept.any(axis=1, keepdims=True), kept, rows)


@dataclass(frozen=True)
class CompiledConstraint:
    """A grammar over a vocabulary, shared by all requests that ask for it.

    Attributes:
      grammar: xgrammar's compiled grammar.
      vocab_size: width of the logits.
      stop_token_ids: allowed once the output matches; the grammar accepts nothing after one.
      think_end_id: the grammar begins after this token; None if it begins at once.
      thinking_forbidden: tokens that may not come before it.
    """

    grammar: Any
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    think_end_id: int | None = None
    thinking_forbidden: frozenset[int] = frozenset()

    @cached_property
    def thinking_row(self) -> np.ndarray:
        """The mask before the grammar begins."""
        return ~row_of(sorted(self.thinking_forbidden), self.vocab_size)

    @cached_property
    def stop_row(self) -> np.ndarray:
        """The mask after its end."""
        return row_of(self.stop_token_ids, self.vocab_size)

    def matcher(self) -> "Matcher":
        """A matcher at the beginning of the output."""
        # Imported where it is needed: xgrammar is optional.
        from ds41jax.engine.xgrammar_import import import_xgrammar

        inner = import_xgrammar().GrammarMatcher(self.grammar)
        return Matcher(self, inner, thinking=self.think_end_id is not None)


class Matcher:
    """A position in a constraint. Not thread-safe; forks are independent of each other.

    While the model thinks every token is allowed but those that would end the output or open a tool
    call unchecked. The closing token starts the grammar, which sees every token after it, also when
    several are accepted in one round.

    Attributes:
      thinking: the grammar has not begun.
    """

    def __init__(self, compiled: CompiledConstraint, inner: Any, *, thinking: bool, free: int = 0):
        self._compiled = compiled
        self._inner = inner
        self.thinking = thinking
        self._free = free  # accepted before the grammar began, the closing token included
        self._matched = 0  # accepted by the grammar

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the output."""
        return self._compiled.stop_token_ids

    @property
    def words(self) -> int:
        """Words of a mask row."""
        return mask_words(self._compiled.vocab_size)

    @property
    def complete(self) -> bool:
        """The output matches as it is; more may still be allowed."""
        return not self.thinking and bool(self._inner.is_completed())

    @property
    def finished(self) -> bool:
        """A stop token has been accepted: the output is complete and nothing may follow."""
        return not self.thinking and bool(self._inner.is_terminated())

    def accept(self, token: int) -> bool:
        """Advances by one token; False, and no change, if it is not allowed here."""
        if not 0 <= token < self._compiled.vocab_size:
            return False
        if self.thinking:
            if token in self._compiled.thinking_forbidden:
                return False
            self.thinking = token != self._compiled.think_end_id
            self._free += 1
            return True
        if self.finished or not self._inner.accept_token(token):
            return False
        self._matched += 1
        return True

    def rollback(self, n: int) -> None:
        """Takes back the last `n` accepted tokens."""
        if not 0 <= n <= self._free + self._matched:
            raise ValueError(f"cannot take back {n} of {self._free + self._matched} tokens")
        matched = min(n, self._matched)
        if matched:
            self._inner.rollback(matched)
        self._matched -= matched
        if n > matched:
            self._free -= n - matched
            self.thinking = True

    def fork(self) -> "Matcher":
        """An independent matcher at the same position."""
        forked = Matcher(
            self._compiled, self._inner.fork(), thinking=self.thinking, free=self._free
        )
        forked._matched = self._matched
        return forked

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes the mask of the next token into `row` [words], int32 and contiguous.

        Raises:
          ConstraintError: if no token is allowed.
        """
        if row.shape != (self.words,) or row.dtype != np.int32:
            raise ValueError(f"a mask row is int32 [{self.words}], got {row.dtype} {row.shape}")
        if self.thinking:
            row[:] = self._compiled.thinking_row
        elif self.finished:
            row[:] = self._compiled.stop_row
        elif not self._inner.fill_next_token_bitmask(row[None]):
            row[:] = -1
        elif not row.any():
            raise ConstraintError("the constraint allows no token here")


def masks_for_draft(matcher: Matcher, draft_ids: Sequence[int]) -> tuple[int, np.ndarray]:
    """How many drafts may be verified, and the masks of their rows.

    A draft is kept while the grammar allows it at its place. The walk ends at the first one that is
    not, and before a stop token: the row before it can choose that itself. It does not end where
    the output could, which for free text is everywhere.

    Returns:
      kept: drafts to verify.
      masks: int32 [kept + 1, words]; row i applies after i drafts.
    """
    masks = np.empty((len(draft_ids) + 1, matcher.words), np.int32)
    walker = matcher.fork()
    kept = 0
    walker.fill_mask(masks[0])
    for token in draft_ids:
        # The library writes a warning about every special token that it has to reject itself.
        allowed = token // 32 < matcher.words and masks[kept, token // 32] >> (token % 32) & 1
        if not allowed or token in matcher.stop_token_ids or not walker.accept(int(token)):
            break
        kept += 1
        walker.fill_mask(masks[kept])
    return kept, masks[: kept + 1]
