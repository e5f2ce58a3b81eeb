"""`PrefixCache`: retained snapshots, from the lookup of a prompt to the eviction of an entry.

Ties the radix index, the page pool, the arena of snapshot slots and the host tier together. It
moves no bytes: it says which slot to copy where, and the engine does so before its next call here.
All calls come from the engine's loop thread.
"""

from collections.abc import Sequence

import numpy as np

from ds41jax.cache.host_tier import HostTier
from ds41jax.cache.pool import PageLayout, PagePool, PoolExhausted
from ds41jax.cache.radix import ALIGNMENT, Bank, Entry, Reuse, partial_start
from ds41jax.cache.residency import Residency
from ds41jax.cache.sequence_pages import Reservation, SequencePages, reserve
from ds41jax.cache.snapshots import CacheOptions, CacheStats, Hit, preference
from ds41jax.cache.symbols import ImageSpan


class PrefixCache:
    """Retained snapshots and the sequences' shared use of their pages."""

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        arena: Sequence[int],
        options: CacheOptions,
        host: HostTier | None = None,
    ):
        """`arena` lists the slots of KVState that snapshots may take."""
        self.pool, self.layout, self.options, self.host = pool, layout, options, host
        self._at = Residency(pool, arena, options, host)
        self._index, self._images = self._at.index, self._at.images
        self._exact_hits = self._partial_hits = 0

    def symbols(
        self, token_ids: Sequence[int] | np.ndarray, spans: Sequence[ImageSpan] = ()
    ) -> np.ndarray:
        """[n] uint32 key of a prompt; give it back with `release_symbols` when its request ends."""
        return self._images.encode(token_ids, spans)

    def release_symbols(self, symbols: np.ndarray) -> None:
        """The request with this prompt has ended."""
        self._images.release(symbols)

    def open(self, hit: Hit | None = None) -> SequencePages:
        """Page tables of a new sequence; those of a device hit are shared."""
        if hit is None:
            return SequencePages(self.pool, self.layout)
        assert not hit.on_host, "a host hit must be restored first"
        if hit.exact:
            self._exact_hits += 1
        else:
            self._partial_hits += 1
        tables = hit.tables(self.layout)
        return SequencePages.sharing(self.pool, self.layout, tables, hit.shared)

    def reserve(self, wants: Sequence[tuple[SequencePages, int]]) -> Reservation:
        """`sequence_pages.reserve`, giving up snapshots where pages are short.

        Raises:
          PoolExhausted: all unpinned snapshots together would not free enough.
        """
        try:
            return reserve(self.pool, wants)
        except PoolExhausted as short:
            if not self.evict_for(short.needed):
                self._evict_tail_sharers(wants)
                self.evict_for(_pages_wanted(wants))
        return reserve(self.pool, wants)

    def _evict_tail_sharers(self, wants: Sequence[tuple[SequencePages, int]]) -> None:
        """The last resort: a tail that no snapshot shares any more needs no copy."""
        tails = {
            pages.tables[source][place]
            for pages, end in wants
            for source, place, _ in pages.shared_tails(end)
        }
        for candidate in self._at.candidates():
            if not tails.isdisjoint(candidate.pages.tolist()):
                self._at.evict(candidate.entry)

    def lookup(
        self, symbols: np.ndarray, mode: Reuse | None = None, *, host: bool = True
    ) -> Hit | None:
        """The hit that saves most; changes nothing.

        Device and host entries compete: the host's wins only if it saves more. Then a turn is
        preferred to a prompt, then the most recent.

        Args:
          symbols: the whole prompt.
          mode: overrides the options'.
          host: False after a restore has failed.
        """
        mode = mode or self.options.mode
        if mode is Reuse.OFF:
            return None
        found = [
            hit
            for entry, common in self._index.matches(symbols)
            if host or entry.device is not None
            if (hit := self._hit(entry, common, len(symbols), mode)) is not None
        ]
        return max(found, key=preference, default=None)

    def _hit(self, entry: Entry, common: int, length: int, mode: Reuse) -> Hit | None:
        ends_here = common == entry.end
        answers = entry.end < length or entry.logits is not None
        if ends_here and answers and not (entry.approximate and mode is Reuse.EXACT):
            logits = entry.logits if entry.end == length else None
            return Hit(entry, entry.end, entry.end, True, logits)
        start = partial_start(common, self.options.window)
        if mode is Reuse.EXACT or start == 0:
            return None
        return Hit(entry, common // ALIGNMENT * ALIGNMENT, start, False)

    def pin(self, hit: Hit) -> None:
        """Keeps the entry from eviction and marks it as used; before anything else is evicted."""
        entry = hit.entry
        assert entry.node is not None, "the hit is stale: look up again"
        entry.pins += 1
        self._at.touch(entry)

    def unpin(self, hit: Hit) -> None:
        """The sequence holds its pages and the copy of the slot has been dispatched."""
        assert hit.entry.pins > 0, "the entry is not pinned"
        hit.entry.pins -= 1

    def retain(
        self,
        symbols: np.ndarray,
        pages: SequencePages,
        bank: Bank,
        logits: np.ndarray | None = None,
        *,
        approximate: bool = False,
    ) -> int | None:
        """Keeps a sequence as it is now, at `pages.length` committed tokens.

        Args:
          symbols: at least that many symbols of prompt and output.
          logits: float32 [vocabulary] of the last committed position, or None.
          approximate: the sequence began with a partial hit.

        Returns:
          The arena slot into which the sequence's slot is to be copied now; None if it is not kept.
        """
        key = symbols[: pages.length]
        assert len(key) == pages.length, "symbols must cover the committed length"
        if not len(key) or self._at.limits(bank).entries == 0:
            return None
        entry = self._index.find(key, bank)
        if entry is None:
            entry = Entry(bank, len(key))
        elif not self._may_replace(entry, approximate):
            self._at.touch(entry)
            return None
        slot = self._at.place(entry, pages.prefix(len(key)))
        if slot is None:
            self._at.remove_if_gone(entry)
            return None
        entry.logits, entry.approximate = logits, approximate
        if entry.node is None:
            self._index.insert(key, entry)
            self._images.retain(key)
        self._at.touch(entry)
        if not self._at.enforce_bytes(entry):
            self._at.drop_device(entry)
            return None
        self._at.store_later(entry)
        return slot

    def _may_replace(self, entry: Entry, approximate: bool) -> bool:
        """Whether a new snapshot of the same symbols may take an entry's place."""
        in_use = entry.pins or (self.host is not None and self.host.busy(entry))
        if in_use or (approximate and not entry.approximate):
            return False
        if entry.approximate and not approximate:
            self._at.forget_host(entry)
        return True

    def evict_for(self, pages: int) -> bool:
        """Gives up snapshots until `pages` are free; gives up none if that cannot be reached."""
        return self._at.evict_for(pages)

    def evictable_pages(self, keep: Sequence[int] | np.ndarray = ()) -> int:
        """Pages that giving up every unpinned snapshot frees, if somebody else holds `keep`."""
        return self._at.evictable_pages(keep)

    def tick(self) -> None:
        """Once a round, after all slot copies are dispatched: begins and commits host copies."""
        self._at.tick()

    def restore(self, hit: Hit) -> Hit | None:
        """Brings a host hit back to the device, in at most the restore timeout.

        Returns:
          The same hit, now on the device; None if there is no room or the copy failed or came late:
          look up again with `host=False`.
        """
        entry = hit.entry
        assert self.host is not None and hit.on_host and entry.node is not None
        entry.pins += 1
        restored = self._at.restore(entry, self.host)
        entry.pins -= 1
        return hit if restored else None

    def stats(self) -> CacheStats:
        """A snapshot of gauges and counters."""
        entries = list(self._index.entries())
        banks = [e.bank for e in entries if e.device is not None]
        host = self.host
        return CacheStats(
            prompts=banks.count(Bank.PROMPT),
            turns=banks.count(Bank.TURN),
            host_entries=sum(e.host is not None for e in entries),
            images=len(self._images),
            free_pages=self.pool.free,
            evictable_pages=self.evictable_pages(),
            exact_hits=self._exact_hits,
            partial_hits=self._partial_hits,
            evicted=self._at.evicted,
            stored=host.stored if host else 0,
            failed_stores=host.failed_stores if host else 0,
            restored=host.restored if host else 0,
            failed_restores=host.failed_restores if host else 0,
        )

    def check(
        self, sequences: Sequence[SequencePages] = (), reservations: Sequence[Reservation] = ()
    ) -> None:
        """Balances every page, slot and image against all holders; for tests and after torture."""
        held = [np.asarray(r.page_ids(), np.int64) for r in reservations]
        self._at.check([*held, *(s.page_ids() for s in sequences)])


def _pages_wanted(wants: Sequence[tuple[SequencePages, int]]) -> int:
    return sum(len(pages.shared_tails(end)) + sum(pages.missing(end)) for pages, end in wants)
