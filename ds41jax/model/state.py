"""What crosses a step: `StepBatch` in, `KVState` through.

The caches are position-addressed: a row belongs to an absolute position of a sequence slot, so a
rejected draft is simply overwritten later and rolling back is not advancing a length.

Letters: T rows of a step, B sequences of a step, S cache slots, L layers, W window, R = 2 W ring
rows, P pages, D head width, I index key width, N KV sources, M streams, H hidden size.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.store import store_rows

PAGE_ROWS = 256
CARRY_PAIRS = 8  # open pairs kept a source: twice this is the widest rejection that can be repaired

Rows = QuantizedArray | jax.Array


@struct.dataclass
class StepBatch:
    """Rows of one step, whichever its phase; padding rows belong to sequence B.

    Rows of one sequence are contiguous, in ascending order of position, without gaps.

    Attributes:
      token_ids: [T] int32.
      positions: [T] int32 absolute positions.
      sequences: [T] int32 which of the step's sequences a row belongs to; B marks padding.
      is_image: [T] bool; such a row takes `image_embeds` and the image routing bias.
      image_embeds: [T, H] embeddings of image rows, or None if the step has none.
      engram: codes and scales (FP8_GROUP) of the table rows, [T, Engram layers, columns, width].
      slots: [B] int32 cache slot of each sequence.
      starts: [B] int32 position of the sequence's first row in this step.
      ends: [B] int32 position after its last row in this step.
      window_floor: [B] int32; window rows below it do not exist.
      decoder_floor: [B] int32; the same for the layers past the last KV source (bounded prefill).
      global_floor: [B] int32; rows below it write no global rows: they are there already.
      page_tables: [N, B, pages] int32 page numbers of each source's rows.
      logit_rows: [rows] int32 rows whose logits are wanted.
    """

    token_ids: jax.Array
    positions: jax.Array
    sequences: jax.Array
    is_image: jax.Array
    image_embeds: jax.Array | None
    engram: QuantizedArray | None
    slots: jax.Array
    starts: jax.Array
    ends: jax.Array
    window_floor: jax.Array
    decoder_floor: jax.Array
    global_floor: jax.Array
    page_tables: jax.Array
    logit_rows: jax.Array

    @property
    def is_row(self) -> jax.Array:
        """[T] bool, False for padding."""
        return self.sequences < self.starts.shape[0]

    def per_row(self, per_sequence: jax.Array) -> jax.Array:
        """A per-sequence value [B, ...] for every row [T, ...]; padding takes the last one's."""
        return per_sequence[jnp.minimum(self.sequences, self.starts.shape[0] - 1)]


@struct.dataclass
class KVState:
    """All caches on the device, one donated pytree. Codes in REFERENCE, float32 in FLOAT32.

    Attributes:
      window: FP8_GROUP [L, S, R, D] window rows by position modulo R.
      pages: KV_FP4 [P, PAGE_ROWS, D] global rows.
      index_pages: MXFP4 [P, PAGE_ROWS, I] index keys of the same rows.
      carry: [paired sources, S, CARRY_PAIRS, 2, D] float32 values and gate scores of first halves.
      draft_window: FP8_GROUP [stages, S, R, D].
      suffix_stream: [S, W, M, H] streams entering the last KV source, by position modulo W; the
        decoder part of a bounded prefill starts from them after the last chunk.
      suffix_pre: [S, W, M] float32 collapse weights that go with them.
      fault: int32 scalar: what went wrong in the last step's exchanges with remote experts, 0 if
        nothing did; None without such experts.
    """

    window: Rows
    pages: Rows
    index_pages: Rows
    carry: jax.Array
    draft_window: Rows
    suffix_stream: jax.Array
    suffix_pre: jax.Array
    fault: jax.Array | None = None


@dataclass(frozen=True)
class CacheShape:
    """How many sequences and global rows the caches hold."""

    slots: int
    pages: int


def slots_of(state: KVState) -> int:
    """S, the sequences that the caches hold."""
    return int(state.suffix_pre.shape[0])


def ring_rows(config: ModelConfig) -> int:
    """Twice the window: rejected rows never overwrite live ones, and the first layer of a bounded
    prefill's decoder part finds the window of its earliest row."""
    return 2 * config.sliding_window


