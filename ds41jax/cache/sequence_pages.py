"""Pages of one sequence, and the transaction that grows them.

A step that writes global rows goes: `reserve` -> copy the shared tails -> write the rows ->
`Reservation.apply`. Applying is the only thing that changes a committed length; dropping returns
every page. Two reservations may be outstanding if their sequences differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ds41jax.cache.pool import PageLayout, PagePool


class ReservationError(RuntimeError):
    """A transaction was used twice, on a foreign or changed sequence, or with a wrong length."""


class PageCopy(NamedTuple):
    """The first `rows` rows of page `source` are wanted in page `target`."""

    source: int
    target: int
    rows: int


class TableChange(NamedTuple):
    """Entry `place` of the page table of KV source `source` becomes `page`."""

    source: int
    place: int
    page: int


class SequencePages:
    """A page table for each KV source, and the committed length that they hold.

    Attributes:
      tables: page numbers of each source; pages past the committed rows may follow, which rejected
        rows took.
      length: committed tokens.
    """

    def __init__(self, pool: PagePool, layout: PageLayout):
        self.pool, self.layout = pool, layout
        self.tables: list[list[int]] = [[] for _ in layout.ratios]
        self.length = 0
        self.closed = False
        self.reserved = False

    @classmethod
    def sharing(
        cls,
        pool: PagePool,
        layout: PageLayout,
        tables: Sequence[Sequence[int]],
        length: int,
    ) -> "SequencePages":
        """A sequence whose first `length` tokens lie in pages that others hold too."""
        self = cls(pool, layout)
        self.tables = [
            list(table[:count]) for table, count in zip(tables, layout.pages(length), strict=True)
        ]
        self.length = length
        pool.retain(self.page_ids())
        return self

    def page_ids(self) -> np.ndarray:
        """All its pages, [n] int64."""
        return np.concatenate([np.zeros(0, np.int64), *map(_ids, self.tables)])

    def prefix(self, length: int) -> tuple[tuple[int, ...], ...]:
        """The pages of each source that hold the first `length` tokens."""
        counts = self.layout.pages(length)
        return tuple(tuple(table[:count]) for table, count in zip(self.tables, counts, strict=True))

    def shared_tails(self, end: int) -> list[tuple[int, int, int]]:
        """(source, table index, valid rows) of partly filled shared pages that growing to `end`
        tokens would append to."""
        tails = []
        for source, ratio in enumerate(self.layout.ratios):
            now = self.length // ratio
            index, valid = divmod(now, self.layout.page_rows)
            if valid and end // ratio > now and not self.pool.writable(self.tables[source][index]):
                tails.append((source, index, valid))
        return tails

    def missing(self, end: int) -> tuple[int, ...]:
        """Pages of each source that holding `end` tokens takes beyond those in the tables."""
        counts = self.layout.pages(end)
        return tuple([max(0, n - len(t)) for n, t in zip(counts, self.tables, strict=True)])

    def write_into(self, rows: np.ndarray) -> None:
        """Fills [sources, pages] int32; the rest gets the pool's size, where writes are dropped."""
        rows[:] = self.pool.size
        for row, table in zip(rows, self.tables, strict=True):
            row[: len(table)] = table

    def release(self) -> None:
        """Gives up every page; the sequence has ended."""
        if self.closed or self.reserved:
            raise ReservationError("sequence is closed or has an open reservation")
        self.pool.release(self.page_ids())
        self.tables = [[] for _ in self.tables]
        self.closed = True


def _ids(table: Sequence[int]) -> np.ndarray:
    return np.asarray(table, np.int64)


