"""The engine's loop, one step at a time and on one thread: admit, prefill a chunk, decode a round.

Everything is decided here on plain integers; the device sees batches. A request's tokens depend on
that request alone, whatever runs beside it.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from ds41jax.cache.admission import Admission, decide, lifetime_pages, remaining_need
from ds41jax.cache.host_tier import HostOptions, HostTier
from ds41jax.cache.pool import PageLayout, PagePool, PoolExhausted
from ds41jax.cache.radix import Bank, Reuse
from ds41jax.cache.retained import PrefixCache
from ds41jax.cache.sequence_pages import SequencePages
from ds41jax.cache.snapshots import BankLimits, CacheOptions, Hit
from ds41jax.cache.symbols import ImageSpan
from ds41jax.engine.device import Device
from ds41jax.engine.host_copies import HostCopier
from ds41jax.engine.loading import Model
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.prepare import Preparer
from ds41jax.engine.request import (
    EngineError,
    Failed,
    Finished,
    Request,
    Started,
    Token,
    TokenLogprobs,
)
from ds41jax.engine.selection import Outcome
from ds41jax.engine.sequence import UNSET, Phase, Sequence, SequenceFault
from ds41jax.engine.speculation import Speculation
from ds41jax.engine.stats import Counters
from ds41jax.model.state import PAGE_ROWS

ENGRAM_READERS = 2


class EngineCore:
    """All requests of one model on one device. Not thread-safe; `Engine` wraps it."""

    def __init__(self, model: Model, options: EngineOptions):
        options.check(model.config)
        self.model, self.options, self.config = model, options, model.config
        self.dspark = options.dspark and model.params.drafter is not None
        self.block = min(model.config.dspark_block_size, options.policy.limit) if self.dspark else 0
        self.layout = PageLayout(model.config.source_ratios, PAGE_ROWS)
        pages = self.layout.total_pages(options.pool_tokens)
        arena = 2 * options.retained if options.reuse is not Reuse.OFF else 0
        self.device = Device(model, options, pages, options.max_active + arena, self.block)
        self.preparer = Preparer(model, options, self.block)
        self.pool = PagePool(pages)
        self.cache = PrefixCache(
            self.pool,
            self.layout,
            range(options.max_active, options.max_active + arena),
            CacheOptions(
                window=model.config.sliding_window,
                mode=options.reuse,
                prompts=BankLimits(options.retained),
                turns=BankLimits(options.retained),
            ),
            self._host_tier(),
        )
        self.speculation = Speculation(options.policy.copy(), self.block, self.device.mask_words)
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self.counters = Counters()
        self._free_slots = list(range(options.max_active))[::-1]
        self._numbers = itertools.count()
        self._readers = ThreadPoolExecutor(ENGRAM_READERS, thread_name_prefix="engram")

    def _host_tier(self) -> HostTier | None:
        slots = self.options.host_snapshots
        if not slots or self.options.reuse is Reuse.OFF:
            return None
        pages = self.layout.total_pages(self.options.host_tokens)
        copier = HostCopier(self.device, slots, pages)
        sizes = HostOptions(pages=pages, slots=slots, min_tokens=self.config.sliding_window)
        return HostTier(sizes, self.layout, self.pool, copier)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self.waiting and not self.active

    # ------------------------------------------------------------------ requests in

    def add(self, sequence: Sequence) -> None:
        """Puts a prepared sequence at the end of the queue."""
        sequence.number = next(self._numbers)
        request = sequence.request
        spans = [
            ImageSpan(start, stop, image.identity)
            for (start, stop), image in zip(
                self.preparer.image_spans(request), request.images, strict=True
            )
        ]
        sequence.symbols[: sequence.prompt_length] = self.cache.symbols(request.token_ids, spans)
        self.counters.requests += 1
        self.waiting.append(sequence)

    # ------------------------------------------------------------------ the step

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do.

        At most one chunk of one prompt is fed between two decode rounds, so a long prompt delays
        the running requests by a chunk a token, not by its whole length.
        """
        self._drop_cancelled()
        try:
            self._admit()
            worked = self._prefill()
            worked = self._decode() or worked
        except SequenceFault as fault:
            self._fail(fault.sequence, fault.error)
            worked = True
        self.cache.tick()
        return worked

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self.waiting if s.cancelled]:
            self.waiting.remove(sequence)
            self._end(sequence, "cancelled")
        for sequence in [s for s in self.active if s.cancelled]:
            self._end(sequence, "cancelled")

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Starts waiting requests in order of arrival while slots and pages last."""
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            hit = self._lookup(sequence)
            needs = [
                remaining_need(self.layout, s.lifetime, s.pages)
                for s in self.active
                if s.pages is not None
            ]
            decision = decide(self.cache, sequence.lifetime, hit, needs)
            if decision.admission is Admission.WAIT:
                return
            self.waiting.popleft()
            if decision.admission is Admission.NEVER:
                self._fail(sequence, self._too_large(sequence))
                continue
            sequence.snapshots = decision.snapshots
            try:
                self._start(sequence, decision.hit)
            except PoolExhausted as error:
                self._fail(sequence, EngineError("capacity", str(error)))

    def _lookup(self, sequence: Sequence) -> Hit | None:
        """The best hit; one in host memory is brought back to the device first."""
        symbols = sequence.symbols[: sequence.prompt_length]
        hit = self.cache.lookup(symbols)
        if hit is not None and hit.on_host and self.cache.restore(hit) is None:
            return self.cache.lookup(symbols, host=False)
        return hit

    def _too_large(self, sequence: Sequence) -> EngineError:
        need = sum(lifetime_pages(self.layout, sequence.lifetime))
        return EngineError(
            "capacity",
            f"{sequence.lifetime.tokens} tokens need {need} pages, the cache has {self.pool.size}",
        )

    def _start(self, sequence: Sequence, hit: Hit | None) -> None:
        """Gives a request its place in the caches and what it can reuse."""
        slot = self._free_slots.pop()
        if hit is not None:
            self.cache.pin(hit)
        sequence.begin(slot, self.cache.open(hit), hit)
        self.active.append(sequence)
        if hit is not None:
            if hit.arena_slot is not None:
                self.device.copy_slot(hit.arena_slot, slot)
            self.cache.unpin(hit)
        self._grow(sequence)
        sequence.image_embeds = self.preparer.image_embeddings(sequence.request)
        self.counters.prompt_tokens += sequence.prompt_length
        self.counters.cached_tokens += sequence.cached
        sequence.emit(Started(sequence.prompt_length, sequence.cached))
        if hit is not None and hit.logits is not None:
            self._first_token(sequence, self.device.upload_logits(hit.logits))

    def _grow(self, sequence: Sequence) -> None:
        """Gives a sequence every page of its lifetime, and its own copy of tails that it shares."""
        assert sequence.pages is not None
        reservation = self.cache.reserve([(sequence.pages, sequence.lifetime.tokens)])
        self.device.copy_pages([(c.source, c.target) for c in reservation.copies])
        reservation.apply([sequence.pages.length])
        self.device.set_pages(sequence.slot, sequence.pages)

    # ------------------------------------------------------------------ prefill

    def _prefill(self) -> bool:
        """One step of the oldest prompt that is not finished."""
        sequence = next((s for s in self.active if s.phase is Phase.PREFILL), None)
        if sequence is None:
            return False
        self.counters.prefill_steps += 1
        end = sequence.prompt_length
        bounded = self.options.bounded and self.config.boundary_layer is not None
        if sequence.length < end:
            last = min(sequence.length + self.options.prefill_chunk, end)
            rows = sequence.rows(sequence.length, last, self.model.engram)
            if bounded:
                self.device.encode(rows)
            else:
                logits = self.device.feed(rows)
            self._commit(sequence, last)
            if last < end:
                self._read_ahead(sequence)
                self._snapshot_inside(sequence)
            elif not bounded:
                self._finish_prefill(sequence, logits)
            return True
        kept = max(0, end - self.config.sliding_window)
        first = kept if sequence.suffix_from == UNSET else sequence.suffix_from
        last = min(first + self.options.prefill_chunk, end)
        logits = self.device.feed_suffix(
            sequence.rows(first, last, self.model.engram, decoder_floor=kept)
        )
        sequence.suffix_from = last
        if last == end:
            self._finish_prefill(sequence, logits)
        return True

    def _read_ahead(self, sequence: Sequence) -> None:
        """The next chunk's Engram rows come from disk while the device works on this one."""
        if self.model.engram is not None:
            first = sequence.length
            last = min(first + self.options.prefill_chunk, sequence.prompt_length)
            sequence.read_ahead(first, last, self.model.engram, self._readers)

    def _commit(self, sequence: Sequence, length: int) -> None:
        assert sequence.pages is not None
        sequence.length = length
        sequence.pages.length = max(sequence.pages.length, length)

    def _finish_prefill(self, sequence: Sequence, logits: jax.Array) -> None:
        self._retain(sequence, Bank.PROMPT, logits)
        self._first_token(sequence, logits)

    def _snapshot_inside(self, sequence: Sequence) -> None:
        """Exact reuse restarts a long prompt from snapshots inside it."""
        every = self.options.snapshot_every
        chunk = self.options.prefill_chunk
        crossed = sequence.length // every > (sequence.length - chunk) // every
        if self.options.reuse is Reuse.EXACT and crossed:
            self._retain(sequence, Bank.PROMPT, None)

    def _retain(self, sequence: Sequence, bank: Bank, logits: jax.Array | None) -> None:
        """Keeps the sequence as it is now for later prompts."""
        assert sequence.pages is not None
        if bank is Bank.PROMPT and not sequence.snapshots:
            return
        slot = self.cache.retain(
            sequence.symbols[: sequence.count],
            sequence.pages,
            bank,
            None if logits is None else np.asarray(logits)[0],
            approximate=sequence.approximate,
        )
        if slot is None:
            return
        self.device.copy_slot(sequence.slot, slot)
        if bank is Bank.PROMPT:
            self._grow(sequence)

    def _first_token(self, sequence: Sequence, logits: jax.Array) -> None:
        """Chooses from the prompt's last row, which is in the caches already."""
        sequence.phase = Phase.DECODE
        outcome = self.device.select(
            [sequence], [[]], self.speculation.masks([sequence]), logits, fed=0
        )
        _, reason = self._take(sequence, outcome, 0, 0, [])
        self._settle(sequence, reason)

    # ------------------------------------------------------------------ decoding

    def _decode(self) -> bool:
        """One round of every running request: verify drafts, take tokens, draft on."""
        running = [s for s in self.active if s.phase is Phase.DECODE]
        if not running:
            return False
        drafts, masks = self.speculation.choose(running)
        logits = self.device.verify(
            [
                s.rows(s.length, s.length + 1 + len(d), self.model.engram, d)
                for s, d in zip(running, drafts, strict=True)
            ]
        )
        outcome = self.device.select(running, drafts, masks, logits, fed=1)
        self.counters.rounds += 1
        accepted, row = [], 0
        for place, (sequence, own) in enumerate(zip(running, drafts, strict=True)):
            count, reason = self._take(sequence, outcome, place, row, own)
            self._commit(sequence, sequence.length + 1 + count)
            self._settle(sequence, reason)
            accepted.append(count)
            row += 1 + len(own)
        self.speculation.observe(running, drafts, accepted)
        return True

    def _take(
        self, sequence: Sequence, outcome: Outcome, place: int, row: int, drafts: list[int]
    ) -> tuple[int, str | None]:
        """Emits what the target chose as far as the drafts agreed.

        Returns:
          Accepted drafts, and why the sequence ends, if it does.
        """
        accepted, reason = 0, None
        for accepted in range(int(outcome.agreed[place]) + 1):
            token = int(outcome.tokens[row + accepted])
            sequence.append(token)
            sequence.emit(Token(token, logprobs_of(sequence.request, outcome, row + accepted)))
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                break
        self.counters.emitted_tokens += accepted + 1
        self.counters.drafted += len(drafts)
        self.counters.accepted += accepted
        sequence.drafted += len(drafts)
        sequence.accepted += accepted
        if self.dspark:
            sequence.draft_ids = outcome.draft_ids[place].tolist()
            sequence.confidence = tuple(outcome.confidence[place].tolist())
        return accepted, reason

    def _settle(self, sequence: Sequence, reason: str | None) -> None:
        """Ends a sequence that has a reason to; its turn is kept for the next one."""
        if reason is not None:
            self._retain(sequence, Bank.TURN, None)
            self._end(sequence, reason)

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        request = sequence.request
        ends = token == self.config.eos_token_id and not request.ignore_eos
        if ends or token in request.stop_token_ids:
            return "stop"
        if sequence.matcher is not None and sequence.matcher.finished:
            return "stop"
        return "length" if sequence.remaining == 0 else None

    # ------------------------------------------------------------------ requests out

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._leave(sequence)
        self.counters.finished[reason] += 1
        sequence.emit(
            Finished(
                reason=reason,
                prompt_tokens=sequence.prompt_length,
                completion_tokens=sequence.emitted,
                cached_tokens=sequence.cached,
                drafted=sequence.drafted,
                accepted=sequence.accepted,
            )
        )

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        self._leave(sequence)
        self.counters.failed[error.kind] += 1
        sequence.emit(Failed(error))

    def _leave(self, sequence: Sequence) -> None:
        """Gives everything back that the sequence holds."""
        sequence.phase = Phase.DONE
        self.cache.release_symbols(sequence.symbols[: sequence.prompt_length])
        if sequence.pages is None:
            return
        sequence.pages.release()
        self.active.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.speculation.policy.forget(sequence.number)

    def close(self) -> None:
        """Ends the background threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def fail_all(self, error: EngineError) -> None:
        """Ends every request after a step that could not be finished."""
        for sequence in [*self.waiting, *self.active]:
            self._fail(sequence, error)
        self.waiting.clear()

    def check(self) -> None:
        """Balances every page, slot and image; for tests."""
        pages: Iterable[SequencePages | None] = (s.pages for s in self.active)
        self.cache.check([p for p in pages if p is not None])
        used = {s.slot for s in self.active}
        assert used.isdisjoint(self._free_slots)
        assert len(used) + len(self._free_slots) == self.options.max_active


def logprobs_of(request: Request, outcome: Outcome, row: int) -> TokenLogprobs | None:
    """A token's log probabilities, if the request wants them."""
    if request.top_logprobs is None:
        return None
    top = zip(
        outcome.top_ids[row, : request.top_logprobs].tolist(),
        outcome.top_logprobs[row, : request.top_logprobs].tolist(),
        strict=True,
    )
    return TokenLogprobs(float(outcome.logprobs[row]), tuple(top))
