"""Single layers at the released sizes, with weights generated from their names."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import generated, manifest, tensors
from oracle import (
    BOTH,
    assert_same,
    assert_within,
    bf16_ulps,
    fp8_block,
    global_values,
    look_into_draft,
    max_abs,
    mxfp4,
    plain_batch,
    prefix_of,
    recorded,
    rel_rms,
    run_scores,
    wide,
    window_values,
)

from ds41jax.config import ModelConfig, load_config
from ds41jax.formats import Format, QuantizedArray, encode, values
from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.kernels.experts import routed_experts
from ds41jax.kernels.linear import dot, quantized_linear
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.streams import collapse, expand
from ds41jax.model import attention, drafter, text_layer
from ds41jax.model.attention import attention_specs
from ds41jax.model.block import block_specs
from ds41jax.model.compressor import compressor_specs
from ds41jax.model.engram import engram, engram_gate, engram_specs
from ds41jax.model.hyper_connections import mix_specs, split_mixes, stream_mixes
from ds41jax.model.indexer import Selection, empty_selection, indexer_specs
from ds41jax.model.moe import moe, moe_specs, route, router_scores
from ds41jax.model.params import Params
from ds41jax.model.rope import rotate
from ds41jax.model.state import (
    CARRY_PAIRS,
    PAGE_ROWS,
    CacheShape,
    KVState,
    StepBatch,
    init_state,
    ring_rows,
)
from ds41jax.model.tensors import TensorSpec

OFFICIAL = load_config(Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json")
SMOOTH = 1e-4  # rel. rms, everything in float32 numerics
EMPTY = Params(*[None] * len(dataclasses.fields(Params)))


def parts_of(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A network of the layers that a slice needs, numbered from 0."""
    bare: dict[str, Any] = {
        "num_nextn_predict_layers": 0,
        "engram_layer_ids": (),
        "engram_num_embeddings": (),
        "dspark_target_layer_ids": (),
        "candidate_source_layer_id": None,
    }
    return dataclasses.replace(config, **(bare | changes))


def fill(specs: Any, experts: list[int] | None = None) -> Any:
    """Generated weights in place of specs; `experts` are the ones that a stack of them holds."""

    def load(spec: TensorSpec) -> Any:
        names = [
            (name, scale)
            for index, name, scale in spec.stored()
            if spec.experts is None or experts is None or index[-1] in experts
        ]
        stack = spec.stack
        if spec.experts is not None and experts is not None:
            stack = (*stack[:-1], len(experts))

        def stacked(names: list[str]) -> jax.Array:
            parts = [generated(name) for name in names]
            return jnp.asarray(np.stack(parts).reshape(*stack, *parts[0].shape))

        codes = stacked([name for name, _ in names])
        if not isinstance(spec.format, Format):
            return codes
        return QuantizedArray(codes, stacked([s for _, s in names]), format=spec.format)

    return jax.tree.map(load, specs)


@functools.lru_cache(maxsize=1)
def weights_of(make: Callable[..., Any], *args: Any) -> Any:
    """The weights of a slice, until another slice's are made: memory holds one slice at a time."""
    return make(*args)


def stored(name: str, format: Format) -> QuantizedArray:
    """A generated cache; packed codes stay packed."""
    return QuantizedArray(generated(f"{name}.codes"), generated(f"{name}.scale"), format=format)


def put(cache: Any, index: Any, rows: QuantizedArray) -> Any:
    """Writes rows into a cache of either numerics."""
    if isinstance(cache, QuantizedArray):
        return jax.tree.map(lambda c, r: c.at[index].set(r), cache, rows)
    return cache.at[index].set(values(rows))


# a, b: attention layers

LAST_ROW = 1 << 20  # every offset's rows lie below


