"""One sequence from prompt to end, one step at a time: the simplest correct loop.

`generate` and `score` are built on it, and it is the reference that a scheduler must agree with.
"""

from dataclasses import dataclass

import jax
import numpy as np

from ds41jax.config import ModelConfig
from ds41jax.engine import steps
from ds41jax.engine.batching import ROW_BUCKETS, SequenceRows, build_batch
from ds41jax.engine.loading import Model
from ds41jax.formats import QuantizedArray
from ds41jax.kernels.compute import REFERENCE, Compute, Phase
from ds41jax.model.drafter import Draft
from ds41jax.model.sharding import empty_caches
from ds41jax.model.state import PAGE_ROWS, CacheShape, StepBatch


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, with the embeddings that stand in for its image spans.

    Attributes:
      token_ids: [n] int32.
      is_image: [n] bool.
      image_embeds: [n, hidden] float32, or None without images; only image rows matter.
    """

    token_ids: np.ndarray
    is_image: np.ndarray
    image_embeds: np.ndarray | None = None

    @classmethod
    def of_text(cls, token_ids: list[int] | np.ndarray) -> "Prompt":
        ids = np.asarray(token_ids, np.int32)
        return cls(ids, np.zeros(len(ids), bool))


@dataclass(frozen=True)
class StepResult:
    """What a step computed, padded to its row bucket; the first `count` rows are real.

    Attributes:
      padded_logits: [bucket, vocabulary] float32, or [1, vocabulary] if the last row's alone were
        wanted.
      padded_main_hidden: [bucket, targets * hidden], what conditions the drafter.
      count: rows of the step.
    """

    padded_logits: jax.Array
    padded_main_hidden: jax.Array
    count: int

    @property
    def logits(self) -> np.ndarray:
        """[count or 1, vocabulary] float32 on the host."""
        return np.asarray(self.padded_logits)[: self.count]

    @property
    def main_hidden(self) -> np.ndarray:
        """[count, targets * hidden] on the host."""
        return np.asarray(self.padded_main_hidden)[: self.count]


class Session:
    """The caches and the history of one sequence.

    Rows are fed with `prefill` and `step`; `rollback` forgets rejected ones. Every row's result is
    independent of how the rows were split into steps.
    """

    def __init__(self, model: Model, max_length: int, compute: Compute = REFERENCE):
        """Allocates caches for `max_length` positions.

        Raises:
          ValueError: if that exceeds the model's context, or if `compute` has an exchange.
        """
        config = model.config
        if compute.exchange is not None:
            raise ValueError("a session computes every expert itself: use Engine for remote ones")
        if max_length > config.max_position_embeddings:
            raise ValueError(
                f"{max_length} positions exceed the context of {config.max_position_embeddings}"
            )
        self.model, self.compute = model, compute.during(Phase.DECODE)
        self.max_length = max_length
        self.length = 0
        self._tokens = np.zeros(max_length, np.int32)
        self._is_image = np.zeros(max_length, bool)
        pages = -(-max_length // PAGE_ROWS)
        sources = len(config.kv_source_layer_ids)
        shape = (sources, 1, pages)
        self._page_tables = np.arange(sources * pages, dtype=np.int32).reshape(shape)
        whole = model.params.norm.sharding
        self._state = empty_caches(config, CacheShape(1, sources * pages), compute, whole)

    @property
    def _prefill_compute(self) -> Compute:
        return self.compute.during(Phase.PREFILL)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def prefill(self, prompt: Prompt, *, bounded: bool, all_rows: bool = False) -> list[StepResult]:
        """Feeds a whole prompt into an empty session.

        Args:
          bounded: run the layers past the last KV source on the last `sliding_window` rows only.
          all_rows: return the logits of every row that was computed, not of a chunk's last alone.

        Returns:
          One result a chunk of rows that ran through all layers, in order.
        """
        assert self.length == 0, "a session takes one prompt"
        if bounded and self.config.boundary_layer is not None:
            return self._bounded_prefill(prompt, all_rows)
        return [
            self._feed(prompt, slice(first, last), all_rows, self._prefill_compute)
            for first, last in chunks(len(prompt.token_ids))
        ]

    def _bounded_prefill(self, prompt: Prompt, all_rows: bool) -> list[StepResult]:
        count = len(prompt.token_ids)
        for first, last in chunks(count):
            batch, _ = self._batch(prompt, slice(first, last))
            self._state = steps.encode_step(
                self.model.params, self._state, batch, self.config, self._prefill_compute
            )
        kept = max(0, count - self.config.sliding_window)
        results = [
            self._run_suffix(prompt, slice(first, last), kept, all_rows)
            for first, last in chunks(count, kept)
        ]
        self.length = count
        return results

    def _run_suffix(self, prompt: Prompt, rows: slice, floor: int, all_rows: bool) -> StepResult:
        batch, count = self._batch(prompt, rows, all_rows, floor=floor)
        self._state, logits, hidden = steps.suffix_step(
            self.model.params, self._state, batch, self.config, self._prefill_compute
        )
        return StepResult(logits, hidden, count)

    def step(self, token_ids: list[int] | np.ndarray) -> StepResult:
        """Feeds text tokens after all fed so far; returns every row's results."""
        prompt = Prompt.of_text(token_ids)
        rows = slice(0, len(prompt.token_ids))
        return self._feed(prompt, rows, True, self.compute, offset=self.length)

    def rollback(self, length: int) -> None:
        """Forgets rows from position `length` on: they will be overwritten when fed again."""
        assert self.length - self.config.sliding_window <= length <= self.length
        self.length = length

    def draft(self, anchor: int) -> Draft:
        """Drafts the block after `anchor`, a token not fed yet."""
        return steps.draft_step(
            self.model.params,
            self._state,
            np.zeros(1, np.int32),
            np.array([anchor], np.int32),
            np.array([self.length], np.int32),
            self.config,
            self.compute,
        )

    def _feed(
        self, prompt: Prompt, rows: slice, all_rows: bool, compute: Compute, offset: int = 0
    ) -> StepResult:
        batch, count = self._batch(prompt, rows, all_rows, offset)
        self._state, logits, hidden = steps.full_step(
            self.model.params, self._state, batch, self.config, compute
        )
        self.length = rows.stop + offset
        return StepResult(logits, hidden, count)

    def _batch(
        self,
        prompt: Prompt,
        rows: slice,
        all_rows: bool = False,
        offset: int = 0,
        floor: int = 0,
    ) -> tuple[StepBatch, int]:
        """The batch of some rows of a prompt that starts at position `offset`, and their number."""
        first, last = rows.start + offset, rows.stop + offset
        if last > self.max_length:
            raise ValueError(f"position {last - 1} is beyond the session's {self.max_length}")
        self._tokens[first:last] = prompt.token_ids[rows]
        self._is_image[first:last] = prompt.is_image[rows]
        sequence = SequenceRows(
            slot=0,
            start=first,
            token_ids=prompt.token_ids[rows],
            is_image=prompt.is_image[rows],
            image_embeds=None if prompt.image_embeds is None else prompt.image_embeds[rows],
            engram=self._engram_rows(first, last),
            decoder_floor=floor,
        )
        logit_rows = None if all_rows else [len(sequence) - 1]
        batch = build_batch([sequence], self._page_tables, self.config, logit_rows=logit_rows)
        return batch, len(sequence)

    def _engram_rows(self, first: int, last: int) -> QuantizedArray | None:
        engram = self.model.engram
        if engram is None:
            return None
        before = max(0, first - engram.history)
        return engram.gather(self._tokens[before:last], self._is_image[before:last], first - before)


def chunks(end: int, start: int = 0) -> list[tuple[int, int]]:
    """Splits positions into steps no longer than the largest row bucket."""
    size = ROW_BUCKETS[-1]
    return [(first, min(first + size, end)) for first in range(start, end, size)]