class Reservation:
    """Pages taken for one step of some sequences.

    Attributes:
      copies: to be made before any row is written; each reads a page as it was before the step.
      changes: for each sequence, the table entries that the step must see.
    """

    def __init__(
        self,
        pool: PagePool,
        wants: Sequence[tuple[SequencePages, int]],
        copies: Sequence[PageCopy],
        changes: Sequence[Sequence[TableChange]],
    ):
        self._pool, self._wants, self._open = pool, wants, True
        self._bases = [sequence.length for sequence, _ in wants]
        self.copies, self.changes = tuple(copies), tuple(map(tuple, changes))
        for sequence, _ in wants:
            sequence.reserved = True

    def page_ids(self) -> list[int]:
        """Pages that the reservation itself holds; none after it is applied or dropped."""
        return [c.page for changes in self.changes for c in changes] if self._open else []

    def apply(self, lengths: Sequence[int]) -> None:
        """Commits: sequence i now has `lengths[i]` tokens, at most what was reserved for it.

        Raises:
          ReservationError: before anything has changed.
        """
        self._validate(lengths)
        self._close()
        for (sequence, _), changes, length in zip(self._wants, self.changes, lengths, strict=True):
            for change in changes:
                table = sequence.tables[change.source]
                if change.place < len(table):
                    self._pool.release([table[change.place]])
                    table[change.place] = change.page
                else:
                    table.append(change.page)
            sequence.length = length

    def drop(self) -> None:
        """Returns the pages; every sequence stays as it was. Does nothing after `apply`."""
        if self._open:
            self._pool.release(self.page_ids())
            self._close()

    def _close(self) -> None:
        self._open = False
        for sequence, _ in self._wants:
            sequence.reserved = False

    def _validate(self, lengths: Sequence[int]) -> None:
        if not self._open:
            raise ReservationError("reservation was applied or dropped already")
        if len(lengths) != len(self._wants):
            raise ReservationError(f"{len(lengths)} lengths for {len(self._wants)} sequences")
        for (sequence, end), base, length in zip(self._wants, self._bases, lengths, strict=True):
            if sequence.closed or sequence.length != base:
                raise ReservationError("a sequence changed since its pages were reserved")
            if not base <= length <= end:
                raise ReservationError(f"length {length} is outside {base} to {end}")


def reserve(pool: PagePool, wants: Sequence[tuple[SequencePages, int]]) -> Reservation:
    """Takes the pages with which each sequence can grow to its `end` tokens.

    Raises:
      PoolExhausted: nothing was taken.
      ReservationError: a sequence occurs twice, is closed or has a reservation already.
    """
    for index, (sequence, end) in enumerate(wants):
        twice = any(sequence is other for other, _ in wants[:index])
        if twice or sequence.closed or sequence.reserved or end < sequence.length:
            raise ReservationError("a sequence is closed, reserved already, or would shrink")
    tails = _tails_to_copy(pool, wants)
    missing = [sequence.missing(end) for sequence, end in wants]
    fresh = iter(pool.allocate(sum(map(len, tails)) + sum(map(sum, missing))))
    copies: list[PageCopy] = []
    changes: list[list[TableChange]] = []
    for (sequence, _), own_tails, own_missing in zip(wants, tails, missing, strict=True):
        own_changes = []
        for source, index, rows in own_tails:
            page = next(fresh)
            copies.append(PageCopy(sequence.tables[source][index], page, rows))
            own_changes.append(TableChange(source, index, page))
        for source, count in enumerate(own_missing):
            first = len(sequence.tables[source])
            own_changes += [TableChange(source, first + i, next(fresh)) for i in range(count)]
        changes.append(own_changes)
    return Reservation(pool, wants, copies, changes)


def _tails_to_copy(
    pool: PagePool, wants: Sequence[tuple[SequencePages, int]]
) -> list[list[tuple[int, int, int]]]:
    """Shared tails of each sequence; where all sharers append at once, the last keeps the page."""
    appenders: dict[int, int] = {}

    def must_copy(sequence: SequencePages, source: int, index: int) -> bool:
        page = sequence.tables[source][index]
        appenders[page] = appenders.get(page, 0) + 1
        return appenders[page] < pool.sharers(page)

    return [
        [tail for tail in sequence.shared_tails(end) if must_copy(sequence, tail[0], tail[1])]
        for sequence, end in wants
    ]