@dataclasses.dataclass(frozen=True)
class AttentionSlice:
    """One of the recorded attention slices at one offset of its positions."""

    name: str
    key: str
    layers: tuple[int, ...]
    ratio: int

    @property
    def info(self) -> dict[str, Any]:
        return manifest()["slices"][self.name]

    @property
    def offset(self) -> int:
        return self.info["offsets"][self.key]

    @property
    def first(self) -> int:
        return self.info["first_row_position"] + self.offset

    @property
    def shift(self) -> int:
        """Global rows, all zero, below the recorded cache."""
        return self.offset // self.ratio

    @property
    def config(self) -> ModelConfig:
        count = len(self.layers)
        return parts_of(
            OFFICIAL,
            num_hidden_layers=count,
            compress_ratios=(self.ratio,) * count,
            kv_source_layer_ids=(0,),
            index_source_layer_ids=tuple(range(count)),
            candidate_source_layer_id=0 if count > 1 else None,
        )

    @functools.cached_property
    def tables(self) -> np.ndarray:
        """[1, 1, pages]: page 0 is zero and stands for all below the cache, the pool is small."""
        pages = np.zeros((1, 1, LAST_ROW // PAGE_ROWS), np.int32)
        first = self.shift // PAGE_ROWS
        count = self.rows_held // PAGE_ROWS + 2
        held = pages[0, 0, first : first + count]
        held[:] = np.arange(1, 1 + len(held))
        return pages

    @property
    def rows_held(self) -> int:
        return self.info["prior_rows"] + self.info["rows"]

    def batch(self) -> StepBatch:
        count = self.info["rows"]
        rows = [(0, self.first, self.first + count)]
        return plain_batch(self.config, rows, self.tables, buckets=(count,))


def attention_params(layers: tuple[int, ...]) -> Params:
    names = dataclasses.replace(
        OFFICIAL, kv_source_layer_ids=layers[:1], index_source_layer_ids=layers
    )
    attn = attention_specs(OFFICIAL, "layers.{i}.attn", layers)
    empty = block_specs(OFFICIAL, "layers.{i}", (), 0)
    return EMPTY.replace(
        layers=jax.tree.map(lambda _: None, empty).replace(attn=fill(attn)),
        compressor=fill(compressor_specs(names)) if len(layers) == 1 else fill_ratio1(names),
        indexer=fill(indexer_specs(names)),
    )


def fill_ratio1(names: ModelConfig) -> Any:
    """A compressor without gates: no source of the slice takes pairs."""
    specs = compressor_specs(names)
    return fill(specs.replace(wgate=None))


def prior_state(s: AttentionSlice, compute: Compute) -> KVState:
    config, letter = s.config, (s.name == "attn_ratio2" and "a") or "b"
    state = init_state(config, CacheShape(1, s.rows_held // PAGE_ROWS + 3), compute)
    window, ring = state.window, ring_rows(config)
    index = np.arange(s.first - config.sliding_window, s.first) % ring
    for place, layer in enumerate(s.layers):
        name = "a.window" if letter == "a" else f"b.window.{layer}"
        window = put(window, (place, 0, index), stored(name, Format.FP8_GROUP))
    rows = s.shift + np.arange(s.info["prior_rows"])
    where = (s.tables[0, 0, rows // PAGE_ROWS], rows % PAGE_ROWS)
    golden = recorded(f"official/{s.name}")
    keys = QuantizedArray(
        golden["index_keys.codes"], golden["index_keys.scale"], format=Format.MXFP4
    )
    carry = state.carry
    if letter == "a":
        halves = np.stack([generated("a.carry_kv"), generated("a.carry_score")]).astype(np.float32)
        place = (s.first - 1) // 2 % CARRY_PAIRS
        carry = carry.at[0, 0, place].set(halves.reshape(carry.shape[3:]))
    return dataclasses.replace(
        state,
        window=window,
        pages=put(state.pages, where, stored(f"{letter}.compress_kv", Format.KV_FP4)),
        index_pages=put(state.index_pages, where, keys),
        carry=carry,
    )


def run_with_heads(
    x: jax.Array,
    index: int,
    state: KVState,
    selection: Selection,
    params: Params,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Any, jax.Array]:
    """`attention_layer`, and its heads after the inverse rotation."""
    heads = []

    def project_and_keep(out: jax.Array, *rest: Any) -> jax.Array:
        heads.append(rotate(out, rest[0], rest[2], compute, inverse=True))
        return project(out, *rest)

    project = attention.project_output
    with mock.patch.object(attention, "project_output", project_and_keep):
        result = text_layer.attention_layer(
            x, index, state, selection, params, batch, config, compute
        )
    return result, heads[0]


# One of XLA's CPU fusions takes minutes over a million float32 scores.
OPTIONS = {REFERENCE: {}, FLOAT32: {"xla_cpu_experimental_ynn_fusion_type": ""}}
RUN_WITH_HEADS = {
    compute: jax.jit(
        run_with_heads, static_argnames=("config", "compute"), compiler_options=options
    )
    for compute, options in OPTIONS.items()
}

SLICES = {"attn_ratio2": ((2,), 2), "attn_ratio1": ((20, 24), 1)}
OFFSETS = ("base", "pos65536", "pos131072", "pos1048575")


@pytest.mark.parametrize("key", OFFSETS)
@pytest.mark.parametrize("compute", BOTH)
@pytest.mark.parametrize("name", SLICES)
def test_attention(compute: Compute, name: str, key: str) -> None:
    layers, ratio = SLICES[name]
    s = AttentionSlice(name, key, layers, ratio)
    params, state, batch = weights_of(attention_params, layers), prior_state(s, compute), s.batch()
    selection = empty_selection(batch, s.config)
    for place, layer in enumerate(layers):
        input_name = "a.x" if len(layers) == 1 else f"b.x.{layer}"
        x = jnp.asarray(generated(input_name)).astype(compute.dtype)
        (out, state, selection), heads = RUN_WITH_HEADS[compute](
            x, place, state, selection, params, batch, s.config, compute
        )
        part = "" if len(layers) == 1 else f"{layer}."
        golden = recorded(f"official/{name}")
        if compute is FLOAT32:
            assert_within(rel_rms, out, golden[f"{key}.smooth.{part}out"], SMOOTH)
            continue
        golden = {
            k.removeprefix(f"{key}.{part}"): v
            for k, v in golden.items()
            if k.startswith(f"{key}.{part}")
        }
        assert_within(rel_rms, out, golden["out"], 0.012)
        if "o" in golden:
            assert_within(rel_rms, heads, golden["o"], 0.002)
        check_new_rows(s, golden, state, place)
        scores = run_scores(x, place, state, params, batch, ratio, s.config, compute)
        check_selection(s, golden, selection, scores)
        if len(layers) > 1 and place == 0:
            blocks = recorded(f"official/{name}")[f"{key}.candidate_blocks"]
            check_blocks(s, blocks, selection)


def check_new_rows(s: AttentionSlice, golden: Any, state: KVState, place: int) -> None:
    """Exact; what the published rows are, and that open pairs publish none."""
    positions = range(s.first, s.first + s.info["rows"])
    found = window_values(state, place, positions)
    assert_same(wide(found), wide(golden["new_window_kv"]))
    if place == 0:
        rows = s.shift + s.info["prior_rows"] + np.arange(len(golden["new_compress_kv"]))
        for name, pages in ("compress_kv", state.pages), ("index_k", state.index_pages):
            found = global_values(pages, s.tables, 0, rows)
            assert_same(wide(found), wide(golden[f"new_{name}"]))


def check_selection(s: AttentionSlice, golden: Any, selection: Selection, scores: Any) -> None:
    rows = np.asarray(selection.rows)
    assert_same(rows - s.shift, golden["topk"])
    q, index_q, head_weights, found = scores
    known = "index_score" if "index_score" in golden else "index_score_first2048"
    expected = wide(golden[known])
    found = wide(found)[:, s.shift : s.shift + expected.shape[1]]
    seen = np.isfinite(expected)
    if known == "index_score":
        assert_same(np.isfinite(found), seen)
    assert_within(rel_rms, found[seen], expected[seen], 0.004)
    if "q" in golden:
        assert_within(rel_rms, q, golden["q"], 0.002)
    if "index_q" in golden:
        assert_same(wide(index_q), wide(golden["index_q"]))
        assert_within(bf16_ulps, head_weights, golden["index_w"], 1)


def check_blocks(s: AttentionSlice, expected: np.ndarray, selection: Selection) -> None:
    first = s.shift // s.config.candidate_block_size
    kept = np.asarray(selection.blocks)
    assert_same(kept[:, first : first + expected.shape[1]], expected.astype(bool))
    assert (kept.sum(1) == 2048).all()


# d: experts

MOE_EXPERTS: list[int] = manifest()["slices"]["moe"]["experts"]


def moe_layer() -> Any:
    """Layer 9 with the experts that its rows choose; routing among them is that among all."""
    specs = moe_specs(OFFICIAL, "layers.{i}.ffn", (9,), OFFICIAL.n_routed_experts)
    return fill(specs, MOE_EXPERTS)


def first_layer(weights: Any) -> Any:
    return jax.tree.map(lambda x: x[0], weights)


def only(gate: Any, experts: list[int]) -> Any:
    return jax.tree.map(lambda x: x[np.asarray(experts)], gate)


def moe_inputs(compute: Compute) -> tuple[jax.Array, jax.Array]:
    info = manifest()["slices"]["moe"]
    is_image = jnp.asarray(info["image_mask"], bool)
    return jnp.asarray(generated(info["x"])).astype(compute.dtype), is_image


def test_router() -> None:
    golden, gate = recorded("official/moe"), first_layer(weights_of(moe_layer).gate)
    x, is_image = moe_inputs(REFERENCE)
    ids, weights = route(x, is_image, gate, 6, OFFICIAL)
    assert_within(max_abs, router_scores(x, gate.weight), golden["gate_scores"], 1e-5)
    assert_same(ids, golden["gate_idx"])
    assert_within(max_abs, weights, golden["gate_weights"], 1e-5)
    ids, _ = route(x, jnp.zeros(4, bool), gate, 6, OFFICIAL)
    other = manifest()["slices"]["moe"]["image_row_with_text_bias"]
    assert sorted(ids[3].tolist()) == other


@pytest.mark.parametrize("compute", BOTH)
def test_moe(compute: Compute) -> None:
    golden, weights = recorded("official/moe"), first_layer(weights_of(moe_layer))
    weights = weights.replace(gate=only(weights.gate, MOE_EXPERTS))
    x, is_image = moe_inputs(compute)
    run = jax.jit(functools.partial(moe, k=6, config=OFFICIAL, compute=compute))
    out = run(x, is_image, weights)
    limit = 0.008 if compute is REFERENCE else SMOOTH
    assert_within(rel_rms, out, golden[f"{prefix_of(compute)}out"], limit)
    if compute is REFERENCE:
        ids = jnp.asarray(np.searchsorted(MOE_EXPERTS, golden["gate_idx"]), jnp.int32)
        e, routing = weights.experts, jnp.asarray(golden["gate_weights"])
        run = jax.jit(functools.partial(routed_experts, limit=10.0, compute=compute))
        routed = run(x, ids, routing, (e.w1, e.w2, e.w3))
        assert_within(rel_rms, routed, golden["routed_sum"], limit)


# e: hyper-connections


@pytest.mark.parametrize("compute", BOTH)
def test_hyper_connections(compute: Compute) -> None:
    golden = recorded("official/mhc")
    weights = first_layer(fill(mix_specs(OFFICIAL, "layers.{i}.hc_attn", (5,))))
    factors = np.array([1, 2, 0.5, 1], np.float32)[:, None]
    stream = jnp.asarray(generated("e.stream").astype(np.float32) * factors).astype(compute.dtype)
    sub = jnp.asarray(generated("e.sub")).astype(compute.dtype)

    @jax.jit
    def run(
        stream: jax.Array, sub: jax.Array, pre: jax.Array, post: jax.Array, comb: jax.Array
    ) -> Any:
        mixes = stream_mixes(stream, weights, OFFICIAL)
        made = split_mixes(mixes, weights, OFFICIAL)
        return (
            (mixes, *made),
            collapse(stream, pre, compute),
            expand(sub, stream, post, comb, compute),
        )

    given = (jnp.asarray(golden[name]) for name in ("pre", "post", "comb"))
    mixes, collapsed, expanded = run(stream, sub, *given)
    for found, name in zip(mixes, ("mixes", "pre", "post", "comb"), strict=True):
        assert_within(max_abs, found, golden[name], 1e-5)
    if compute is REFERENCE:
        assert_within(bf16_ulps, collapsed, golden["hc_pre"], 1)
        assert_within(bf16_ulps, expanded, golden["hc_post"], 1)
    else:
        assert_within(rel_rms, collapsed, golden["smooth.hc_pre"], SMOOTH)
        assert_within(rel_rms, expanded[:1], golden["smooth.hc_post"], SMOOTH)


# f: Engram


@pytest.mark.parametrize("layer", [1, 14])
def test_engram(layer: int) -> None:
    golden = {
        k.removeprefix(f"{layer}."): v
        for k, v in recorded("official/engram").items()
        if k.startswith(f"{layer}.")
    }
    names = dataclasses.replace(OFFICIAL, engram_layer_ids=(layer,))
    weights = first_layer(fill(engram_specs(names)))
    rows = QuantizedArray(
        table_rows(layer, "weight", golden["hash_ids"]),
        table_rows(layer, "scale", golden["hash_ids"]),
        format=Format.FP8_GROUP,
    )
    admitted = jnp.asarray(manifest()["slices"]["engram"]["token_mask"], bool)
    for compute in BOTH:
        stream = jnp.asarray(generated(f"f.stream.{layer}")).astype(compute.dtype)
        kv, gate, out = engram_parts(stream, rows, admitted, weights, compute)
        if compute is FLOAT32:
            assert_within(rel_rms, gate, golden["smooth.gate_unmasked"], SMOOTH)
            assert_within(rel_rms, out[0], golden["smooth.out_row0"], SMOOTH)
            continue
        assert_within(bf16_ulps, kv[:, 4 * 5120 :], golden["value"], 1)
        assert_within(bf16_ulps, kv[0, : 4 * 5120], golden["key_row0"], 1)
        assert_within(max_abs, gate, golden["gate_unmasked"], 1e-4)
        root = np.log(wide(gate) / (1 - wide(gate)))
        assert_within(rel_rms, np.copysign(root**2, root), golden["dot"], 1e-4)
        assert_within(bf16_ulps, out, golden["out"], 1)
        assert_same(out[2], stream[2])


def table_rows(layer: int, part: str, ids: np.ndarray) -> jax.Array:
    """The rows of a released table, made one by one: [3, columns, ...]."""
    name = f"layers.{layer}.engram.embed.{part}"
    rows = [generated(name, slice(i, i + 1))[0] for i in ids.ravel().tolist()]
    return jnp.asarray(np.stack(rows).reshape(*ids.shape, -1))


@functools.partial(jax.jit, static_argnames="compute")
def engram_parts(
    stream: jax.Array, rows: Any, admitted: jax.Array, weights: Any, compute: Compute
) -> tuple[jax.Array, jax.Array, jax.Array]:
    flat = values(rows).reshape(len(admitted), -1)
    kv = quantized_linear(flat, values(weights.wkv), compute)
    key = kv[:, : 4 * 5120].astype(jnp.float32).reshape(stream.shape)
    gate = engram_gate(stream.astype(jnp.float32), key, weights, OFFICIAL)
    return kv, gate, engram(stream, rows, admitted, weights, OFFICIAL, compute)


# g: drafter

SUBSET = 7 + 31 * np.arange(4096)
DRAFT_CONFIG = parts_of(
    OFFICIAL,
    vocab_size=4097,
    num_hidden_layers=1,
    compress_ratios=(0, 0),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(0, 1, 2),
    dspark_noise_token_id=4096,
)


def subset(name: str) -> jax.Array:
    """The rows of a vocabulary matrix that the slice keeps."""
    return jnp.asarray(np.stack([generated(name, slice(i, i + 1))[0] for i in SUBSET.tolist()]))


def draft_experts() -> list[int]:
    prefix = "mtp.0.ffn.experts."
    found = {int(name.split(".")[4]) for name in tensors() if name.startswith(prefix)}
    return sorted(found)


def draft_params() -> Params:
    """Stage 0 and the heads of the last stage; the noise token's embedding stands last."""
    info, experts = manifest()["slices"]["dspark"], draft_experts()
    stages = fill(block_specs(OFFICIAL, "mtp.{i}", (0,), 128), experts)
    gate = jax.tree.map(lambda x: x[:, np.asarray(experts)], stages.ffn.gate)
    noise = generated("embed.weight", slice(info["noise_token"], info["noise_token"] + 1))
    proj = fp8_block(generated("mtp.0.main_proj.weight"), generated("mtp.0.main_proj.scale"))
    return EMPTY.replace(
        embed=jnp.concatenate([subset("embed.weight"), noise]),
        head=subset("head.weight"),
        drafter=drafter.DrafterWeights(
            stages=stages.replace(ffn=stages.ffn.replace(gate=gate)),
            main_proj=proj,
            main_norm=jnp.asarray(generated("mtp.0.main_norm.weight")),
            norm=jnp.asarray(generated("mtp.2.norm.weight")),
            markov_embed=subset("mtp.2.markov_head.embed.weight"),
            markov_head=subset("mtp.2.markov_head.head.weight"),
            confidence=jnp.asarray(generated("mtp.2.confidence_head.proj.weight")),
        ),
    )


@functools.partial(jax.jit, static_argnames="compute")
def run_draft(
    params: Params, state: KVState, hidden: jax.Array, batch: Any, compute: Compute
) -> Any:
    weights, config = params.drafter, DRAFT_CONFIG
    x = quantized_linear(hidden, values(weights.main_proj), compute)
    main_x = rms_norm(x, weights.main_norm, config.rms_norm_eps, compute)
    state = drafter.absorb(weights, state, hidden, batch, config, compute)
    info = manifest()["slices"]["dspark"]
    anchor = jnp.asarray([(info["token"] - 7) // 31], jnp.int32)
    position = jnp.asarray([info["main_position"] + 1], jnp.int32)
    return main_x, state, *look_into_draft(params, state, anchor, position, config, compute)


@pytest.mark.parametrize("compute", BOTH)
def test_draft(compute: Compute) -> None:
    info, golden = manifest()["slices"]["dspark"], recorded("official/dspark")
    config, position, params = DRAFT_CONFIG, info["main_position"], weights_of(draft_params)
    state = init_state(config, CacheShape(1, 1), compute)
    before = np.arange(position - 127, position) % ring_rows(config)
    ring = put(state.draft_window, (0, 0, before), stored("g.window", Format.FP8_GROUP))
    state = dataclasses.replace(state, draft_window=ring)
    tables = np.zeros((0, 1, 1), np.int32)
    batch = plain_batch(config, [(0, position, position + 1)], tables)
    hidden = jnp.asarray(generated(info["main_hidden"])).reshape(1, -1).astype(compute.dtype)
    main_x, state, draft, (stage,) = run_draft(params, state, hidden, batch, compute)
    prefix, exact = prefix_of(compute), compute is REFERENCE
    chosen = np.asarray(draft_experts())[np.asarray(stage["gate_idx"])]
    assert_same(chosen.astype(np.int32), golden[f"{prefix}gate_idx"])
    tokens = [info["token"], *SUBSET[np.asarray(draft.token_ids[0])].tolist()]
    assert tokens == golden[f"{prefix}tokens"].tolist()
    limits = {"attn_out": 0.012, "ffn_out": 0.05, "stream_out": 0.05, "pre_mix_out": 0.05}
    for name, limit in limits.items():
        if f"{prefix}{name}" in golden:
            expected = golden[f"{prefix}{name}"]
            assert_within(rel_rms, stage[name], expected, limit if exact else SMOOTH)
    base, limit = golden[f"{prefix}base_logits"], 0.05 if exact else SMOOTH
    assert_within(rel_rms, draft.base_logits[0], base, limit)
    confidence = golden[f"{prefix}confidence"]
    if not exact:
        assert_within(rel_rms, draft.confidence[0], confidence, SMOOTH)
        return
    assert_within(max_abs, draft.confidence[0], confidence, 0.5)
    bias = wide(draft.logits[0]) - wide(draft.base_logits[0])
    assert_within(max_abs, bias, golden["markov_bias"], 1e-4)
    assert_within(bf16_ulps, main_x, golden["main_x"], 1)
    ring_row = jax.tree.map(lambda x: x[0, 0, position % ring_rows(config)], state.draft_window)
    assert_same(wide(values(ring_row)), wide(golden["main_kv"][0]))


# i: matrix products


@pytest.mark.parametrize("columns", [5120, 8192, 4096])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_gemm(kind: str, columns: int) -> None:
    name = f"{kind}.{columns}"
    golden, x = recorded("official/gemm"), jnp.asarray(generated(f"i.x.{columns}"))
    codes, scales = generated(f"i.{name}.weight"), generated(f"i.{name}.scale")
    weight = (fp8_block if kind == "fp8" else mxfp4)(codes, scales)
    made = encode(x, Format.FP8_GROUP)
    assert_same(np.asarray(made.codes).view(np.uint8), golden[f"{name}.x_codes"])
    assert_same(made.scales, golden[f"{name}.x_scale_exp"])

    @jax.jit
    def product(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = values(weight)
        exact = dot(REFERENCE.fake_quantize(x, Format.FP8_GROUP), w)
        return quantized_linear(x, w, REFERENCE), exact

    rounded, exact = product(x)
    assert_within(rel_rms, exact, golden[f"{name}.out_f32"], 1e-5)
    assert_within(bf16_ulps, rounded, golden[f"{name}.out_bf16"], 1)
