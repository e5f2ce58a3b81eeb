"""A row's result depends on that row and its own past alone, bit for bit.

Not on the rows beside it, their number, the bucket, the slot, the padding, or how its sequence was
split into steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle import (
    BOTH,
    Run,
    assert_same,
    caches,
    make_rows,
    page_tables,
    recorded,
    tiny_model,
    window_values,
)

from ds41jax.engine import steps
from ds41jax.engine.batching import build_batch
from ds41jax.formats import Format, QuantizedArray, encode, values
from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.kernels.experts import expert_mlp, routed_experts, swiglu
from ds41jax.kernels.index_select import candidate_blocks, index_scores, top_rows
from ds41jax.kernels.linear import grouped_linear, linear, quantized_linear
from ds41jax.kernels.rows import map_rows
from ds41jax.kernels.sparse_attention import sparse_attention
from ds41jax.model.state import CacheShape, StepBatch

PROMPTS = ("b13", "b27")
Results = tuple[np.ndarray, np.ndarray]


def prompt(case: str) -> np.ndarray:
    return recorded("tiny_runs")[f"{case}.input_ids"]


def following(case: str) -> np.ndarray:
    return recorded("tiny_runs")[f"{case}.decode_tokens"][:-1]


@functools.cache
def alone(case: str, compute: Compute) -> tuple[Results, Results]:
    """A prompt at once, then its decoding row by row: logits and drafter inputs of each phase."""
    run = Run(compute, prompt(case))
    prefill = run.full(0, len(run.tokens))
    decoded = [run.append(token) for token in following(case)]
    logits, hidden = zip(*decoded, strict=True)
    return prefill, (np.stack(logits), np.stack(hidden))


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("compute", BOTH)
def test_row_by_row_is_prefill(compute: Compute, case: str) -> None:
    """Prompt and answer in one step, or every row in a step of its own."""
    tokens = np.concatenate([prompt(case), following(case)])
    whole, single = Run(compute, tokens), Run(compute, tokens[:0])
    logits, hidden = whole.full(0, len(tokens))
    for position, token in enumerate(tokens):
        assert_same(single.append(token), (logits[position], hidden[position]))
    assert_same(single.state.pages, whole.state.pages)
    assert_same(single.state.index_pages, whole.state.index_pages)
    kept = range(len(tokens) - 16, len(tokens))
    for layer in range(13):
        assert_same(
            window_values(single.state, layer, kept), window_values(whole.state, layer, kept)
        )
    prefill, decoded = alone(case, compute)
    assert_same(np.concatenate([prefill[0], decoded[0]]), logits)
    assert_same(np.concatenate([prefill[1], decoded[1]]), hidden)


@pytest.mark.parametrize("sizes", [(5, 8, 1, 13), (1, 26), (12, 2, 13)])
def test_chunked_prefill_is_one_chunk(sizes: tuple[int, ...]) -> None:
    expected, _ = alone("b27", REFERENCE)
    run, at, found = Run(REFERENCE, prompt("b27")), 0, []
    for size in sizes:
        found.append(run.full(at, at + size))
        at += size
    logits, hidden = (np.concatenate(part) for part in zip(*found, strict=True))
    assert_same((logits, hidden), expected)


SLOTS = {"b27": 3, "b13": 1}  # in this order in the batch; two slots stay empty


def shared_batch(
    tables: np.ndarray, spans: dict[str, tuple[int, int]], bucket: int, width: int
) -> StepBatch:
    """Rows of both sequences in one batch, with garbage in the padding."""
    model = tiny_model()
    rows = [
        make_rows(
            model,
            np.concatenate([prompt(case), following(case)]),
            *spans[case],
            slot=slot,
        )
        for case, slot in SLOTS.items()
    ]
    batch = build_batch(rows, tables, model.config, buckets=(bucket,), width=width)
    padding = np.asarray(batch.sequences) == width
    assert padding.any()
    rng = np.random.default_rng(0)
    codes = np.array(batch.engram.codes)
    noise = rng.integers(0, 0x70, codes[padding].shape, dtype=np.uint8)
    codes[padding] = noise.view(ml_dtypes.float8_e4m3fn)
    scales = np.where(padding[:, None, None, None], np.uint8(130), batch.engram.scales)
    return dataclasses.replace(
        batch,
        token_ids=np.where(padding, rng.integers(0, 512, bucket), batch.token_ids).astype(np.int32),
        positions=np.where(padding, rng.integers(0, 99, bucket), batch.positions).astype(np.int32),
        is_image=np.where(padding, rng.integers(0, 2, bucket) > 0, batch.is_image),
        engram=QuantizedArray(codes, scales.astype(np.uint8), format=Format.FP8_GROUP),
    )


@pytest.mark.parametrize("compute", BOTH)
def test_batched_is_alone(compute: Compute) -> None:
    """A ragged prefill and ragged decoding, with other slots, buckets and neighbours."""
    model = tiny_model()
    tables = page_tables(model.config, slots=4)[:, ::-1]
    state = caches(model, CacheShape(4, tables.size), compute)
    at = {case: 0 for case in SLOTS}
    until = {case: len(prompt(case)) for case in SLOTS}
    expected = {case: alone(case, compute)[0] for case in SLOTS}
    for step in range(13):
        spans = {case: (at[case], until[case]) for case in SLOTS}
        batch = shared_batch(tables, spans, *((64, 4) if step == 0 else (8, 3)))
        state, logits, hidden = steps.full_step(model.params, state, batch, model.config, compute)
        row = 0
        for case in SLOTS:
            count = until[case] - at[case]
            rows = slice(row, row + count)
            assert_same((np.asarray(logits)[rows], np.asarray(hidden)[rows]), expected[case])
            row += count
            at[case], until[case] = until[case], until[case] + 1
            decoded = alone(case, compute)[1]
            expected[case] = tuple(part[step : step + 1] for part in decoded)


@pytest.mark.parametrize("compute", BOTH)
def test_drafts_of_slots_are_apart(compute: Compute) -> None:
    """One sequence's draft, alone and among slots that hold other sequences or nothing."""
    model = tiny_model()
    tables = page_tables(model.config, slots=4)
    state = caches(model, CacheShape(4, tables.size), compute)
    spans = {case: (0, len(prompt(case))) for case in SLOTS}
    batch = shared_batch(tables, spans, 64, 4)
    state, *_ = steps.full_step(model.params, state, batch, model.config, compute)
    anchors, positions = np.full(3, 7, np.int32), np.zeros(3, np.int32)
    for place, case in enumerate(SLOTS):
        anchors[place], positions[place] = following(case)[0], len(prompt(case))
    slots = np.array([*SLOTS.values(), 0], np.int32)
    together = steps.draft_step(
        model.params, state, slots, anchors, positions, model.config, compute
    )
    for place, case in enumerate(SLOTS):
        run = Run(compute, prompt(case))
        run.full(0, len(run.tokens))
        assert_same(entry(together, place), entry(run.draft(anchors[place]), 0))


