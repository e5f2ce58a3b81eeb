"""Builds the `StepBatch` of a step from the rows of its sequences, padded to a row bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray
from ds41jax.model.state import StepBatch

ROW_BUCKETS = (1, 8, 64, 256)


@dataclass(frozen=True)
class SequenceRows:
    """Rows that one sequence contributes to a step.

    Attributes:
      slot: its cache slot.
      start: position of the first row.
      token_ids: [n] int32.
      is_image: [n] bool, or None if no row is.
      image_embeds: [n, hidden] (only image rows matter), or None.
      engram: FP8_GROUP rows [n, layers, columns, width] in numpy, or None.
      window_floor, decoder_floor, global_floor: see `StepBatch`.
    """

    slot: int
    start: int
    token_ids: np.ndarray
    is_image: np.ndarray | None = None
    image_embeds: np.ndarray | jax.Array | None = None
    engram: QuantizedArray | None = None
    window_floor: int = 0
    decoder_floor: int = 0
    global_floor: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


def row_bucket(rows: int, buckets: Sequence[int] = ROW_BUCKETS) -> int:
    """The smallest bucket that holds `rows`."""
    for bucket in buckets:
        if rows <= bucket:
            return bucket
    raise ValueError(f"{rows} rows exceed the largest row bucket, {buckets[-1]}")


def build_batch(
    sequences: Sequence[SequenceRows],
    page_tables: np.ndarray,
    config: ModelConfig,
    *,
    logit_rows: Sequence[int] | None = None,
    buckets: Sequence[int] = ROW_BUCKETS,
    width: int | None = None,
) -> StepBatch:
    """Lays the rows of sequences one after another.

    Args:
      sequences: at most one entry a slot.
      page_tables: [sources, slots, pages] int32, by cache slot.
      logit_rows: rows whose logits are wanted; all rows of the bucket if None.
      buckets: allowed numbers of rows, ascending.
      width: sequences that the batch has room for; one for every slot if None.
    """
    bucket = row_bucket(sum(len(s) for s in sequences), buckets)
    width = page_tables.shape[1] if width is None else width
    starts = [s.start for s in sequences]
    ends = [s.start + len(s) for s in sequences]
    slots = _joined([[s.slot for s in sequences]], width)
    numbers = [np.full(len(s), i) for i, s in enumerate(sequences)]
    fields: dict[str, Any] = {
        "token_ids": _joined([s.token_ids for s in sequences], bucket),
        "positions": _joined([np.arange(*span) for span in zip(starts, ends, strict=True)], bucket),
        "sequences": _joined(numbers, bucket, fill=width),
        "is_image": _joined([_flags(s) for s in sequences], bucket, bool),
        "image_embeds": _image_embeds(sequences, bucket, config),
        "engram": _engram_rows(sequences, bucket, config),
        "slots": slots,
        "starts": _joined([starts], width),
        "ends": _joined([ends], width),
        "window_floor": _joined([[s.window_floor for s in sequences]], width),
        "decoder_floor": _joined([[s.decoder_floor for s in sequences]], width),
        "global_floor": _joined([[s.global_floor for s in sequences]], width),
        "page_tables": page_tables[:, slots],
        "logit_rows": np.asarray(range(bucket) if logit_rows is None else logit_rows, np.int32),
    }
    return StepBatch(**fields)


def _joined(parts: Sequence[Any], length: int, dtype: type = np.int32, fill: int = 0) -> np.ndarray:
    """The parts one after another, padded to `length`."""
    joined: np.ndarray = np.full(length, fill, dtype)
    joined[: sum(map(len, parts))] = np.concatenate(parts)
    return joined


def _flags(sequence: SequenceRows) -> np.ndarray:
    if sequence.is_image is None:
        return np.zeros(len(sequence), bool)
    return sequence.is_image


def _image_embeds(
    sequences: Sequence[SequenceRows], rows: int, config: ModelConfig
) -> jax.Array | None:
    """[rows, hidden] on the device; None keeps text-only steps on their own, smaller program."""
    if all(s.image_embeds is None for s in sequences):
        return None
    parts = [
        jnp.zeros((len(s), config.hidden_size)) if s.image_embeds is None else s.image_embeds
        for s in sequences
    ]
    joined = jnp.concatenate([jnp.asarray(part, jnp.float32) for part in parts])
    return jnp.pad(joined, ((0, rows - joined.shape[0]), (0, 0)))


def _engram_rows(
    sequences: Sequence[SequenceRows], rows: int, config: ModelConfig
) -> QuantizedArray | None:
    if not config.engram_layer_ids:
        return None
    shape = (rows, len(config.engram_layer_ids), config.engram_columns)
    codes = np.zeros((*shape, config.engram_head_dim), ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*shape, config.engram_head_dim // Format.FP8_GROUP.group), np.uint8)
    at = 0
    for s in sequences:
        assert s.engram is not None, "this model needs Engram rows for every sequence"
        codes[at : at + len(s)] = s.engram.codes
        scales[at : at + len(s)] = s.engram.scales
        at += len(s)
    return QuantizedArray(codes, scales, format=Format.FP8_GROUP)
