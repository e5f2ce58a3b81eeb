"""What the golden tests share: reading recorded values, measures of error, the tiny model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from paths import GOLDEN
from safetensors.numpy import load_file

from ds41jax.config import ModelConfig
from ds41jax.engine import steps
from ds41jax.engine.batching import SequenceRows, build_batch
from ds41jax.engine.loading import Model, load_model
from ds41jax.formats import Format, QuantizedArray, values
from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.model import attention, backbone, block, drafter, indexer, moe, text_layer
from ds41jax.model.drafter import Draft
from ds41jax.model.indexer import Selection
from ds41jax.model.params import Params
from ds41jax.model.sharding import empty_caches
from ds41jax.model.state import PAGE_ROWS, CacheShape, KVState, StepBatch
from ds41jax.model.tensors import at_layer, lookup

BOTH = (REFERENCE, FLOAT32)
BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn


@functools.cache
def recorded(name: str) -> dict[str, np.ndarray]:
    """The tensors of golden/{name}.safetensors."""
    return load_file(GOLDEN / f"{name}.safetensors")


def prefix_of(compute: Compute) -> str:
    """What precedes the keys of a numerics' recorded values."""
    return "smooth." if compute is FLOAT32 else ""


@functools.cache
def tiny_model() -> Model:
    return load_model(GOLDEN / "tiny", progress=False)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rel_rms(found: Any, expected: Any) -> float:
    """rms of the difference over rms of the expected values."""
    found, expected = wide(found), wide(expected)
    assert found.shape == expected.shape
    scale = np.sqrt(np.mean(expected**2))
    return float(np.sqrt(np.mean((found - expected) ** 2)) / (scale or 1))


def logit_error(found: Any, expected: Any) -> float:
    """rms of the difference over the standard deviation of the expected logits."""
    found, expected = wide(found), wide(expected)
    assert found.shape == expected.shape
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def max_abs(found: Any, expected: Any) -> float:
    found, expected = wide(found), wide(expected)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max(initial=0))


def bf16_ulps(found: Any, expected: Any) -> int:
    """Largest distance in steps of bfloat16."""

    def ordered(x: Any) -> np.ndarray:
        bits = np.asarray(x).astype(BF16).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    assert np.shape(found) == np.shape(expected)
    return int(np.abs(ordered(found) - ordered(expected)).max(initial=0))


