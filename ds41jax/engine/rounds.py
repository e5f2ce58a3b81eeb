"""The arrays of a decode round, made for all its sequences at once.

A round of sixteen requests has a hundred rows; one at a time they would cost more than the round
may take on the host. So rows are laid out with numpy, what depends on the set of running sequences
alone is kept while that set stays the same, and Engram rows are hashed and read together.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ds41jax.cache.symbols import FIRST_IMAGE_SYMBOL
from ds41jax.config import ModelConfig
from ds41jax.engine.engram_lookup import EngramLookup
from ds41jax.engine.options import RoundShape, round_shape
from ds41jax.engine.sampling import SamplingParams, SamplingRows, sampling_rows
from ds41jax.engine.selection import Choices
from ds41jax.engine.sequence import Sequence, SequenceFault
from ds41jax.formats import Format, QuantizedArray
from ds41jax.model.engram_hash import UNREACHABLE
from ds41jax.model.state import StepBatch

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Lane:
    """What a set of running sequences has in common from round to round, padded to B places.

    Attributes:
      numbers: of the sequences.
      width: B.
      slots: [B] int32; page_tables: [N, B, pages] on the device.
      sampling: of each place, with one greedy place more for padding rows.
      logprobs: whether any wants log probabilities.
    """

    numbers: tuple[int, ...]
    width: int
    slots: np.ndarray
    page_tables: jax.Array
    sampling: SamplingRows
    logprobs: np.bool_


@dataclass(frozen=True)
class Round:
    """A round ready to run.

    Attributes:
      batch: for the target.
      choices: for `select_step`.
      drafts: of each sequence, those that are verified: fewer than asked where Engram rows of a
        draft are broken.
    """

    batch: StepBatch
    choices: Choices
    drafts: list[list[int]]
    shape: RoundShape


@dataclass(frozen=True)
class _Layout:
    """Where the rows of a round lie: T rows, B places.

    Attributes:
      counts, first_rows: [B] rows of each sequence, and its first one.
      place: [T] the sequence's place, B for padding; offset: [T] rows of it before this one.
    """

    shape: RoundShape
    total: int
    counts: np.ndarray
    first_rows: np.ndarray
    place: np.ndarray
    offset: np.ndarray

    @classmethod
    def of(cls, shape: RoundShape, counts: list[int]) -> "_Layout":
        padded = np.zeros(shape.width, np.int32)
        padded[: len(counts)] = counts
        first_rows = np.zeros(shape.width, np.int32)
        np.cumsum(padded[:-1], out=first_rows[1:])
        total = sum(counts)
        place = np.full(shape.rows, shape.width, np.int32)
        place[:total] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        offset = np.zeros(shape.rows, np.int32)
        offset[:total] = np.arange(total, dtype=np.int32) - first_rows[place[:total]]
        return cls(shape, total, padded, first_rows, place, offset)

    def per_place(self, values: list[int]) -> np.ndarray:
        """[B] int32, zero in unused places."""
        padded = np.zeros(self.shape.width, np.int32)
        padded[: len(values)] = values
        return padded


class Rounds:
    """Makes the rounds of one lane of sequences; used by the loop thread alone.

    Engram rows go into buffers that are used again: a round must have been read before the next
    one is made.
    """

    def __init__(
        self,
        config: ModelConfig,
        engram: EngramLookup | None,
        shapes: tuple[RoundShape, ...],
        page_tables: np.ndarray,
        free_masks: dict[int, jax.Array],
    ):
        """`page_tables` [N, S, pages] by slot, kept up to date by its owner; see `forget_lane`.

        `free_masks`: by number of rows, masks that forbid nothing, on the device.
        """
        self.config, self.engram, self.shapes = config, engram, shapes
        self._page_tables, self._free_masks = page_tables, free_masks
        self._lane: Lane | None = None
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._constant: dict[RoundShape, dict[str, np.ndarray]] = {}

    def forget_lane(self) -> None:
        """A slot has another page table now, or none: an idle engine keeps nothing of a round."""
        self._lane = None

    def make(
        self, running: Seq[Sequence], drafts: list[list[int]], masks: Seq[np.ndarray] | None
    ) -> Round:
        """The round that feeds every sequence's last token and its drafts.

        Args:
          masks: of each sequence [1 + drafts, words], or None if nothing is constrained.

        Raises:
          SequenceFault: the Engram rows of a sequence's last token are broken.
        """
        while True:
            counts = [1 + len(own) for own in drafts]
            layout = _Layout.of(round_shape(self.shapes, len(running), sum(counts)), counts)
            tokens, rows = self._tokens(running, drafts, layout)
            engram, broken = self._engram(tokens, rows, layout)
            if not broken.any():
                break
            drafts = _without_broken(running, drafts, layout, broken)
            if masks is not None:
                masks = [m[: 1 + len(d)] for m, d in zip(masks, drafts, strict=True)]
        token_ids = np.zeros(layout.shape.rows, np.int32)
        token_ids[: layout.total] = tokens[rows]
        lane = self._lane_of(running, layout.shape.width)
        starts = layout.per_place([s.length for s in running])
        batch = self._batch(lane, layout, token_ids, starts, engram)
        index = layout.per_place([s.emitted for s in running])
        choices = self._choices(lane, layout, token_ids, starts, index, masks)
        return Round(batch, choices, drafts, layout.shape)

    def choices_after(self, sequence: Sequence, masks: Seq[np.ndarray] | None) -> Choices:
        """What the last row of a sequence, which is in the caches already, is asked."""
        layout = _Layout.of(RoundShape(1, 1), [1])
        starts, index = (
            layout.per_place([sequence.length - 1]),
            layout.per_place([sequence.emitted]),
        )
        lane = self._new_lane((sequence,), 1)
        return self._choices(lane, layout, np.zeros(1, np.int32), starts, index, masks)

    def idle(self, shape: RoundShape) -> tuple[StepBatch, Choices]:
        """A round of padding alone, to warm up with."""
        layout = _Layout.of(shape, [])
        lane = self._new_lane((), shape.width)
        tokens, none = np.zeros(shape.rows, np.int32), np.zeros(shape.width, np.int32)
        engram, _ = self._engram(tokens[:0], tokens[:0], layout)
        batch = self._batch(lane, layout, tokens, none, engram)
        return batch, self._choices(lane, layout, tokens, none, none, None)

    # ------------------------------------------------------------------ rows

    def _tokens(
        self, running: Seq[Sequence], drafts: Seq[Seq[int]], layout: _Layout
    ) -> tuple[np.ndarray, np.ndarray]:
        """All sequences' rows with the tokens before each, and where the rows lie among them."""
        history = 0 if self.engram is None else self.engram.history
        flat: list[int] = []
        for sequence, own in zip(running, drafts, strict=True):
            flat += _recent(sequence, history)
            flat += own
        rows = np.arange(layout.total) + history * (layout.place[: layout.total] + 1)
        return np.array(flat, np.int64), rows

    def _engram(
        self, tokens: np.ndarray, rows: np.ndarray, layout: _Layout
    ) -> tuple[QuantizedArray | None, np.ndarray]:
        """The rows' Engram rows, padded, and which of them are broken."""
        if self.engram is None:
            return None, np.zeros(0, bool)
        count = layout.shape.rows
        if count not in self._rows:
            shape = (count, len(self.config.engram_layer_ids), self.config.engram_columns)
            width = self.config.engram_head_dim
            codes = np.zeros((*shape, width), np.uint8)
            self._rows[count] = (
                codes,
                np.zeros((*shape, width // Format.FP8_GROUP.group), np.uint8),
            )
        codes, scales = self._rows[count]
        broken = self.engram.take(tokens, rows, codes, scales)
        found: Any = codes.view(ml_dtypes.float8_e4m3fn)
        return QuantizedArray(found, scales, format=Format.FP8_GROUP), broken

    def _lane_of(self, running: Seq[Sequence], width: int) -> Lane:
        numbers = tuple(s.number for s in running)
        lane = self._lane
        if lane is None or lane.numbers != numbers or lane.width != width:
            lane = self._lane = self._new_lane(running, width)
        return lane

    def _new_lane(self, running: Seq[Sequence], width: int) -> Lane:
        slots = np.zeros(width, np.int32)
        slots[: len(running)] = [s.slot for s in running]
        params = [s.request.sampling for s in running]
        return Lane(
            numbers=tuple(s.number for s in running),
            width=width,
            slots=slots,
            page_tables=jax.device_put(self._page_tables[:, slots]),
            sampling=sampling_rows(
                params + [_GREEDY] * (width + 1 - len(params)), [0] * (width + 1)
            ),
            logprobs=np.bool_(any(s.request.top_logprobs is not None for s in running)),
        )

    # ------------------------------------------------------------------ what the programs take

    def _batch(
        self,
        lane: Lane,
        layout: _Layout,
        token_ids: np.ndarray,
        starts: np.ndarray,
        engram: QuantizedArray | None,
    ) -> StepBatch:
        shape = layout.shape
        if shape not in self._constant:
            self._constant[shape] = {
                "is_image": np.zeros(shape.rows, bool),
                "logit_rows": np.arange(shape.rows, dtype=np.int32),
                "floor": np.zeros(shape.width, np.int32),
            }
        constant = self._constant[shape]
        floor: Any = constant["floor"]
        positions = np.append(starts, np.int32(0))[layout.place] + layout.offset
        fields: dict[str, Any] = {
            "token_ids": token_ids,
            "positions": positions,
            "sequences": layout.place,
            "is_image": constant["is_image"],
            "image_embeds": None,
            "engram": engram,
            "slots": lane.slots,
            "starts": starts,
            "ends": starts + layout.counts,
            "window_floor": floor,
            "decoder_floor": floor,
            "global_floor": floor,
            "page_tables": lane.page_tables,
            "logit_rows": constant["logit_rows"],
        }
        return StepBatch(**fields)

    def _choices(
        self,
        lane: Lane,
        layout: _Layout,
        token_ids: np.ndarray,
        starts: np.ndarray,
        index: np.ndarray,
        masks: Seq[np.ndarray] | None,
    ) -> Choices:
        """`index` [B]: of the token that each sequence emits next."""
        sampling: Any = jax.tree.map(lambda x: x[layout.place], lane.sampling)
        emitted = np.append(index, np.int32(0))[layout.place] + layout.offset
        fields: dict[str, Any] = {
            "sampling": sampling.replace(index=emitted),
            "masks": self._masks(masks, layout.shape.rows),
            "masked": np.bool_(masks is not None),
            "logprobs": lane.logprobs,
            "token_ids": token_ids,
            "slots": lane.slots,
            "starts": starts,
            "first_rows": layout.first_rows,
            "counts": layout.counts,
        }
        return Choices(**fields)

    def _masks(self, masks: Seq[np.ndarray] | None, rows: int) -> jax.Array | np.ndarray:
        free = self._free_masks[rows]
        if masks is None:
            return free
        joined: np.ndarray = np.full(free.shape, -1, np.int32)
        joined[: sum(map(len, masks))] = np.concatenate(masks)
        return joined


def _recent(sequence: Sequence, history: int) -> list[int]:
    """Its last token, after the `history` ones before; UNREACHABLE before the start and in images.

    Symbols tell images apart from text.
    """
    first = sequence.length - history
    known: list[int] = sequence.symbols[max(first, 0) : sequence.length + 1].tolist()
    if len(known) <= history:
        known = [UNREACHABLE] * (history + 1 - len(known)) + known
    if max(known) >= FIRST_IMAGE_SYMBOL:
        known = [UNREACHABLE if symbol >= FIRST_IMAGE_SYMBOL else symbol for symbol in known]
    return known


def _without_broken(
    running: Seq[Sequence], drafts: list[list[int]], layout: _Layout, broken: np.ndarray
) -> list[list[int]]:
    """The drafts cut before the first broken one: it cannot be verified, and need not be."""
    kept = []
    for sequence, own, first in zip(running, drafts, layout.first_rows, strict=False):
        mine = broken[first : first + 1 + len(own)]
        if mine[0]:
            raise SequenceFault(sequence, "internal", "Engram tables: a row of it holds a NaN")
        kept.append(own[: int(mine.argmax()) - 1] if mine.any() else own)
    return kept