def entry(tree: Any, place: int) -> Any:
    return jax.tree.map(lambda x: x[place], tree)


@pytest.mark.parametrize("compute", BOTH)
def test_verification_is_decoding(compute: Compute) -> None:
    """1 to 8 rows at once, the later ones rejected and overwritten, equal single rows."""
    tokens, prompt_ids = following("p20"), prompt("p20")
    _, (logits, hidden) = alone("p20", compute)
    run, done = Run(compute, prompt_ids), 0
    run.full(0, len(prompt_ids))
    for count in range(1, 9):
        accepted = count // 2 + 1 if count > 1 else 1
        wrong = (tokens[done + accepted : done + count] + 1) % 500
        wrong = np.resize(wrong if len(wrong) else [3], count - accepted)
        rows = np.concatenate([tokens[done : done + accepted], wrong]).astype(np.int32)
        first = len(prompt_ids) + done
        run.tokens = np.concatenate([prompt_ids, tokens[:done], rows])
        run.is_image = np.zeros(len(run.tokens), bool)
        run.image_embeds = np.zeros((len(run.tokens), run.config.hidden_size), np.float32)
        found = run.full(first, first + count, bucket=8)
        kept = slice(done, done + accepted)
        assert_same([part[:accepted] for part in found], [logits[kept], hidden[kept]])
        done += accepted
    assert done == 24


