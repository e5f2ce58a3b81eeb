"""What the prefix cache takes and gives: options, places of snapshots, hits, statistics."""

from dataclasses import dataclass

import numpy as np

from ds41jax.cache.host_tier import Tables
from ds41jax.cache.pool import PageLayout
from ds41jax.cache.radix import Bank, Entry, Reuse


@dataclass(frozen=True)
class BankLimits:
    """Entries and bytes (slots, and each held page once) of a bank; 0 entries switch it off."""

    entries: int
    bytes: int | None = None


@dataclass(frozen=True)
class CacheOptions:
    """How much is kept, and how it is reused.

    Attributes:
      window: tokens that a partial hit computes again.
      mode: what lookups answer with.
      prompts, turns: limits of the banks.
      slot_bytes, page_bytes: what one slot and one page occupy, for the byte limits.
    """

    window: int
    mode: Reuse = Reuse.BOUNDED
    prompts: BankLimits = BankLimits(20)
    turns: BankLimits = BankLimits(20)
    slot_bytes: int = 0
    page_bytes: int = 0


@dataclass(frozen=True)
class DeviceCopy:
    """Where a snapshot lies on the device: its arena slot and the pages of each source."""

    slot: int
    tables: Tables

    def page_ids(self) -> np.ndarray:
        return np.array([page for table in self.tables for page in table], np.int64)


@dataclass(frozen=True)
class Hit:
    """What a prompt can start from.

    Attributes:
      entry: the snapshot; on the host only if `on_host`.
      shared: global rows of positions below it are there (`StepBatch.global_floor`).
      start: first position to compute, = `shared` for an exact hit, a window earlier for a partial
        one (`StepBatch.window_floor` then); tokens that are not computed.
      exact: whether the snapshot's slot is to be restored; a partial hit takes its pages only.
      logits: of the prompt's last position if nothing is to be computed, else None.
    """

    entry: Entry
    shared: int
    start: int
    exact: bool
    logits: np.ndarray | None = None

    @property
    def on_host(self) -> bool:
        return self.entry.device is None

    @property
    def arena_slot(self) -> int | None:
        """Slot to copy into the sequence's, or None for a partial hit."""
        return self.entry.device.slot if self.exact and not self.on_host else None

    def tables(self, layout: PageLayout) -> Tables:
        """Device pages of each source that the sequence shares; none while on the host."""
        if self.on_host:
            return tuple(() for _ in layout.ratios)
        counts = layout.pages(self.shared)
        device: DeviceCopy = self.entry.device
        return tuple(table[:n] for table, n in zip(device.tables, counts, strict=True))


@dataclass(frozen=True)
class CacheStats:
    """Gauges and counters of the cache."""

    prompts: int
    turns: int
    host_entries: int
    images: int
    free_pages: int
    evictable_pages: int
    exact_hits: int
    partial_hits: int
    evicted: int
    stored: int
    failed_stores: int
    restored: int
    failed_restores: int


def preference(hit: Hit) -> tuple[int, bool, bool, Bank, int]:
    """Orders hits of one prompt, the best last: what is saved, then exact before partial, device
    before host, turn before prompt, the most recent."""
    entry = hit.entry
    return hit.start, hit.exact, not hit.on_host, entry.bank, entry.last_used
