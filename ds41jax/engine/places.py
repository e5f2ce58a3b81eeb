"""Where sequences live: slots and pages of the device's caches, and the snapshots they leave.

Ties the prefix cache, which moves no bytes, to the device, which knows no requests.
"""

from collections.abc import Sequence as Seq

import jax
import numpy as np

from ds41jax.cache.admission import Decision, decide, lifetime_pages, remaining_need
from ds41jax.cache.host_tier import HostTier
from ds41jax.cache.pool import PageLayout, PagePool
from ds41jax.cache.radix import Bank, Reuse
from ds41jax.cache.retained import PrefixCache
from ds41jax.cache.snapshots import BankLimits, CacheOptions, Hit
from ds41jax.config import ModelConfig
from ds41jax.engine.device import Device
from ds41jax.engine.host_copies import HostCopier
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import EngineError
from ds41jax.engine.sequence import Sequence
from ds41jax.model.state import PAGE_ROWS


class Places:
    """The caches of one device, shared out to its sequences. Used by the loop thread alone."""

    def __init__(self, device: Device, config: ModelConfig, options: EngineOptions):
        self.device, self.config, self.options = device, config, options
        self.layout = PageLayout(config.source_ratios, PAGE_ROWS)
        self.pool = PagePool(device.pages)
        self.cache = PrefixCache(
            self.pool,
            self.layout,
            range(options.max_active, device.slots),
            CacheOptions(
                window=config.sliding_window,
                mode=options.reuse,
                prompts=BankLimits(options.retained),
                turns=BankLimits(options.retained),
            ),
            self._host_tier(),
        )
        self.free_slots = list(range(options.max_active))[::-1]

    def _host_tier(self) -> HostTier | None:
        slots = self.options.host_snapshots
        if not slots or self.options.reuse is Reuse.OFF:
            return None
        pages = self.layout.total_pages(self.options.host_tokens)
        copier = HostCopier(self.device, slots, pages)
        if self.options.warm_up:
            copier.warm_up()
        sizes = self.options.host_options(self.config, pages)
        return HostTier(sizes, self.layout, self.pool, copier)

    def admission(self, sequence: Sequence, active: Seq[Sequence]) -> Decision:
        """Whether a waiting sequence fits beside the active ones, and what it would reuse."""
        needs = [
            remaining_need(self.layout, s.lifetime, s.pages) for s in active if s.pages is not None
        ]
        return decide(self.cache, sequence.lifetime, self._lookup(sequence), needs)

    def _lookup(self, sequence: Sequence) -> Hit | None:
        """The best hit; one in host memory is brought back to the device first."""
        symbols = sequence.symbols[: sequence.prompt_length]
        hit = self.cache.lookup(symbols)
        if hit is not None and hit.on_host and self.cache.restore(hit) is None:
            return self.cache.lookup(symbols, host=False)
        return hit

    def too_large(self, sequence: Sequence) -> EngineError:
        """Why a sequence can never be admitted."""
        need = sum(lifetime_pages(self.layout, sequence.lifetime))
        return EngineError(
            "capacity",
            f"{sequence.lifetime.tokens} tokens need {need} pages, the cache has {self.pool.size}",
        )

    def open(self, sequence: Sequence, hit: Hit | None, active: list[Sequence]) -> None:
        """Gives a sequence its slot and pages, with what it reuses in them, and lists it as active.

        Raises:
          PoolExhausted: the pages ran out; what the sequence got by then is its own to give back.
        """
        slot = self.free_slots.pop()
        if hit is not None:
            self.cache.pin(hit)
        sequence.begin(slot, self.cache.open(hit), hit)
        active.append(sequence)
        if hit is not None:
            if hit.arena_slot is not None:
                self.device.copy_slot(hit.arena_slot, slot)
            self.cache.unpin(hit)
        self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Gives a sequence every page of its lifetime, and its own copy of tails that it shares."""
        assert sequence.pages is not None
        reservation = self.cache.reserve([(sequence.pages, sequence.lifetime.tokens)])
        self.device.copy_pages([(c.source, c.target) for c in reservation.copies])
        reservation.apply([sequence.pages.length])
        self.device.set_pages(sequence.slot, sequence.pages)

    def retain(self, sequence: Sequence, bank: Bank, logits: jax.Array | None) -> None:
        """Keeps the sequence as it is now for later prompts."""
        assert sequence.pages is not None
        if bank is Bank.PROMPT and not sequence.snapshots:
            return
        slot = self.cache.retain(
            sequence.symbols[: sequence.count],
            sequence.pages,
            bank,
            # A copy: a view would keep the step's array alive as long as the snapshot.
            None if logits is None else np.array(logits)[0],
            approximate=sequence.approximate,
        )
        if slot is None:
            return
        self.device.copy_slot(sequence.slot, slot)
        if bank is Bank.PROMPT:
            self._grow(sequence)

    def retain_inside(self, sequence: Sequence) -> None:
        """Exact reuse restarts a long prompt from snapshots inside it."""
        every, chunk = self.options.snapshot_every, self.options.prefill_chunk
        crossed = sequence.length // every > (sequence.length - chunk) // every
        if self.options.reuse is Reuse.EXACT and crossed:
            self.retain(sequence, Bank.PROMPT, None)

    def close(self, sequence: Sequence, active: list[Sequence]) -> None:
        """Takes everything back that the sequence holds, wherever it stood."""
        self.cache.release_symbols(sequence.symbols[: sequence.prompt_length])
        if sequence.pages is not None:
            sequence.pages.release()
            active.remove(sequence)
            self.free_slots.append(sequence.slot)
            self.device.rounds.forget_lane()

    def check(self, active: Seq[Sequence]) -> None:
        """Balances every page, slot and image; for tests."""
        self.cache.check([s.pages for s in active if s.pages is not None])
        used = {s.slot for s in active}
        assert used.isdisjoint(self.free_slots)
        assert len(used) + len(self.free_slots) == self.options.max_active
