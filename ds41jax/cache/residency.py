"""Where retained snapshots live: arena slots, device pages, host copies, and who has to go.

The policy under `retained.PrefixCache`: placing, evicting by value, storing and restoring. An entry
is in the index for as long as the device or the host has it.
"""

from collections.abc import Sequence

import numpy as np

from ds41jax.cache.eviction import (
    Candidate,
    bank_bytes,
    choose_for_pages,
    least_valuable,
    reclaimable,
)
from ds41jax.cache.host_tier import HostTier, Tables
from ds41jax.cache.pool import PagePool
from ds41jax.cache.radix import Bank, Entry, RadixIndex, Reuse
from ds41jax.cache.snapshots import BankLimits, CacheOptions, DeviceCopy
from ds41jax.cache.symbols import ImageSymbols

HOST_COPY_WORTH = 0.25  # of a device copy's value remains where the host has one as well


class Residency:
    """Entries of the index with their slots and pages on the device, and their host copies."""

    def __init__(
        self,
        pool: PagePool,
        arena: Sequence[int],
        options: CacheOptions,
        host: HostTier | None,
    ):
        self.pool, self.options, self.host = pool, options, host
        self.images = ImageSymbols()
        self.index = RadixIndex()
        self._arena = sorted(arena)
        self.evicted = 0
        self._free_slots = list(arena)[::-1]
        self._unstored: list[Entry] = []
        self._clock = 0

    def on_device(self) -> list[Entry]:
        """Entries with a slot."""
        return [e for e in self.index.entries() if e.device is not None]

    def limits(self, bank: Bank) -> BankLimits:
        """Those of a bank."""
        return self.options.turns if bank is Bank.TURN else self.options.prompts

    def touch(self, entry: Entry) -> None:
        """Makes an entry the most recently used."""
        self._clock += 1
        entry.last_used = self._clock

    def place(self, entry: Entry, tables: Tables) -> int | None:
        """Gives an entry a slot and a share of the pages; the slot, or None if there is none."""
        if entry.device is not None:
            slot = entry.device.slot
            self.pool.release(entry.device.page_ids())
        else:
            entry.pins += 1
            room = self._free_a_slot(entry.bank)
            entry.pins -= 1
            if not room:
                return None
            slot = self._free_slots.pop()
        entry.device = DeviceCopy(slot, tables)
        self.pool.retain(entry.device.page_ids())
        return slot

    def _free_a_slot(self, bank: Bank) -> bool:
        """Makes a place in the bank and in the arena, giving up what is worth least."""
        in_bank = sum(e.bank is bank for e in self.on_device())
        if in_bank >= self.limits(bank).entries:
            victim = least_valuable(c for c in self.candidates() if c.entry.bank is bank)
            if victim is None:
                return False
            self.evict(victim.entry)
        if not self._free_slots:
            victim = least_valuable(self.candidates())
            if victim is None:
                return False
            self.evict(victim.entry)
        return True

    def enforce_bytes(self, new: Entry) -> bool:
        """Gives up entries of the bank, least value a byte first, until it keeps to its bytes.

        False if even the new one alone, with those in use, takes too many.
        """
        limit = self.limits(new.bank).bytes
        if limit is None:
            return True
        own = [self._candidate(e) for e in self.on_device() if e.bank is new.bank]
        stay = [c for c in own if c.entry is new or c.entry.pins]
        if self._bytes(stay) > limit:
            return False
        while (total := self._bytes(own)) > limit:
            scores = [
                c.value / max(1, total - self._bytes([other for other in own if other is not c]))
                for c in own
            ]
            _, victim = min((score, n) for n, score in enumerate(scores) if own[n] not in stay)
            self.evict(own.pop(victim).entry)
        return True

    def _bytes(self, held: Sequence[Candidate]) -> int:
        slot, page = self.options.slot_bytes, self.options.page_bytes
        return bank_bytes(held, slot, page, self.pool.size)

    def evict_for(self, pages: int) -> bool:
        """Gives up snapshots until `pages` are free; gives up none if that cannot be reached."""
        need = pages - self.pool.free
        if need <= 0:
            return True
        victims = choose_for_pages(self.candidates(), self.pool.references(), need)
        for victim in victims or ():
            self.evict(victim.entry)
        return victims is not None

    def evictable_pages(self, keep: Sequence[int] | np.ndarray = ()) -> int:
        """Pages that giving up every unpinned snapshot frees, if somebody else holds `keep`."""
        references = self.pool.references()
        np.add.at(references, np.asarray(keep, np.int64), 1)
        return int(reclaimable(references, (c.pages for c in self.candidates())).sum())

    def candidates(self) -> list[Candidate]:
        """Device copies that may go."""
        return [self._candidate(e) for e in self.on_device() if not e.pins]

    def _candidate(self, entry: Entry) -> Candidate:
        worth = self._value(entry) * (1.0 if entry.host is None else HOST_COPY_WORTH)
        return Candidate(entry, worth, entry.device.page_ids())

    def _value(self, entry: Entry) -> float:
        """Tokens that it saves, less the longer it was not used."""
        window = self.options.window if self.options.mode is Reuse.BOUNDED else None
        return self.index.saved(entry, window) / (1 + self._clock - entry.last_used)

    def evict(self, entry: Entry) -> None:
        """Gives up the device copy, after the host's has arrived or has been dropped."""
        if self.host is not None:
            if not self.host.options.write_behind and self.host.accepts(entry):
                self._store(entry)
            self.host.settle(entry)
        self.evicted += 1
        self.drop_device(entry)

    def drop_device(self, entry: Entry) -> None:
        """Frees an entry's slot and its references."""
        self.pool.release(entry.device.page_ids())
        self._free_slots.append(entry.device.slot)
        entry.device = None
        if entry in self._unstored:
            self._unstored.remove(entry)
        self.remove_if_gone(entry)

    def forget_host(self, entry: Entry) -> None:
        """Gives up the host copy, if there is one."""
        if self.host is not None and entry.host is not None:
            self.host.forget(entry.host)
            entry.host = None

    def remove_if_gone(self, entry: Entry) -> None:
        """Takes an entry out of the index once neither device nor host has it."""
        if entry.node is not None and entry.device is None and entry.host is None:
            self.images.release(self.index.symbols(entry))
            self.index.remove(entry)

    def store_later(self, entry: Entry) -> None:
        """Has the next tick store a new entry: its slot is copied only after this call."""
        host = self.host
        if host is not None and host.options.write_behind and host.accepts(entry):
            self._unstored = [*(e for e in self._unstored if e is not entry), entry]

    def tick(self) -> None:
        """Begins the stores that were put off and commits those that have arrived."""
        if self.host is None:
            return
        for entry in self._unstored:
            if self.host.accepts(entry):
                self._store(entry)
        self._unstored.clear()
        self.host.poll()

    def restore(self, entry: Entry, host: HostTier) -> bool:
        """Brings a pinned entry back to the device; pages that are there still are shared."""
        resident = host.resident(entry.host)
        shared = [page for page in resident if page is not None]
        self.pool.retain(shared)
        need = len(resident) - len(shared)
        if not (self.evict_for(need) and self._free_a_slot(entry.bank)):
            self.pool.release(shared)
            return False
        new = iter(self.pool.allocate(need))
        pages = [next(new) if page is None else page for page in resident]
        slot = self._free_slots.pop()
        missing = [n for n, page in enumerate(resident) if page is None]
        if not host.restore(entry, slot, pages, missing):
            self.pool.release(pages)
            self._free_slots.append(slot)
            return False
        rest = iter(pages)
        tables = tuple(tuple(next(rest) for _ in table) for table in entry.host.tables)
        entry.device = DeviceCopy(slot, tables)
        if not self.enforce_bytes(entry):
            self.drop_device(entry)
            return False
        return True

    def _store(self, entry: Entry) -> None:
        assert self.host is not None
        entry.pins += 1
        self.host.store(entry, entry.device.tables, entry.device.slot, self._make_host_room)
        entry.pins -= 1

    def _make_host_room(self, pages: int) -> bool:
        """Frees a host slot and that many host pages, giving up what is worth least."""
        assert self.host is not None
        victims = self.host.choose_victims(self._host_candidates(), pages)
        for victim in victims or ():
            self.forget_host(victim.entry)
            self.remove_if_gone(victim.entry)
        return victims is not None and self.host.free_slots > 0

    def _host_candidates(self) -> list[Candidate]:
        return [
            Candidate(
                e,
                self._value(e) * (1.0 if e.device is None else HOST_COPY_WORTH),
                e.host.page_ids(),
            )
            for e in self.index.entries()
            if e.host is not None and not e.pins
        ]

    def check(self, held: Sequence[np.ndarray]) -> None:
        """Balances index, pages and slots; `held` are the pages of everybody else."""
        self.index.check()
        entries = list(self.index.entries())
        on_device = self.on_device()
        self.pool.check([*held, *(e.device.page_ids() for e in on_device)])
        slots = sorted([*self._free_slots, *(e.device.slot for e in on_device)])
        assert slots == self._arena, "arena slots do not balance"
        assert all(e.device is not None or e.host is not None for e in entries), "entry is nowhere"
        if self.host is not None:
            self.host.check([e.host for e in entries if e.host is not None])
