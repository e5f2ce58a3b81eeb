"""Page pool and page tables: reference counts, generations, copy-on-write, transactions."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ds41jax.cache.pool import PageError, PageLayout, PagePool, PoolExhausted
from ds41jax.cache.sequence_pages import (
    PageCopy,
    Reservation,
    ReservationError,
    SequencePages,
    reserve,
)

OFFICIAL = PageLayout((2, 2, 2, 1), 256)
SMALL = PageLayout((2, 1), 4)


def grown(pool: PagePool, length: int, layout: PageLayout = SMALL) -> SequencePages:
    pages = SequencePages(pool, layout)
    reserve(pool, [(pages, length)]).apply([length])
    return pages


def test_a_group_is_512_tokens_in_five_pages() -> None:
    assert (OFFICIAL.group_tokens, OFFICIAL.group_pages) == (512, 5)


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        (0, (0, 0, 0, 0)),
        (1, (0, 0, 0, 1)),
        (2, (1, 1, 1, 1)),
        (257, (1, 1, 1, 2)),
        (512, (1, 1, 1, 2)),
        (513, (1, 1, 1, 3)),
        (514, (2, 2, 2, 3)),
    ],
)
def test_pages_of_tokens(tokens: int, pages: tuple[int, ...]) -> None:
    assert OFFICIAL.pages(tokens) == pages


def test_an_exhausted_pool_says_the_numbers_and_gives_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="2 pages are needed, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.free == 1


def test_the_generation_changes_with_the_last_reference_only() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    name = pool.identity(0, page)
    pool.retain([page])
    pool.release([page])
    assert pool.holds(name)
    pool.release([page])
    assert not pool.holds(name)
    pool.allocate(1)
    assert not pool.holds(name) and pool.generation(page) == 1


def test_free_pages_cannot_be_retained_or_released() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    with pytest.raises(PageError):
        pool.release([page, page])
    with pytest.raises(PageError):
        pool.retain([1 - page])
    pool.check([[page]])


def test_a_shared_tail_is_copied_and_a_full_page_is_not() -> None:
    pool = PagePool(20)
    first = grown(pool, 6)  # source 0: 3 rows of page 0; source 1: 4 + 2 rows
    second = SequencePages.sharing(pool, SMALL, first.tables, 6)
    reservation = reserve(pool, [(second, 8)])
    tails = [first.tables[0][0], first.tables[1][1]]
    assert [(c.source, c.rows) for c in reservation.copies] == [(tails[0], 3), (tails[1], 2)]
    reservation.apply([8])
    assert second.tables[1][0] == first.tables[1][0]
    assert second.tables[0][0] != first.tables[0][0]
    third = SequencePages.sharing(pool, SMALL, second.tables, 8)
    assert not reserve(pool, [(third, 10)]).copies


def test_one_of_the_sharers_keeps_the_page_if_all_append_at_once() -> None:
    pool = PagePool(20)
    first = grown(pool, 2)
    others = [SequencePages.sharing(pool, SMALL, first.tables, 2) for _ in range(2)]
    original = first.tables[0][0]
    reservation = reserve(pool, [(s, 4) for s in (first, *others)])
    assert [c.source for c in reservation.copies].count(original) == 2
    reservation.apply([4, 4, 4])
    assert [s.tables[0][0] for s in (first, *others)].count(original) == 1
    pool.check([s.page_ids() for s in (first, *others)])


def test_two_lanes_may_copy_the_same_tail() -> None:
    pool = PagePool(20)
    first = grown(pool, 2)
    second = SequencePages.sharing(pool, SMALL, first.tables, 2)
    lanes = [reserve(pool, [(first, 4)]), reserve(pool, [(second, 4)])]
    assert all(isinstance(c, PageCopy) for lane in lanes for c in lane.copies)
    lanes[0].apply([4])
    lanes[1].apply([3])
    pool.check([first.page_ids(), second.page_ids()])


def test_dropping_returns_every_page() -> None:
    pool = PagePool(20)
    first = grown(pool, 3)
    before, tables = pool.free, [list(t) for t in first.tables]
    reservation = reserve(pool, [(first, 30)])
    reservation.drop()
    reservation.drop()
    assert (pool.free, first.tables, first.length) == (before, tables, 3)


def test_nothing_changes_if_a_commit_is_wrong() -> None:
    pool = PagePool(30)
    first, second = grown(pool, 3), grown(pool, 5)
    with pytest.raises(ReservationError):
        reserve(pool, [(first, 4), (first, 5)])
    reservation = reserve(pool, [(first, 9), (second, 9)])
    with pytest.raises(ReservationError):
        reserve(pool, [(first, 10)])
    for lengths in ([9], [9, 10], [9, 4]):
        with pytest.raises(ReservationError):
            reservation.apply(lengths)
    assert (first.length, second.length) == (3, 5)
    reservation.apply([3, 9])
    with pytest.raises(ReservationError):
        reservation.apply([3, 9])
    assert (first.length, second.length) == (3, 9)


def test_page_table_rows_are_padded_with_a_page_that_does_not_exist() -> None:
    pool = PagePool(9)
    table = np.zeros((2, 5), np.int32)
    grown(pool, 8).write_into(table)
    assert table[0, 1:].tolist() == [9] * 4 and table[1, 2:].tolist() == [9] * 3


class PoolMachine(RuleBasedStateMachine):
    """Random histories; the books must balance and generations never go back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.sequences: list[SequencePages] = []
        self.open: list[tuple[Reservation, list[tuple[SequencePages, int]]]] = []
        self.generations = [0] * 24

    @rule()
    def begin(self) -> None:
        self.sequences.append(SequencePages(self.pool, SMALL))

    @rule(which=st.integers(0, 99), length=st.integers(0, 20))
    def share(self, which: int, length: int) -> None:
        if self.sequences:
            other = self.sequences[which % len(self.sequences)]
            length = min(length, other.length)
            pages = other.prefix(length)
            self.sequences.append(SequencePages.sharing(self.pool, SMALL, pages, length))

    @rule(first=st.integers(0, 99), count=st.integers(1, 3), more=st.integers(0, 9))
    def take(self, first: int, count: int, more: int) -> None:
        idle = [s for s in self.sequences if not s.reserved]
        wants = [(s, s.length + more) for s in idle[first % (len(idle) + 1) :][:count]]
        free = self.pool.free
        try:
            self.open.append((reserve(self.pool, wants), wants))
        except PoolExhausted:
            assert self.pool.free == free

    @rule(part=st.integers(0, 9), commit=st.booleans())
    def close(self, part: int, commit: bool) -> None:
        if self.open:
            reservation, wants = self.open.pop()
            if commit:
                reservation.apply([min(end, s.length + part) for s, end in wants])
            else:
                reservation.drop()

    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        idle = [s for s in self.sequences if not s.reserved]
        if idle:
            sequence = idle[which % len(idle)]
            sequence.release()
            self.sequences.remove(sequence)

    @invariant()
    def balanced(self) -> None:
        held = [r.page_ids() for r, _ in self.open]
        self.pool.check([*held, *(s.page_ids() for s in self.sequences)])
        for sequence in self.sequences:
            counts = SMALL.pages(sequence.length)
            assert all(len(t) >= n for t, n in zip(sequence.tables, counts, strict=True))
        now = [self.pool.generation(page) for page in range(24)]
        assert all(a >= b for a, b in zip(now, self.generations, strict=True))
        self.generations = now


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
