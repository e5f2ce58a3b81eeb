"""The device's side of the engine: caches, page tables, compiled programs and their sizes."""

from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ds41jax.cache.sequence_pages import SequencePages
from ds41jax.drafting.fixed import FixedPolicy
from ds41jax.engine import cache_moves, steps
from ds41jax.engine.batching import ROW_BUCKETS, SequenceRows, build_batch, row_bucket
from ds41jax.engine.engram_lookup import EngramLookup
from ds41jax.engine.grammar_matcher import mask_words
from ds41jax.engine.loading import Model
from ds41jax.engine.options import EngineOptions, RoundShape, round_shape, round_shapes
from ds41jax.engine.sampling import SamplingParams, sampling_rows
from ds41jax.engine.selection import Choices, Outcome, read, select_step
from ds41jax.engine.sequence import Sequence
from ds41jax.model.state import PAGE_ROWS, CacheShape, StepBatch, init_state

_GREEDY = SamplingParams()


class Device:
    """Runs steps. Everything is allocated here, once; states are donated from step to step."""

    def __init__(self, model: Model, options: EngineOptions, pages: int, slots: int, block: int):
        """`pages` of the pool, `slots` of the caches (arena included), `block` drafts at most."""
        config = model.config
        self.model, self.config, self.compute = model, config, options.compute
        self.block, self.pages, self.slots = block, pages, slots
        self.mask_words = mask_words(config.vocab_size)
        adaptive = not isinstance(options.policy, FixedPolicy)
        self.shapes = round_shapes(options.max_active, 1 + block, adaptive)
        # Smaller buckets than the second largest would save little and cost a start its time.
        self.chunk_buckets = (
            *[b for b in ROW_BUCKETS[-2:] if b < options.prefill_chunk],
            options.prefill_chunk,
        )
        width = -(-options.context // PAGE_ROWS)
        sources = len(config.kv_source_layer_ids)
        self.page_tables = np.full((sources, options.max_active, width), pages, np.int32)
        # Committed to the weights' device like every later state, so that no program sees two
        # kinds.
        (device,) = model.params.norm.devices()
        state = init_state(config, CacheShape(slots, pages), options.compute)
        self.state = jax.device_put(state, device)
        # Steps without constraints share one mask on the device: nothing is sent for them.
        rows = {shape.rows for shape in self.shapes}
        self._free_masks = {n: jnp.full((n, self.mask_words), -1, jnp.int32) for n in rows}

    # ------------------------------------------------------------------ caches

    def copy_slot(self, source: int, target: int) -> None:
        """Copies what a sequence keeps in one slot to another."""
        self.state = cache_moves.copy_slot(self.state, np.int32(source), np.int32(target))

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages of the pool, (source, target) each."""
        batch = max(1, len(self.config.kv_source_layer_ids))
        for first in range(0, len(pairs), batch):
            part = pairs[first : first + batch]
            sources, targets = np.zeros(batch, np.int32), np.full(batch, self.pages, np.int32)
            sources[: len(part)] = [source for source, _ in part]
            targets[: len(part)] = [target for _, target in part]
            self.state = cache_moves.copy_pages(self.state, sources, targets)

    def set_pages(self, slot: int, pages: SequencePages) -> None:
        """Makes a sequence's pages known to later steps."""
        pages.write_into(self.page_tables[:, slot])

    # ------------------------------------------------------------------ steps

    def chunk(self, rows: SequenceRows) -> StepBatch:
        """The batch of a prefill step; it asks for the logits of its last row."""
        return build_batch(
            [rows],
            self.page_tables,
            self.config,
            logit_rows=[len(rows) - 1],
            buckets=self.chunk_buckets,
            width=1,
        )

    def encode(self, batch: StepBatch) -> None:
        """A chunk of a bounded prefill."""
        self.state = steps.encode_step(
            self.model.params, self.state, batch, self.config, self.compute
        )

    def feed(self, batch: StepBatch) -> jax.Array:
        """A chunk of an exact prefill; logits [1, V]."""
        self.state, logits, _ = steps.full_step(
            self.model.params, self.state, batch, self.config, self.compute
        )
        return logits

    def feed_suffix(self, batch: StepBatch) -> jax.Array:
        """The end of a bounded prefill; logits [1, V]."""
        self.state, logits, _ = steps.suffix_step(
            self.model.params, self.state, batch, self.config, self.compute
        )
        return logits

    def round(self, sequences: Seq[SequenceRows]) -> StepBatch:
        """The batch of a decode round, padded to the smallest compiled size that holds it."""
        shape = round_shape(self.shapes, len(sequences), sum(map(len, sequences)))
        return build_batch(
            sequences, self.page_tables, self.config, buckets=(shape.rows,), width=shape.width
        )

    def verify(self, batch: StepBatch) -> jax.Array:
        """Runs the rows of a decode round; logits [rows, V] of them all."""
        self.state, logits, _ = steps.full_step(
            self.model.params, self.state, batch, self.config, self.compute
        )
        return logits

    def upload_logits(self, logits: np.ndarray) -> jax.Array:
        """A saved row of logits [V], as a step would have returned it."""
        return jnp.asarray(logits[None], jnp.float32)

    def select(self, logits: jax.Array, choices: Choices) -> Outcome:
        """Chooses tokens of a step's rows and drafts on; the outcome is still on the device."""
        return select_step(
            self.model.params,
            self.state,
            logits,
            choices,
            self.config,
            self.compute,
            self.block > 0,
        )

    def choices(
        self,
        sequences: Seq[Sequence],
        drafts: Seq[Seq[int]],
        masks: Seq[np.ndarray] | None,
        shape: RoundShape,
        fed: int,
    ) -> Choices:
        """What a step's rows are asked.

        Args:
          sequences: whose rows the step has.
          drafts: of each, verified after its anchor row.
          masks: of each, [1 + drafts, words], or None if nothing is constrained.
          shape: of the step, as compiled.
          fed: 1 if the anchor rows stand at the sequences' `length`, 0 if just below it.
        """
        width, rows = shape.width, shape.rows
        counts = [1 + len(own) for own in drafts]
        token_ids = np.zeros(rows, np.int32)
        params, index = [_GREEDY] * rows, [0] * rows
        row = 0
        for s, own, count in zip(sequences, drafts, counts, strict=True):
            token_ids[row + 1 : row + count] = own
            params[row : row + count] = [s.request.sampling] * count
            index[row : row + count] = range(s.emitted, s.emitted + count)
            row += count
        per_sequence = np.zeros((4, width), np.int32)
        per_sequence[0, : len(counts)] = [s.slot for s in sequences]
        per_sequence[1, : len(counts)] = [s.length + fed - 1 for s in sequences]
        per_sequence[2, : len(counts)] = np.cumsum([0, *counts])[:-1]
        per_sequence[3, : len(counts)] = counts
        slots, starts, first_rows, row_counts = per_sequence
        fields: dict[str, Any] = {
            "sampling": sampling_rows(params, index),
            "masks": self._masks(masks, rows),
            "masked": np.bool_(masks is not None),
            "logprobs": np.bool_(any(s.request.top_logprobs is not None for s in sequences)),
            "token_ids": token_ids,
            "slots": slots,
            "starts": starts,
            "first_rows": first_rows,
            "counts": row_counts,
        }
        return Choices(**fields)

    def _masks(self, masks: Seq[np.ndarray] | None, rows: int) -> jax.Array | np.ndarray:
        if masks is None:
            return self._free_masks[rows]
        joined: np.ndarray = np.full((rows, self.mask_words), -1, np.int32)
        joined[: sum(map(len, masks))] = np.concatenate(masks)
        return joined

    # ------------------------------------------------------------------ warm-up

    def warm_up(self, bounded: bool, engram: EngramLookup | None, progress: bool) -> None:
        """Compiles every program by running it on rows that are written nowhere."""
        bounded = bounded and self.config.boundary_layer is not None
        suffix = row_bucket(
            min(self.config.sliding_window, self.chunk_buckets[-1]), self.chunk_buckets
        )
        jobs: list[tuple[Any, int, int]] = [
            (self._warm_round, s.rows, s.width) for s in self.shapes
        ]
        for bucket in self.chunk_buckets:
            jobs.append((self._warm_encode if bounded else self._warm_feed, bucket, 1))
        if bounded:
            buckets = [b for b in self.chunk_buckets if b <= suffix]
            jobs += [(self._warm_suffix, bucket, 1) for bucket in buckets]
        for job, rows, width in tqdm(jobs, desc="compiling", unit="program", disable=not progress):
            job(self._idle_batch(rows, width, engram, job == self._warm_round))
        self.copy_slot(0, 0)
        self.copy_pages([(0, self.pages)])
        jax.block_until_ready(self.state)

    def _idle_batch(
        self, rows: int, width: int, engram: EngramLookup | None, every_row: bool
    ) -> Any:
        """A batch of padding alone."""
        tokens = np.zeros(1, np.int32)
        found = None if engram is None else engram.gather(tokens, np.zeros(1, bool), 0)
        batch = build_batch(
            [SequenceRows(slot=0, start=0, token_ids=tokens, engram=found)],
            self.page_tables,
            self.config,
            logit_rows=None if every_row else [0],
            buckets=(rows,),
            width=width,
        )
        return batch.replace(sequences=np.full(rows, width, np.int32))  # type: ignore[attr-defined]

    def _warm_round(self, batch: Any) -> None:
        self.state, logits, _ = steps.full_step(
            self.model.params, self.state, batch, self.config, self.compute
        )
        read(self.select(logits, self.choices([], [], None, shape_of(batch), fed=1)))

    def _warm_encode(self, batch: Any) -> None:
        self.state = steps.encode_step(
            self.model.params, self.state, batch, self.config, self.compute
        )

    def _warm_feed(self, batch: Any) -> None:
        self.state, *_ = steps.full_step(
            self.model.params, self.state, batch, self.config, self.compute
        )

    def _warm_suffix(self, batch: Any) -> None:
        self.state, *_ = steps.suffix_step(
            self.model.params, self.state, batch, self.config, self.compute
        )


def shape_of(batch: StepBatch) -> RoundShape:
    """The compiled size of a round's batch."""
    return RoundShape(width=batch.starts.shape[0], rows=batch.positions.shape[0])
