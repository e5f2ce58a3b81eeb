"""The device's side of the engine: caches, page tables, compiled programs and their sizes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ds41jax.cache.sequence_pages import SequencePages
from ds41jax.drafting.fixed import FixedPolicy
from ds41jax.engine import cache_moves, steps
from ds41jax.engine.batching import ROW_BUCKETS, SequenceRows, build_batch, row_bucket
from ds41jax.engine.grammar_matcher import mask_words
from ds41jax.engine.loading import Model
from ds41jax.engine.options import EngineOptions, round_shapes
from ds41jax.engine.rounds import Rounds
from ds41jax.engine.selection import Choices, Outcome, read, select_step
from ds41jax.engine.sequence import Sequence, StepFault
from ds41jax.kernels.compute import Phase
from ds41jax.model.sharding import empty_caches
from ds41jax.model.state import PAGE_ROWS, CacheShape, StepBatch


class Device:
    """Runs steps. Everything is allocated here, once; states are donated from step to step.

    Where steps run is decided here and in `steps` alone. Several devices: the weights come placed,
    the state is placed like them, and the step programs are those of a mesh. Experts elsewhere: a
    call inside the step programs, which `compute` names. Two lanes: two `Rounds` over this one
    state, each read before it makes its next round. The scheduler sees none of it.
    """

    def __init__(self, model: Model, options: EngineOptions, pages: int, slots: int, block: int):
        """`pages` of the pool, `slots` of the caches (arena included), `block` drafts at most."""
        config = model.config
        self.model, self.config = model, config
        self.compute = options.compute.during(Phase.DECODE)
        self.prefill_compute = options.compute.during(Phase.PREFILL)
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
        # Committed to the weights' devices like every later state, so that no program sees two
        # kinds.
        whole = model.params.norm.sharding
        self.state = empty_caches(config, CacheShape(slots, pages), options.compute, whole)
        # Steps without constraints share one mask on the device: nothing is sent for them.
        rows = {shape.rows for shape in self.shapes}
        mask: np.ndarray = np.full((max(rows), self.mask_words), -1, np.int32)
        free_masks = {n: jax.device_put(mask[:n], whole) for n in rows}
        self.rounds = Rounds(config, model.engram, self.shapes, self.page_tables, free_masks)

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
        self.rounds.forget_lane()

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
            self.model.params, self.state, batch, self.config, self.prefill_compute
        )

    def feed(self, batch: StepBatch) -> jax.Array:
        """A chunk of an exact prefill; logits [1, V]."""
        self.state, logits, _ = steps.full_step(
            self.model.params, self.state, batch, self.config, self.prefill_compute
        )
        return logits

    def feed_suffix(self, batch: StepBatch) -> jax.Array:
        """The end of a bounded prefill; logits [1, V]."""
        self.state, logits, _ = steps.suffix_step(
            self.model.params, self.state, batch, self.config, self.prefill_compute
        )
        return logits

    def verify(self, batch: StepBatch) -> jax.Array:
        """Runs the rows of a decode round; logits [rows, V] of them all."""
        self.state, logits, _ = steps.full_step(
            self.model.params, self.state, batch, self.config, self.compute
        )
        return logits

    def check(self, sequences: list[Sequence]) -> None:
        """Raises `StepFault` if an exchange with remote experts failed in the last step.

        Without such experts nothing is read from the device.
        """
        exchange, fault = self.compute.exchange, self.state.fault
        if exchange is None or fault is None:
            return
        if number := int(fault):
            raise StepFault(sequences, "unavailable", exchange.describe(number))

    def upload_logits(self, logits: np.ndarray) -> jax.Array:
        """A saved row of logits [V], as a step would have returned it, placement included."""
        return jax.device_put(logits[None].astype(np.float32), self.model.params.norm.sharding)

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

    # ------------------------------------------------------------------ warm-up

    def warm_up(self, bounded: bool, progress: bool) -> None:
        """Compiles every program by running it on rows that are written nowhere."""
        bounded = bounded and self.config.boundary_layer is not None
        suffix = row_bucket(
            min(self.config.sliding_window, self.chunk_buckets[-1]), self.chunk_buckets
        )
        chunks: list[tuple[Callable[[StepBatch], Any], int]] = []
        for bucket in self.chunk_buckets:
            chunks.append((self.encode if bounded else self.feed, bucket))
            if bounded and bucket <= suffix:
                chunks.append((self.feed_suffix, bucket))
        total = len(self.shapes) + len(chunks)
        with tqdm(total=total, desc="compiling", unit="program", disable=not progress) as bar:
            for shape in self.shapes:
                batch, choices = self.rounds.idle(shape)
                read(self.select(self.verify(batch), choices))
                bar.update()
            for program, rows in chunks:
                program(self.idle_chunk(rows))
                bar.update()
        self.copy_slot(0, 0)
        self.copy_pages([(0, self.pages)])
        jax.block_until_ready(self.state)

    def idle_chunk(self, rows: int) -> StepBatch:
        """A prefill step of padding alone."""
        tokens, engram = np.zeros(1, np.int32), self.model.engram
        found = None if engram is None else engram.gather(tokens, np.zeros(1, bool), 0)
        batch: Any = build_batch(
            [SequenceRows(slot=0, start=0, token_ids=tokens, engram=found)],
            self.page_tables,
            self.config,
            logit_rows=[0],
            buckets=(rows,),
            width=1,
        )
        idle: StepBatch = batch.replace(sequences=np.ones(rows, np.int32))
        return idle
