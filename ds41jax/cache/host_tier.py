"""Bookkeeping of retained snapshots in host memory: which host page holds what, copies under way.

The bytes lie in arrays that the engine owns and moves through a `Copier`; they have `pages` page
places and `slots` snapshot places, so that the tier never grows. Running requests are never here.
A failing or late copy costs a cached prefix, never a request.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ds41jax.cache.eviction import Candidate, choose_for_pages, least_valuable
from ds41jax.cache.pool import PageIdentity, PageLayout, PagePool
from ds41jax.cache.radix import Entry
from ds41jax.cache.sequence_pages import PageCopy

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HostOptions:
    """Sizes and patience of the tier; times in seconds.

    Attributes:
      pages, slots: places for pages and for the rest of a snapshot.
      min_tokens: shorter snapshots are cheaper to compute again than to keep.
      max_tokens: longer ones are not kept; None for no limit.
      write_behind: copy when a snapshot is retained; otherwise when the device gives it up.
      evict_wait: how long an eviction waits for the copy of its victim.
      restore_timeout: after this a request computes its prefix instead.
      pacing: a store that is older makes prefill wait at a chunk boundary, this long at most; 0 for
        never.
    """

    pages: int
    slots: int
    min_tokens: int = 512
    max_tokens: int | None = None
    write_behind: bool = True
    evict_wait: float = 1.0
    restore_timeout: float = 0.5
    pacing: float = 0.0


@dataclass(frozen=True)
class HostCopy:
    """Where a snapshot lies in host memory: its slot and the pages of each source."""

    slot: int
    tables: Tables

    def page_ids(self) -> np.ndarray:
        return np.array([page for table in self.tables for page in table], np.int64)


@dataclass(frozen=True, eq=False)
class StoreTicket:
    """A copy from the device to the host: arena slot to host slot, device pages to host pages."""

    entry: Entry
    arena_slot: int
    host: HostCopy
    copies: tuple[PageCopy, ...]
    fresh: tuple[tuple[PageIdentity, int, int], ...]  # identity, host page, valid rows
    started: float


@dataclass(frozen=True, eq=False)
class RestoreTicket:
    """A copy from the host to the device: host slot to arena slot, host pages to device pages."""

    entry: Entry
    arena_slot: int
    host: HostCopy
    copies: tuple[PageCopy, ...]
    deadline: float


class Copier(Protocol):
    """Moves the bytes. Any exception counts as a failed copy."""

    def start(self, ticket: StoreTicket | RestoreTicket) -> None:
        """Begins a copy of the contents as they are now."""

    def finish(self, ticket: StoreTicket | RestoreTicket, timeout: float) -> bool:
        """Waits at most `timeout` seconds; True once everything has arrived."""

    def cancel(self, ticket: StoreTicket | RestoreTicket) -> None:
        """After this, nothing more is written to the ticket's targets."""