def _empty(shape: tuple[int, ...], format: Format, compute: Compute) -> Rows:
    if not compute.keeps_codes:
        return jnp.zeros(shape, jnp.float32)
    *lead, columns = shape
    kv = format is Format.KV_FP4
    return QuantizedArray(
        jnp.zeros((*lead, columns // 2), jnp.uint8)
        if format.packed
        else jnp.zeros(shape, jnp.float8_e4m3fn),
        jnp.zeros((*lead, columns // format.group), jnp.float8_e4m3fn if kv else jnp.uint8),
        format=format,
    )


def init_state(config: ModelConfig, shape: CacheShape, compute: Compute) -> KVState:
    """Empty caches."""
    slots, ring, d = shape.slots, ring_rows(config), config.head_dim
    window, streams = config.sliding_window, config.hc_mult
    page = (shape.pages, PAGE_ROWS)
    return KVState(
        window=_empty((config.num_hidden_layers, slots, ring, d), Format.FP8_GROUP, compute),
        pages=_empty((*page, d), Format.KV_FP4, compute),
        index_pages=_empty((*page, config.index_head_dim), Format.MXFP4, compute),
        carry=jnp.zeros((len(config.paired_sources), slots, CARRY_PAIRS, 2, d), jnp.float32),
        draft_window=_empty(
            (config.num_nextn_predict_layers, slots, ring, d), Format.FP8_GROUP, compute
        ),
        suffix_stream=jnp.zeros((slots, window, streams, config.hidden_size), compute.dtype),
        suffix_pre=jnp.zeros((slots, window, streams), jnp.float32),
        fault=None if compute.exchange is None else jnp.int32(0),
    )


def put(
    store: jax.Array, index: tuple[jax.Array | int, ...], rows: jax.Array, compute: Compute
) -> jax.Array:
    """`store` with rows [T, ...] at `index`, [T] numbers or one for all; out of range is dropped.

    On the jnp path small floats are stored as bits, and a single row twice: XLA's CPU backend
    converts a whole store to scatter FP8 or bfloat16 into it, and copies it to write one row. No
    gradient passes bits, so training stores plainly.
    """
    rows = rows.astype(store.dtype)
    if compute.on_gpu or compute.differentiable:
        return store.at[index].set(rows, mode="drop")
    if rows.shape[0] == 1:
        rows = jnp.repeat(rows, 2, axis=0)
        index = tuple(jnp.repeat(i, 2) if jnp.ndim(i) else i for i in index)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(store.dtype.itemsize, store.dtype)
    written = lax.bitcast_convert_type(store, bits).at[index]
    filled = written.set(lax.bitcast_convert_type(rows, bits), mode="drop")
    return lax.bitcast_convert_type(filled, store.dtype)


def write_ring(
    ring: Rows, layer: jax.Array | int, batch: StepBatch, rows: Rows, compute: Compute
) -> Rows:
    """Stores rows [T, D] at position modulo R of ring [L, S, R, D]; only a sequence's last R do."""
    _, slots, size, *_ = jax.tree.leaves(ring)[0].shape
    targets, index = ring_slots(batch, slots, size)
    if compute.on_gpu:
        assert isinstance(ring, QuantizedArray) and isinstance(rows, QuantizedArray)
        return store_rows(ring, layer, targets, index, rows, compute)
    return jax.tree.map(lambda a, b: put(a, (layer, targets, index), b, compute), ring, rows)


def ring_slots(batch: StepBatch, slots: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Where rows go in a [slots, size] ring: (slot [T], index [T]); dropped ones get `slots`."""
    kept = batch.is_row & (batch.positions >= batch.per_row(batch.ends) - size)
    return jnp.where(kept, batch.per_row(batch.slots), slots), batch.positions % size


def write_pages(pages: Rows, page: jax.Array, row: jax.Array, rows: Rows, compute: Compute) -> Rows:
    """Stores rows [T, D] at [page, row] of the pool; pages out of range are dropped."""
    return jax.tree.map(lambda a, b: put(a, (page, row), b, compute), pages, rows)
