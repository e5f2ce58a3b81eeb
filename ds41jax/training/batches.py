"""Training rows to a step's batch.

A row holds several documents one after another; each begins with the beginning-of-sentence token.
To the model a row is a cache slot and a document a sequence of it, so no document sees another.

Letters: R rows, L tokens a row, T = R * L, D documents a step has room for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from ds41jax.config import ModelConfig
from ds41jax.model.engram_hash import EngramHash
from ds41jax.model.state import PAGE_ROWS, CacheShape, StepBatch

DOCUMENTS = 24  # a row; further ones of a row count as part of the last
WEIGHT_UNIT = 16  # stored loss weights are sixteenths


@struct.dataclass
class TrainingBatch:
    """One step's data, in numpy or on the device.

    Attributes:
      tokens, targets: [T] int32; weights: [T] float32 loss weight of each target.
      documents: [T] int32 document of each token; starts, ends: [D] int32 its place in its row.
      engram_ids: [T, layers, columns] int32 table rows, or None.
    """

    tokens: Any
    targets: Any
    weights: Any
    documents: Any
    starts: Any
    ends: Any
    engram_ids: Any


@dataclass(frozen=True)
class Shape:
    """Rows of a step and tokens of a row."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def cache(self, config: ModelConfig) -> CacheShape:
        """Caches that hold one step's rows: every source has pages of its own for every row."""
        pages = len(config.kv_source_layer_ids) * self.rows * self.pages
        return CacheShape(slots=self.rows, pages=pages)

    @property
    def pages(self) -> int:
        return -(-self.length // PAGE_ROWS)


def make_batch(
    tokens: np.ndarray, weights: np.ndarray, config: ModelConfig, hash_: EngramHash | None
) -> TrainingBatch:
    """Builds a batch on the host.

    Args:
      tokens: [R, L + 1] ids; weights: [R, L + 1] loss weights in sixteenths, of each token as a
        target. The first token of a document is never a target.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    tokens = tokens.astype(np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    begins = inputs == config.bos_token_id
    begins[:, 0] = True
    order = np.minimum(np.cumsum(begins, axis=1) - 1, DOCUMENTS - 1)
    documents = order + DOCUMENTS * np.arange(rows)[:, None]
    place = np.broadcast_to(np.arange(length), documents.shape)
    starts = np.full(rows * DOCUMENTS, length, np.int32)
    np.minimum.at(starts, documents, place.astype(np.int32))
    ends = np.zeros(rows * DOCUMENTS, np.int32)
    np.maximum.at(ends, documents, place.astype(np.int32) + 1)
    wanted = np.where(targets == config.bos_token_id, 0, weights[:, 1:]) / WEIGHT_UNIT
    return TrainingBatch(
        tokens=inputs.reshape(-1),
        targets=targets.reshape(-1),
        weights=wanted.reshape(-1).astype(np.float32),
        documents=documents.reshape(-1).astype(np.int32),
        starts=starts,
        ends=ends,
        engram_ids=None if hash_ is None else _engram_ids(inputs, documents, config, hash_),
    )


def _engram_ids(
    inputs: np.ndarray, documents: np.ndarray, config: ModelConfig, hash_: EngramHash
) -> np.ndarray:
    """Hashes all documents in one call: rows that count as images keep them apart."""
    flat, document = inputs.reshape(-1), documents.reshape(-1)
    gap = config.engram_max_ngram_size - 1
    first = np.flatnonzero(np.diff(document, prepend=-1))
    place = np.arange(len(flat)) + gap * np.searchsorted(first, np.arange(len(flat)), side="right")
    spread = np.full(len(flat) + gap * len(first), config.pad_token_id)
    between = np.ones(len(spread), bool)
    spread[place], between[place] = flat, False
    return hash_.hash_ids(spread, between)[place].astype(np.int32)


def step_batch(batch: TrainingBatch, engram: Any, shape: Shape, config: ModelConfig) -> StepBatch:
    """The model's view of a batch. `engram`: table rows [T, layers, columns, width], or None."""
    sources = len(config.kv_source_layer_ids)
    slots = jnp.repeat(jnp.arange(shape.rows, dtype=jnp.int32), DOCUMENTS)
    pages = jnp.arange(sources * shape.rows * shape.pages, dtype=jnp.int32)
    none = jnp.zeros_like(batch.starts)
    return StepBatch(
        token_ids=batch.tokens,
        positions=jnp.tile(jnp.arange(shape.length, dtype=jnp.int32), shape.rows),
        sequences=batch.documents,
        is_image=jnp.zeros(shape.tokens, bool),
        image_embeds=None,
        engram=engram,
        slots=slots,
        starts=batch.starts,
        ends=batch.ends,
        window_floor=batch.starts,
        decoder_floor=none,
        global_floor=none,
        page_tables=pages.reshape(sources, shape.rows, shape.pages)[:, slots],
        logit_rows=jnp.arange(shape.tokens),
    )


@dataclass(frozen=True)
class Rows:
    """A shard of training rows on disk: tokens and loss weights, both [N, L + 1], memory-mapped."""

    tokens: np.ndarray
    weights: np.ndarray

    def batches(self, rows: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless batches; every epoch in a new order."""
        generator = np.random.default_rng(seed)
        while True:
            order = generator.permutation(len(self.tokens))
            for at in range(0, len(order) - rows + 1, rows):
                chosen = np.sort(order[at : at + rows])
                yield self.tokens[chosen], self.weights[chosen]