def assert_within(measure: Callable[..., float], found: Any, expected: Any, limit: float) -> None:
    error = measure(found, expected)
    assert error <= limit, f"{measure.__name__} {error:.3g} exceeds {limit}"


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit patterns, so that -0 differs from 0."""

    def bits(x: Any) -> np.ndarray:
        x = np.ascontiguousarray(x)
        return x.view(f"u{x.dtype.itemsize}")

    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def fp8_block(codes: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    """A weight in 32 x 32 blocks of recorded bytes."""
    return QuantizedArray(
        jnp.asarray(codes.view(E4M3)), jnp.asarray(scales), format=Format.FP8_BLOCK
    )


def mxfp4(packed: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    return QuantizedArray(jnp.asarray(packed), jnp.asarray(scales), format=Format.MXFP4)


def page_tables(config: ModelConfig, slots: int = 1, pages: int = 1) -> np.ndarray:
    """[sources, slots, pages] tables over a pool where every sequence owns its pages."""
    shape = (len(config.kv_source_layer_ids), slots, pages)
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def make_rows(
    model: Model,
    tokens: np.ndarray,
    first: int,
    last: int,
    *,
    slot: int = 0,
    is_image: np.ndarray | None = None,
    image_embeds: Any = None,
    **floors: int,
) -> SequenceRows:
    """Rows first..last-1 of the sequence `tokens`; the other arrays cover it from its start."""
    flags = np.zeros(len(tokens), bool) if is_image is None else is_image
    assert model.engram is not None
    rows = slice(first, last)
    return SequenceRows(
        slot=slot,
        start=first,
        token_ids=tokens[rows],
        is_image=flags[rows],
        image_embeds=None if image_embeds is None else image_embeds[rows],
        engram=model.engram.gather(tokens[:last], flags[:last], first),
        **floors,
    )


def plain_batch(
    config: ModelConfig,
    rows: Sequence[tuple[int, int, int]],
    tables: np.ndarray,
    buckets: tuple[int, ...] = (1, 64),
) -> StepBatch:
    """A batch for layers that see no tokens: (slot, first, last) positions of each sequence."""
    shape = (len(config.engram_layer_ids), config.engram_columns)
    width, group = config.engram_head_dim, Format.FP8_GROUP.group

    def blank(count: int) -> QuantizedArray:
        codes = np.zeros((count, *shape, width), E4M3)
        scales = np.zeros((count, *shape, width // group), np.uint8)
        return QuantizedArray(codes, scales, format=Format.FP8_GROUP)

    sequences = [
        SequenceRows(slot, first, np.zeros(last - first, np.int32), engram=blank(last - first))
        for slot, first, last in rows
    ]
    return build_batch(sequences, tables, config, buckets=buckets)


def padded(x: np.ndarray, rows: int) -> jax.Array:
    """x [T, ...] with rows of zeros appended, as a batch's padding."""
    return jnp.pad(jnp.asarray(x), [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def run_attention(
    x: jax.Array,
    index: int,
    state: KVState,
    selection: Selection,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, KVState, Selection]:
    """`text_layer.attention_layer` of a layer that is known only at run time, as in the model."""
    return text_layer.attention_layer(x, index, state, selection, params, batch, config, compute)


@functools.partial(jax.jit, static_argnames=("ratio", "config", "compute"))
def run_scores(
    x: jax.Array,
    index: int,
    state: KVState,
    params: Params,
    batch: StepBatch,
    ratio: int,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """An index source's queries [T, H, D], index queries, head weights and scores [T, N]."""
    weights = at_layer(params.layers.attn, index)
    frequencies = text_layer.layer_frequencies(config, index)
    latent, q = attention.queries(x, batch.positions, weights, frequencies, config, compute)
    chooser = at_layer(params.indexer, lookup(config.index_source_index, index))
    index_q, head_weights = indexer.index_queries(
        x, latent, batch.positions, chooser, config, compute
    )
    keys = indexer.sequence_keys(state, batch, lookup(config.kv_source_index, index), ratio)
    role = indexer.SelectRole.SELECT
    selection = indexer.empty_selection(batch, config)
    _, scores = indexer.select(
        index_q, head_weights, keys, batch, selection, role, ratio, config, compute
    )
    return q, index_q, head_weights, scores


def window_values(state: KVState, layer: int, positions: Sequence[int], slot: int = 0) -> Any:
    """Values [positions, D] of a layer's window rows; layers past the last are draft stages."""
    layers = jax.tree.leaves(state.window)[0].shape[0]
    ring = state.window if layer < layers else state.draft_window
    size = jax.tree.leaves(ring)[0].shape[2]
    index = np.asarray(positions) % size
    return values(jax.tree.map(lambda x: x[layer % layers, slot, index], ring))


def global_values(
    pages: Any, tables: np.ndarray, source: int, groups: Sequence[int], slot: int = 0
) -> Any:
    """Values [len(groups), D] of a sequence's global rows or index keys."""
    groups = np.asarray(groups, np.int64)
    page = tables[source, slot, groups // PAGE_ROWS]
    return values(jax.tree.map(lambda x: x[page, groups % PAGE_ROWS], pages))


def caches(model: Model, shape: CacheShape, compute: Compute) -> KVState:
    """Empty ones where the weights lie, so that a first step needs no program of its own."""
    return empty_caches(model.config, shape, compute, model.params.norm.sharding)


class Run:
    """One sequence stepped by hand, always through the same few programs."""

    def __init__(self, compute: Compute, tokens: np.ndarray, pages: int = 12):
        self.model, self.compute, self.tokens = tiny_model(), compute, np.asarray(tokens)
        self.config = self.model.config
        self.tables = page_tables(self.config, pages=pages)
        self.state = caches(self.model, CacheShape(1, self.tables.size), compute)
        self.is_image = np.zeros(len(self.tokens), bool)
        self.image_embeds = np.zeros((len(self.tokens), self.config.hidden_size), np.float32)

    def batch(self, first: int, last: int, bucket: int, **floors: int) -> StepBatch:
        rows = make_rows(
            self.model,
            self.tokens,
            first,
            last,
            is_image=self.is_image,
            image_embeds=self.image_embeds if bucket > 1 else None,
            **floors,
        )
        return build_batch([rows], self.tables, self.config, buckets=(bucket,))

    def full(self, first: int, last: int, bucket: int = 64) -> tuple[np.ndarray, np.ndarray]:
        """Logits [n, V] and drafter inputs of rows that run through every layer."""
        batch = self.batch(first, last, bucket)
        return self._results(steps.full_step, batch, last - first)

    def encode(self, first: int, last: int, **floors: int) -> None:
        batch = self.batch(first, last, 64, **floors)
        self.state = steps.encode_step(
            self.model.params, self.state, batch, self.config, self.compute
        )

    def suffix(self, first: int, last: int, **floors: int) -> tuple[np.ndarray, np.ndarray]:
        return self._results(steps.suffix_step, self.batch(first, last, 8, **floors), last - first)

    def bounded(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounded prefill of all tokens; results of the kept rows."""
        count = len(self.tokens)
        kept = max(0, count - self.config.sliding_window)
        self.encode(0, count)
        return self.suffix(kept, count, decoder_floor=kept)

    def _results(self, step: Any, batch: StepBatch, count: int) -> tuple[np.ndarray, np.ndarray]:
        self.state, logits, hidden = step(
            self.model.params, self.state, batch, self.config, self.compute
        )
        return np.asarray(logits)[:count], np.asarray(hidden)[:count]

    def append(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """One more text row: logits [V] and drafter input."""
        self.tokens = np.append(self.tokens, np.int32(token))
        self.is_image = np.append(self.is_image, False)
        logits, hidden = self.full(len(self.tokens) - 1, len(self.tokens), bucket=1)
        return logits[0], hidden[0]

    def draft(self, anchor: int) -> Draft:
        params, position = self.model.params, np.array([len(self.tokens)], np.int32)
        slots, anchors = np.zeros(1, np.int32), np.array([anchor], np.int32)
        return steps.draft_step(
            params, self.state, slots, anchors, position, self.config, self.compute
        )


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def look_into(
    params: Params, state: KVState, batch: StepBatch, config: ModelConfig, compute: Compute
) -> tuple[tuple[KVState, jax.Array, jax.Array], dict[str, list[Any]]]:
    """`backbone.forward` with its layers unrolled, and what they chose: routing and selection."""
    seen: dict[str, list[Any]] = {"routing": [], "selection": [], "scores": []}

    def moe_and_keep(x: jax.Array, is_image: jax.Array, weights: Any, k: int, *rest: Any) -> Any:
        seen["routing"].append(moe.route(x, is_image, weights.gate, k, config))
        return moe.moe(x, is_image, weights, k, *rest)

    def select_and_keep(*args: Any) -> tuple[Selection, jax.Array]:
        selection, scores = select(*args)
        seen["selection"].append(selection)
        seen["scores"].append(scores)
        return selection, scores

    select = indexer.select
    with (
        mock.patch.object(block, "moe", moe_and_keep),
        mock.patch.object(indexer, "select", select_and_keep),
        mock.patch.object(
            backbone,
            "run_layers",
            lambda carry, first, last, *rest: unrolled(
                first, last, lambda i, c: text_layer.layer(c, i, *rest), carry
            ),
        ),
    ):
        return backbone.forward(params, state, batch, config, compute), seen


def look_into_draft(
    params: Params,
    state: KVState,
    anchor: jax.Array,
    position: jax.Array,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Draft, list[dict[str, jax.Array]]]:
    """`drafter.draft` for slot 0 with its stages unrolled, and what each of them computed."""
    stages: list[dict[str, jax.Array]] = []

    def block_and_keep(
        stream: jax.Array, pre: jax.Array, is_image: jax.Array, attend: Any, *rest: Any
    ) -> tuple[jax.Array, jax.Array]:
        seen: dict[str, jax.Array] = {}

        def attend_and_keep(x: jax.Array) -> jax.Array:
            seen["attn_out"] = attend(x)
            return seen["attn_out"]

        def moe_and_keep(
            x: jax.Array, is_image: jax.Array, weights: Any, k: int, *rest: Any
        ) -> Any:
            seen["gate_idx"], _ = moe.route(x, is_image, weights.gate, k, config)
            seen["ffn_out"] = moe.moe(x, is_image, weights, k, *rest)
            return seen["ffn_out"]

        with mock.patch.object(block, "moe", moe_and_keep):
            out = block.block(stream, pre, is_image, attend_and_keep, *rest)
        seen["stream_out"], seen["pre_mix_out"] = out
        stages.append(seen)
        return out

    with (
        mock.patch.object(drafter, "block", block_and_keep),
        mock.patch.object(drafter.lax, "fori_loop", unrolled),
    ):
        out = drafter.draft(
            params.drafter,
            params.embed,
            params.head,
            state,
            jnp.zeros(1, jnp.int32),
            jnp.reshape(anchor, 1),
            jnp.reshape(position, 1),
            config,
            compute,
        )
    return out, stages


def unrolled(first: int, last: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop` as a Python loop."""
    for index in range(first, last):
        carry = body(index, carry)
    return carry