# Kernels

COUNTS = (1, 6, 16, 96)


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def tiled(function: Callable[..., Any], tile: int = 8) -> Callable[..., Any]:
    """A function of tiles, as the model runs it."""
    return lambda compute, *rows: map_rows(
        compute, functools.partial(function, compute), *rows, tile=tile
    )


def rows_of_attention(compute: Compute, q: jax.Array, window: jax.Array, chosen: jax.Array) -> Any:
    kv = compute.quantize(normal(300, 64), Format.FP8_GROUP)
    pages = compute.quantize(normal(200, 64), Format.KV_FP4)
    sources = ((kv, window), (pages, chosen))
    return sparse_attention(q, sources, normal(4), 0.125, compute)


def random_index(rows: int, width: int, high: int) -> jax.Array:
    index = np.random.default_rng(rows + width).integers(-40, high, (rows, width))
    return jnp.asarray(np.maximum(index, -1), jnp.int32)


def expert_rows(compute: Compute, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    shapes = ((8, 64, 128), (8, 128, 64), (8, 64, 128))
    stack = tuple(encode(normal(*shape) * 0.1, Format.MXFP4) for shape in shapes)
    return routed_experts(x, ids, weights, stack, 10.0, compute)


def scored(compute: Compute, q: jax.Array, weights: jax.Array) -> jax.Array:
    keys = compute.fake_quantize(normal(300, 64), Format.MXFP4)
    return index_scores(q[0], weights[0], keys, compute)[None]


def blocks_of(compute: Compute, scores: jax.Array) -> jax.Array:
    return candidate_blocks(scores[0], jnp.asarray(290), 6, 8)[None]


def shared_expert(compute: Compute, x: jax.Array) -> jax.Array:
    shapes = ((96, 512), (512, 96), (96, 512))
    matrices = tuple(values(encode(normal(*s) * 0.1, Format.FP8_BLOCK)) for s in shapes)
    return expert_mlp(x, matrices, None, 10.0, compute)


def dense(width: int = 512) -> jax.Array:
    return normal(96, width)


ids = jnp.asarray(np.random.default_rng(0).integers(0, 8, (96, 2)), jnp.int32)
KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sparse_attention": (
        rows_of_attention,
        (normal(96, 4, 64), random_index(96, 8, 300), random_index(96, 90, 200)),
    ),
    "routed_experts": (expert_rows, (normal(96, 128), ids, jnp.abs(normal(96, 2)))),
    "expert_mlp": (tiled(shared_expert), (dense(),)),
    "swiglu": (tiled(lambda compute, a, b: swiglu(a, b, 1.0)), (dense(), dense(513)[:, :512])),
    "index_scores": (tiled(scored, tile=1), (normal(96, 8, 64), normal(96, 8))),
    "candidate_blocks": (tiled(blocks_of, tile=1), (normal(96, 300),)),
    "top_rows": (tiled(lambda compute, s: top_rows(s[0], 16)[None], tile=1), (normal(96, 300),)),
    "linear": (tiled(lambda compute, x: linear(x, normal(70, 512), compute)), (dense(),)),
    "quantized_linear": (
        tiled(lambda compute, x: quantized_linear(x, normal(70, 512), compute)),
        (dense(),),
    ),
    "grouped_linear": (
        tiled(lambda compute, x: grouped_linear(x, normal(128, 128), compute)),
        (normal(96, 4, 128),),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("compute", [REFERENCE, FLOAT32])
def test_kernel(compute: Compute, name: str) -> None:
    """1, 6, 16 or 96 rows at once: each row as it comes out alone, at any place."""
    function, rows = KERNELS[name]
    rows = tuple(x.astype(compute.dtype) if x.dtype == jnp.float32 else x for x in rows)
    run = jax.jit(functools.partial(function, compute))
    single = [run(*(x[i : i + 1] for x in rows)) for i in range(96)]
    single = jax.tree.map(lambda *parts: np.concatenate(parts), *single)
    for count in COUNTS[1:]:
        for first in {0, 96 - count}:
            place = slice(first, first + count)
            found = run(*(x[place] for x in rows))
            assert_same(found, jax.tree.map(lambda x, place=place: x[place], single))
