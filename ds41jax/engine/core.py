"""The engine's loop, one step at a time and on one thread: admit, prefill a chunk, decode a round.

Everything is decided here on plain integers; the device sees batches. A request's tokens depend on
that request alone, whatever runs beside it.
"""

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np

from ds41jax.cache.admission import Admission
from ds41jax.cache.pool import PageLayout, PoolExhausted
from ds41jax.cache.radix import Bank, Reuse
from ds41jax.cache.symbols import ImageSpan
from ds41jax.engine.device import Device
from ds41jax.engine.loading import Model, on_cards
from ds41jax.engine.observer import (
    DecodeRound,
    PrefillStep,
    RequestRound,
    StepTimes,
    Stopwatch,
    Watched,
)
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.places import Places
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
from ds41jax.engine.selection import Outcome, read
from ds41jax.engine.sequence import UNSET, Phase, Sequence, SequenceFault, StepFault
from ds41jax.engine.speculation import Speculation
from ds41jax.engine.stats import Counters
from ds41jax.model.state import PAGE_ROWS

ENGRAM_READERS = 2


class EngineCore:
    """All requests of one model on one device. Not thread-safe; `Engine` wraps it."""

    def __init__(self, model: Model, options: EngineOptions):
        options.check(model.config)
        cards = options.find_cards()
        model = on_cards(model, cards)
        options = replace(options, compute=replace(options.compute, cards=cards))
        self.model, self.options, self.config = model, options, model.config
        self.dspark = options.dspark and model.params.drafter is not None
        self.block = min(model.config.dspark_block_size, options.policy.limit) if self.dspark else 0
        pages = PageLayout(model.config.source_ratios, PAGE_ROWS).total_pages(options.pool_tokens)
        arena = 2 * options.retained if options.reuse is not Reuse.OFF else 0
        self.device = Device(model, options, pages, options.max_active + arena, self.block)
        self.preparer = Preparer(model, options, self.block)
        self.places = Places(self.device, model.config, options)
        self.cache, self.pool = self.places.cache, self.places.pool
        self.speculation = Speculation(
            options.policy.copy(), self.block, self.device.mask_words, model.config.eos_token_id
        )
        self.watched = Watched()
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self.counters = Counters()
        self._numbers = itertools.count()
        self._readers = ThreadPoolExecutor(ENGRAM_READERS, thread_name_prefix="engram")

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
        except StepFault as fault:
            for sequence in fault.sequences:
                self._fail(sequence, fault.error)
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
        while self.waiting and self.places.free_slots:
            sequence = self.waiting[0]
            decision = self.places.admission(sequence, self.active)
            if decision.admission is Admission.WAIT:
                return
            self.waiting.popleft()
            if decision.admission is Admission.NEVER:
                self._fail(sequence, self.places.too_large(sequence))
                continue
            sequence.snapshots = decision.snapshots
            try:
                self.places.open(sequence, decision.hit, self.active)
                self._start(sequence, None if decision.hit is None else decision.hit.logits)
            except PoolExhausted as error:
                self._fail(sequence, EngineError("capacity", str(error)))

    def _start(self, sequence: Sequence, logits: np.ndarray | None) -> None:
        """Begins with a sequence that has its place; saved logits are its whole prefill."""
        sequence.image_embeds = self.preparer.image_embeddings(sequence.request)
        self.counters.prompt_tokens += sequence.prompt_length
        self.counters.cached_tokens += sequence.cached
        sequence.emit(Started(sequence.prompt_length, sequence.cached))
        if logits is not None:
            self._first_token(sequence, self.device.upload_logits(logits), Stopwatch())

    # ------------------------------------------------------------------ prefill

    def _prefill(self) -> bool:
        """One step of the oldest prompt that is not finished."""
        sequence = next((s for s in self.active if s.phase is Phase.PREFILL), None)
        if sequence is None:
            return False
        self.counters.prefill_steps += 1
        watch = Stopwatch()
        if sequence.length < sequence.prompt_length:
            rows = self._prefill_chunk(sequence, watch)
        else:
            rows = self._prefill_suffix(sequence, watch)
        self.counters.times.add(watch.times)
        if self.watched.observer is not None:
            done, total = self._progress(sequence)
            self.watched.tell(PrefillStep(sequence.id, done, total, rows, watch.times))
        return True

    @property
    def _bounded(self) -> bool:
        return self.options.bounded and self.config.boundary_layer is not None

    def _prefill_chunk(self, sequence: Sequence, watch: Stopwatch) -> int:
        """The next rows of a prompt, through the layers that need them all; their number."""
        first, end = sequence.length, sequence.prompt_length
        last = min(first + self.options.prefill_chunk, end)
        batch = self.device.chunk(sequence.rows(first, last, self.model.engram))
        watch.lap("build")
        logits = None
        if self._bounded:
            self.device.encode(batch)
        else:
            logits = self.device.feed(batch)
        self.device.check([sequence])
        watch.lap("dispatch")
        self._commit(sequence, last)
        if last < end:
            self._read_ahead(sequence)
            self.places.retain_inside(sequence)
        elif logits is not None:
            self._finish_prefill(sequence, logits, watch)
        watch.lap("emit")
        return last - first

    def _prefill_suffix(self, sequence: Sequence, watch: Stopwatch) -> int:
        """The end of a bounded prefill: later layers, on the prompt's last window of rows."""
        end = sequence.prompt_length
        kept = max(0, end - self.config.sliding_window)
        first = kept if sequence.suffix_from == UNSET else sequence.suffix_from
        last = min(first + self.options.prefill_chunk, end)
        rows = sequence.rows(first, last, self.model.engram, decoder_floor=kept)
        batch = self.device.chunk(rows)
        watch.lap("build")
        logits = self.device.feed_suffix(batch)
        self.device.check([sequence])
        watch.lap("dispatch")
        sequence.suffix_from = last
        if last == end:
            self._finish_prefill(sequence, logits, watch)
        watch.lap("emit")
        return last - first

    def _progress(self, sequence: Sequence) -> tuple[int, int]:
        """Rows of a prompt's prefill that are done, and all of them."""
        end = sequence.prompt_length
        if not self._bounded:
            return min(sequence.length, end), end
        window = min(end, self.config.sliding_window)
        suffix = 0 if sequence.suffix_from == UNSET else sequence.suffix_from - (end - window)
        return min(sequence.length, end) + suffix, end + window

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

    def _finish_prefill(self, sequence: Sequence, logits: jax.Array, watch: Stopwatch) -> None:
        self.places.retain(sequence, Bank.PROMPT, logits)
        self._first_token(sequence, logits, watch)

    def _first_token(self, sequence: Sequence, logits: jax.Array, watch: Stopwatch) -> None:
        """Chooses from the prompt's last row, which is in the caches already."""
        sequence.phase = Phase.DECODE
        masks = self.speculation.masks([sequence])
        watch.lap("choose")
        choices = self.device.rounds.choices_after(sequence, masks)
        watch.lap("build")
        chosen = self.device.select(logits, choices)
        watch.lap("dispatch")
        outcome = read(chosen)
        watch.lap("wait")
        _, reason = self._take(sequence, outcome, 0, 0, [])
        self._settle(sequence, reason)

    # ------------------------------------------------------------------ decoding

    def _decode(self) -> bool:
        """One round of every running request: verify drafts, take tokens, draft on."""
        running = [s for s in self.active if s.phase is Phase.DECODE]
        if not running:
            return False
        watch = Stopwatch()
        drafts, masks = self.speculation.choose(running)
        watch.lap("choose")
        made = self.device.rounds.make(running, drafts, masks)
        drafts = made.drafts
        watch.lap("build")
        chosen = self.device.select(self.device.verify(made.batch), made.choices)
        watch.lap("dispatch")
        outcome = read(chosen)
        self.device.check(running)
        watch.lap("wait")
        accepted = self._take_round(running, drafts, outcome)
        self.speculation.observe(running, drafts, accepted)
        watch.lap("emit")
        self.counters.times.add(watch.times)
        if self.watched.observer is not None:
            self._tell_round(running, drafts, accepted, made.shape.rows, watch.times)
        return True

    def _tell_round(
        self,
        running: list[Sequence],
        drafts: list[list[int]],
        accepted: list[int],
        padded: int,
        times: StepTimes,
    ) -> None:
        policy = self.speculation.policy.stats() if self.dspark else {"mode": "off"}
        offered = self.speculation.offered
        requests = [
            RequestRound(
                request_id=s.id,
                position=s.count - count - 1,
                drafted=tuple(block),
                verified=len(own),
                accepted=count,
                emitted=tuple(s.tokens[s.count - count - 1 : s.count].tolist()),
            )
            for s, block, own, count in zip(running, offered, drafts, accepted, strict=True)
        ]
        rows = len(running) + sum(map(len, drafts))
        self.watched.tell(DecodeRound(tuple(requests), rows, padded, times, policy))

    def _take_round(
        self, running: list[Sequence], drafts: list[list[int]], outcome: Outcome
    ) -> list[int]:
        """Gives every sequence its tokens of a round; how many drafts of each were accepted."""
        self.counters.rounds += 1
        accepted, row = [], 0
        for place, (sequence, own) in enumerate(zip(running, drafts, strict=True)):
            count, reason = self._take(sequence, outcome, place, row, own)
            self._commit(sequence, sequence.length + 1 + count)
            self._settle(sequence, reason)
            accepted.append(count)
            row += 1 + len(own)
        return accepted

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
            reason = sequence.finish_reason(token, self.config.eos_token_id)
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
            self.places.retain(sequence, Bank.TURN, None)
            self._end(sequence, reason)

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
        if sequence.pages is not None:
            self.speculation.policy.forget(sequence.number)
        self.places.close(sequence, self.active)

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
        self.places.check(self.active)


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