class HostTier:
    """Host pages, slots, identities and tickets."""

    def __init__(
        self,
        options: HostOptions,
        layout: PageLayout,
        device_pool: PagePool,
        copier: Copier,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.options, self.copier, self.clock = options, copier, clock
        self.pool = PagePool(options.pages)
        self.stored = self.failed_stores = self.restored = self.failed_restores = 0
        self._layout, self._device_pool = layout, device_pool
        self._slots = list(range(options.slots))[::-1]
        self._tickets: dict[Entry, StoreTicket] = {}
        self._places: dict[PageIdentity, tuple[int, int]] = {}  # host page, valid rows
        self._names: dict[int, list[PageIdentity]] = {}  # of each host page

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    @property
    def copying(self) -> int:
        """Stores under way."""
        return len(self._tickets)

    def busy(self, entry: Entry) -> bool:
        """Whether an entry is being stored."""
        return entry in self._tickets

    def accepts(self, entry: Entry) -> bool:
        """Whether an entry is worth storing and not stored yet."""
        longest = self.options.max_tokens
        fits = entry.end >= self.options.min_tokens and (longest is None or entry.end <= longest)
        return fits and entry.host is None and not self.busy(entry)

    def store(
        self,
        entry: Entry,
        tables: Tables,
        arena_slot: int,
        make_room: Callable[[int], bool],
    ) -> bool:
        """Begins to copy a snapshot; `make_room(pages)` frees a slot and that many host pages.

        Pages that lie here already are shared, if as many of their rows were valid then.
        """
        named = self._named_pages(entry.end, tables)
        known = {n: self._place(identity, rows) for n, (identity, rows) in enumerate(named)}
        shared = [page for page in known.values() if page is not None]
        self.pool.retain(shared)
        missing = len(named) - len(shared)
        if not (missing <= self.pool.free and self._slots) and not make_room(missing):
            self._release(shared)
            return False
        new = iter(self.pool.allocate(missing))
        pages = [next(new) if page is None else page for page in known.values()]
        fresh = tuple(
            (identity, page, rows)
            for (identity, rows), page, at in zip(named, pages, known.values(), strict=True)
            if at is None
        )
        copies = tuple(PageCopy(identity.page, page, rows) for identity, page, rows in fresh)
        host = HostCopy(self._slots.pop(), _split(pages, tables))
        ticket = StoreTicket(entry, arena_slot, host, copies, fresh, self.clock())
        self._tickets[entry] = ticket
        try:
            self.copier.start(ticket)
        except Exception:
            self._drop(ticket)
            return False
        return True

    def poll(self) -> None:
        """Commits the stores that have arrived."""
        for ticket in list(self._tickets.values()):
            self._try_finish(ticket, 0.0)

    def settle(self, entry: Entry) -> None:
        """Waits for an entry's store, briefly, and drops it otherwise: its device copy must go."""
        ticket = self._tickets.get(entry)
        if ticket is not None and not self._try_finish(ticket, self.options.evict_wait):
            self._drop(ticket)

    def pace(self) -> None:
        """Called at a prefill's chunk boundary: waits for a store that is older than `pacing`."""
        limit = self.options.pacing
        if limit <= 0 or not self._tickets:
            return
        oldest = min(self._tickets.values(), key=lambda t: t.started)
        if self.clock() - oldest.started > limit:
            self._try_finish(oldest, limit)

    def forget(self, host: HostCopy) -> None:
        """Frees a stored snapshot's places."""
        self._slots.append(host.slot)
        self._release(host.page_ids().tolist())

    def resident(self, host: HostCopy) -> list[int | None]:
        """For each host page in order, a device page that still holds its rows, or None."""
        return [self._resident_page(int(page)) for page in host.page_ids()]

    def restore(
        self, entry: Entry, arena_slot: int, pages: Sequence[int], missing: Sequence[int]
    ) -> bool:
        """Copies a stored snapshot to device pages; False if that failed or came late.

        Args:
          pages: device page of every page of the snapshot, in the order of its tables.
          missing: which of them have to be filled.
        """
        host: HostCopy = entry.host
        rows = [rows for _, rows in self._named_pages(entry.end, _split(pages, host.tables))]
        sources = host.page_ids().tolist()
        copies = tuple(PageCopy(sources[n], pages[n], rows[n]) for n in missing)
        deadline = self.clock() + self.options.restore_timeout
        ticket = RestoreTicket(entry, arena_slot, host, copies, deadline)
        if not self._run_restore(ticket):
            self.failed_restores += 1
            return False
        self.restored += 1
        named = self._named_pages(entry.end, _split(pages, host.tables))
        for n in missing:
            self._name(named[n][0], sources[n], named[n][1])
        return True

    def choose_victims(self, candidates: Sequence[Candidate], pages: int) -> list[Candidate] | None:
        """Stored snapshots to forget so that a slot and `pages` pages are free; None if none do."""
        need = max(0, pages - self.pool.free)
        victims = choose_for_pages(candidates, self.pool.references(), need)
        if victims is None or victims or self._slots:
            return victims
        victim = least_valuable(candidates)
        return None if victim is None else [victim]

    def check(self, stored: Sequence[HostCopy]) -> None:
        """Balances pages and slots against all stored snapshots; for tests."""
        copies = [*stored, *(t.host for t in self._tickets.values())]
        self.pool.check([copy.page_ids() for copy in copies])
        slots = sorted([*self._slots, *(copy.slot for copy in copies)])
        assert slots == list(range(self.options.slots)), "host slots do not balance"
        assert all(self.pool.sharers(page) for page, _ in self._places.values())

    def _named_pages(self, end: int, tables: Tables) -> list[tuple[PageIdentity, int]]:
        """(identity, valid rows) of every device page of a snapshot of `end` tokens."""
        size = self._layout.page_rows
        return [
            (self._device_pool.identity(source, page), min(size, rows - index * size))
            for source, (table, rows) in enumerate(zip(tables, self._layout.rows(end), strict=True))
            for index, page in enumerate(table)
        ]

    def _place(self, identity: PageIdentity, rows: int) -> int | None:
        page, valid = self._places.get(identity, (0, -1))
        return page if valid >= rows else None

    def _name(self, identity: PageIdentity, host_page: int, rows: int) -> None:
        """Records that a host page holds the first rows of what `identity` names."""
        previous = self._places.get(identity)
        if previous is not None:
            self._names[previous[0]].remove(identity)
        self._places[identity] = host_page, rows
        self._names.setdefault(host_page, []).append(identity)

    def _resident_page(self, host_page: int) -> int | None:
        for identity in self._names.get(host_page, ()):
            if self._device_pool.holds(identity):
                return identity.page
        return None

    def _release(self, pages: Sequence[int]) -> None:
        self.pool.release(pages)
        for page in pages:
            if not self.pool.sharers(page):
                for identity in self._names.pop(page, ()):
                    del self._places[identity]

    def _try_finish(self, ticket: StoreTicket, timeout: float) -> bool:
        """Whether the ticket is done with: committed, or dropped because it failed."""
        try:
            arrived = self.copier.finish(ticket, timeout)
        except Exception:
            self._drop(ticket)
            return True
        if arrived:
            del self._tickets[ticket.entry]
            ticket.entry.host = ticket.host
            for identity, page, rows in ticket.fresh:
                self._name(identity, page, rows)
            self.stored += 1
        return arrived

    def _drop(self, ticket: StoreTicket) -> None:
        self.copier.cancel(ticket)
        del self._tickets[ticket.entry]
        self.forget(ticket.host)
        self.failed_stores += 1

    def _run_restore(self, ticket: RestoreTicket) -> bool:
        try:
            self.copier.start(ticket)
            if self.copier.finish(ticket, self.options.restore_timeout):
                return self.clock() <= ticket.deadline
        except Exception:
            pass
        self.copier.cancel(ticket)
        return False


def _split(pages: Sequence[int], tables: Tables) -> Tables:
    """Cuts a flat list into tables of the same lengths."""
    rest = iter(pages)
    return tuple(tuple(next(rest) for _ in table) for table in tables)
