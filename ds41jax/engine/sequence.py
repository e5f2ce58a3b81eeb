"""One request while it is in the engine: its tokens, its place in the caches, its drafts."""

import enum
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import jax
import numpy as np

from ds41jax.cache.admission import Lifetime
from ds41jax.cache.sequence_pages import SequencePages
from ds41jax.cache.snapshots import Hit
from ds41jax.checkpoint.safetensors_files import CheckpointError
from ds41jax.engine.batching import SequenceRows
from ds41jax.engine.engram_lookup import EngramLookup
from ds41jax.engine.grammar_matcher import Matcher
from ds41jax.engine.request import EngineError, Event, Request
from ds41jax.formats import QuantizedArray

UNSET = -1


class SequenceFault(Exception):
    """One sequence cannot go on; raised before its step has touched anything shared."""

    def __init__(self, sequence: "Sequence", kind: str, message: str):
        super().__init__(message)
        self.sequence, self.error = sequence, EngineError(kind, message)


class StepFault(Exception):
    """A step's rows were computed wrongly or not at all: every sequence that had some fails.

    Nothing else is touched: no length has moved past those rows.
    """

    def __init__(self, sequences: "Iterable[Sequence]", kind: str, message: str):
        super().__init__(message)
        self.sequences, self.error = tuple(sequences), EngineError(kind, message)


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Sequence:
    """A request's host-side state.

    Attributes:
      number: distinguishes requests for the drafting policy; ascending in order of arrival.
      request: what was asked.
      emit: takes each event.
      id: its handle's, for observers.
      tokens, is_image: [capacity] prompt and output; `count` of them are known.
      symbols: what the prefix cache compares, over the same positions.
      image_embeds: [prompt, hidden] or None.
      matcher: the output's constraint, advanced by every emitted token.
      slot, pages: its place in the caches while active.
      length: committed rows: positions below it are in the caches.
      window_floor, global_floor: of its prefill, after a hit.
      approximate: a replay went into its state.
      cached: prompt tokens that needed no computing.
      suffix_from: next row of the second part of a bounded prefill, once that has begun.
      snapshots: whether admission left room for snapshots before its end.
      cancelled: set from any thread; the loop ends it before its next step.
      draft_ids, confidence: the drafted block after the last token.
      drafted, accepted: counts of verified and of accepted drafts.
    """

    number: int
    request: Request
    emit: Callable[[Event], None]
    tokens: np.ndarray
    is_image: np.ndarray
    symbols: np.ndarray
    id: str = ""
    image_embeds: np.ndarray | jax.Array | None = None
    matcher: Matcher | None = None
    phase: Phase = Phase.WAITING
    slot: int = UNSET
    pages: SequencePages | None = None
    count: int = 0
    length: int = 0
    window_floor: int = 0
    global_floor: int = 0
    approximate: bool = False
    cached: int = 0
    suffix_from: int = UNSET
    snapshots: bool = False
    cancelled: bool = False
    draft_ids: list[int] = field(default_factory=list)
    confidence: tuple[float, ...] = ()
    drafted: int = 0
    accepted: int = 0
    _ahead: tuple[int, int, Future[QuantizedArray]] | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def emitted(self) -> int:
        """Tokens emitted so far."""
        return self.count - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - self.emitted

    @property
    def lifetime(self) -> Lifetime:
        """What admission counts."""
        return Lifetime(self.prompt_length, self.request.max_tokens)

    def begin(self, slot: int, pages: SequencePages, hit: Hit | None) -> None:
        """Takes its place in the caches, after what `hit` has brought there."""
        self.slot, self.pages, self.phase = slot, pages, Phase.PREFILL
        if hit is None:
            return
        self.length = self.cached = hit.start
        self.global_floor = hit.shared
        self.approximate = hit.entry.approximate or not hit.exact
        if not hit.exact:
            self.window_floor = hit.start

    def rows(
        self, first: int, last: int, engram: EngramLookup | None, decoder_floor: int = 0
    ) -> SequenceRows:
        """The rows of its prompt at positions first to last - 1."""
        embeds = None
        if self.image_embeds is not None and self.is_image[first:last].any():
            embeds = self.image_embeds[first:last]
        return SequenceRows(
            slot=self.slot,
            start=first,
            token_ids=self.tokens[first:last],
            is_image=self.is_image[first:last],
            image_embeds=embeds,
            engram=self._engram_rows(first, last, engram),
            window_floor=self.window_floor,
            decoder_floor=decoder_floor,
            global_floor=self.global_floor,
        )

    def read_ahead(self, first: int, last: int, engram: EngramLookup, readers: Executor) -> None:
        """Begins to gather the Engram rows of prompt positions that the next step will feed."""
        rows = readers.submit(self._gather, first, last, engram)
        self._ahead = first, last, rows

    def _engram_rows(
        self, first: int, last: int, engram: EngramLookup | None
    ) -> QuantizedArray | None:
        if engram is None:
            return None
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is not None and ahead[:2] == (first, last):
                return ahead[2].result()
            return self._gather(first, last, engram)
        except (CheckpointError, OSError) as error:
            raise SequenceFault(self, "internal", f"Engram tables: {error}") from error

    def _gather(self, first: int, last: int, engram: EngramLookup) -> QuantizedArray:
        before = max(0, first - engram.history)
        rows = slice(before, last)
        return engram.gather(self.tokens[rows], self.is_image[rows], first - before)

    def append(self, token: int) -> None:
        """Takes an emitted token."""
        self.tokens[self.count] = self.symbols[self.count] = token
        self.count += 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def finish_reason(self, token: int, eos_token_id: int) -> str | None:
        """Why the sequence ends with `token`, which it has just taken; None if it goes on."""
        ends = token == eos_token_id and not self.request.ignore_eos
        if ends or token in self.request.stop_token_ids:
            return "stop"
        if self.matcher is not None and self.matcher.finished:
            return "stop"
        return "length" if self.remaining == 0 else None
