"""Single operations against the recorded ones of the official implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    BF16,
    assert_same,
    assert_within,
    bf16_ulps,
    fp8_block,
    global_values,
    logit_error,
    look_into_draft,
    max_abs,
    mxfp4,
    padded,
    page_tables,
    plain_batch,
    recorded,
    rel_rms,
    run_attention,
    run_scores,
    tiny_model,
    wide,
    window_values,
)

from ds41jax.config import YarnConfig
from ds41jax.engine.loading import Model
from ds41jax.formats import Format, encode, values
from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.kernels.experts import expert_mlp, routed_experts
from ds41jax.kernels.index_select import candidate_blocks, top_rows
from ds41jax.kernels.linear import dot, quantized_linear
from ds41jax.kernels.mixes import sinkhorn
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.sparse_attention import sparse_attention
from ds41jax.kernels.streams import collapse, expand
from ds41jax.model import compressor, drafter
from ds41jax.model.attention import window_index
from ds41jax.model.engram import engram
from ds41jax.model.hyper_connections import MixWeights, initial_pre, split_mixes, stream_mixes
from ds41jax.model.indexer import empty_selection
from ds41jax.model.moe import moe, route, router_scores
from ds41jax.model.rope import compressed_frequencies, inverse_frequencies, rotate, yarn_bounds
from ds41jax.model.state import CacheShape, KVState, init_state
from ds41jax.model.tensors import at_layer

LAYER_LIMIT = 0.008  # rel. rms of an attention layer or an MoE from given input
FLOAT_LIMIT = 1e-5  # absolute, of Sinkhorn and gate values
YARN = YarnConfig(16.0, 32.0, 1.0, 65536)


# Matrix products


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_gemm(kind: str, case: int) -> None:
    golden = {
        k.removeprefix(f"{kind}.{case}."): v
        for k, v in recorded("ops/gemm").items()
        if k.startswith(f"{kind}.{case}.")
    }
    codes = golden["w_codes"] if kind == "fp8" else golden["w_packed"]
    weight = (fp8_block if kind == "fp8" else mxfp4)(codes, golden["w_scale_exp"])
    assert_same(values(weight), golden["w_dequant"])
    x = jnp.asarray(golden["x"])
    if kind == "fp8":
        made = encode(x, Format.FP8_GROUP)
        assert_same(np.asarray(made.codes).view(np.uint8), golden["x_codes"])
        assert_same(made.scales, golden["x_scale_exp"])

    @jax.jit
    def product(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = values(weight)
        exact = dot(REFERENCE.fake_quantize(x, Format.FP8_GROUP), w)
        return quantized_linear(x, w, REFERENCE), exact

    rounded, exact = product(x)
    assert_within(rel_rms, exact, golden["out_f32"], 1e-5)
    assert_within(bf16_ulps, rounded, golden["out_bf16"], 1)


# Hyper-connections


def hyper_weights() -> MixWeights:
    golden = recorded("ops/hyper_connection")
    return MixWeights(fn=golden["mix.fn"], base=golden["base"], scale=golden["scale"])


def test_sinkhorn(model: Model) -> None:
    golden = recorded("ops/hyper_connection")
    mixes = golden["mixes"][0]
    pre, post, comb = split_mixes(jnp.asarray(mixes), hyper_weights(), model.config)
    assert_within(max_abs, pre, golden["pre"][0], FLOAT_LIMIT)
    assert_within(max_abs, post, golden["post"][0], FLOAT_LIMIT)
    assert_within(max_abs, comb, golden["comb"][0], FLOAT_LIMIT)
    logits = (mixes[:, 8:] * golden["scale"][2] + golden["base"][8:]).reshape(-1, 4, 4)
    for iterations in 1, 2, 5:
        found = sinkhorn(jnp.asarray(logits), iterations, model.config.hc_eps)
        assert_within(max_abs, found, golden[f"comb_iters{iterations}"][0], FLOAT_LIMIT)
    assert_same(initial_pre(12, model.config), golden["identity_pre_mix"][0])


def test_mix_collapse_and_expand(model: Model) -> None:
    golden = recorded("ops/hyper_connection")
    stream = jnp.asarray(golden["mix.stream"][0])
    weights = hyper_weights()
    mixes = jax.jit(functools.partial(stream_mixes, config=model.config))(stream, weights)
    pre, post, comb = split_mixes(mixes, weights, model.config)
    for found, name in (pre, "pre"), (post, "post"), (comb, "comb"):
        assert_within(max_abs, found, golden[f"mix.{name}"][0], FLOAT_LIMIT)
    run = jax.jit(collapse, static_argnames="compute")
    out = run(stream, jnp.asarray(golden["mix.pre"][0]), compute=REFERENCE)
    assert_within(bf16_ulps, out, golden["hc_pre.out"][0], 1)
    given = [jnp.asarray(golden[k][0]) for k in ("hc_post.x", "mix.post", "mix.comb")]
    run = jax.jit(expand, static_argnames="compute")
    out = run(given[0], stream, given[1], given[2], compute=REFERENCE)
    assert_within(bf16_ulps, out, golden["hc_post.out"][0], 1)


# Norm and rotary positions


def test_rms_norm() -> None:
    golden = recorded("ops/norm_rope")
    run = jax.jit(rms_norm, static_argnames=("eps", "compute"))
    x, weight = jnp.asarray(golden["rms.x"]), jnp.asarray(golden["rms.weight"])
    assert_within(bf16_ulps, run(x, weight, 1e-20, REFERENCE), golden["rms.out"], 1)
    vision = golden["rms_vision_eps1e-6.out"]
    assert_within(bf16_ulps, run(x, weight, 1e-6, REFERENCE), vision, 1)
    assert np.any(wide(golden["rms.out"]) != wide(vision))


@pytest.mark.parametrize("kind,theta,yarn", [("yarn", 160000, YARN), ("plain", 10000, None)])
def test_rotary_tables(kind: str, theta: float, yarn: YarnConfig | None) -> None:
    golden = recorded("ops/norm_rope")
    frequencies = inverse_frequencies(64, theta, yarn)
    assert_same(frequencies, golden[f"{kind}.inv_freq"])
    if yarn:
        assert list(yarn_bounds(64, theta, yarn)) == golden["yarn.low_high"].tolist()
    positions = jnp.asarray(golden["positions"])
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    assert_same(angles, golden[f"{kind}.angle"])
    ones = jnp.tile(jnp.asarray([1.0, 0.0]), (len(positions), 32))
    turned = jax.jit(rotate, static_argnames="compute")(ones, positions, frequencies, FLOAT32)
    pairs = np.asarray(turned).reshape(-1, 32, 2)
    assert_within(max_abs, pairs[..., 0], golden[f"{kind}.cos"], 1e-6)
    assert_within(max_abs, pairs[..., 1], golden[f"{kind}.sin"], 1e-6)


def test_rotation() -> None:
    golden = recorded("ops/norm_rope")
    x = golden["rotary.x"]
    positions = jnp.asarray(golden["rotary.start"] + np.arange(x.shape[1]))
    run = jax.jit(rotate, static_argnames=("compute", "inverse"))
    for row in range(2):
        for kind, inverse in ("fwd", False), ("inverse", True):
            given = jnp.asarray(x[row])
            out = run(given, positions, golden["yarn.inv_freq"], REFERENCE, inverse=inverse)
            assert_within(bf16_ulps, out, golden[f"rotary.{kind}"][row], 1)
        given = jnp.asarray(x[row, :, 0])
        out = run(given, positions, golden["yarn.inv_freq"], REFERENCE)
        assert_within(bf16_ulps, out, golden["rotary.fwd_3d"][row], 1)


def test_only_the_last_columns_turn() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 96)), jnp.float32)
    frequencies = recorded("ops/norm_rope")["plain.inv_freq"]
    out = rotate(x, jnp.arange(5, 8), frequencies, FLOAT32)
    assert_same(out[..., :32], x[..., :32])
    assert_within(max_abs, rotate(out, jnp.arange(5, 8), frequencies, FLOAT32, True), x, 1e-5)


# Sparse attention


@functools.cache
def sparse_output(case: int, sequence: int, compute: Compute) -> np.ndarray:
    golden = recorded("ops/sparse_attn")
    q, kv, index = (jnp.asarray(golden[f"{case}.{k}"][sequence]) for k in ("q", "kv", "idx"))
    sink, scale = jnp.asarray(golden[f"{case}.sink"]), float(golden[f"{case}.scale"][0])
    run = jax.jit(lambda q, kv, i: sparse_attention(q, ((kv, i),), sink, scale, compute))
    return np.asarray(run(q, kv, index))


@pytest.mark.parametrize("case", range(3))
def test_sparse_attention(case: int) -> None:
    """The recorded output, closer than float32 probabilities come to it."""
    golden = recorded("ops/sparse_attn")
    expected, other = golden[f"{case}.out"], golden[f"{case}.out_exact_softmax"]
    for sequence in range(len(expected)):
        found = sparse_output(case, sequence, REFERENCE)
        assert_within(rel_rms, found, expected[sequence], 0.0005)
        unrounded = sparse_output(case, sequence, FLOAT32).astype(BF16)
        assert_within(bf16_ulps, unrounded, other[sequence], 1)
        if case < 2:  # in the third shape the two outputs are the same
            assert rel_rms(other[sequence], expected[sequence]) > 0.001
            assert rel_rms(unrounded, expected[sequence]) > 0.001


def test_sparse_attention_of_empty_rows() -> None:
    empties = 0
    for case in range(3):
        golden = recorded("ops/sparse_attn")
        for sequence, index in enumerate(golden[f"{case}.idx"]):
            empty = (index < 0).all(-1)
            empties += empty.sum()
            assert not wide(sparse_output(case, sequence, REFERENCE))[empty].any()
    assert empties


@pytest.mark.parametrize("start,count", [(0, 5), (0, 20), (3, 1), (8, 1), (21, 1)])
def test_window_indices(model: Model, start: int, count: int) -> None:
    """Positions that rows see: the recorded lists, which name ring slots when decoding."""
    expected = recorded("ops/sparse_attn")[f"window_idx.w8.s{count}.p{start}"][0]
    tables = page_tables(model.config)
    batch = plain_batch(model.config, [(0, start, start + count)], tables, buckets=(count,))
    found = np.asarray(window_index(batch, jnp.zeros(1, jnp.int32), 8, 16))
    in_step = found >= 16
    positions = np.where(in_step, start + found - 16, found)
    for row, (mine, theirs) in enumerate(zip(positions, expected, strict=True)):
        seen = theirs[theirs >= 0] if start == 0 else oldest_first(theirs, start, 8)
        modulus = np.where(in_step[row], 1 << 20, 16)
        assert (mine >= 0).sum() == len(seen), row
        assert_same(mine[mine >= 0], (seen % modulus[mine >= 0]).astype(mine.dtype))


def oldest_first(slots: np.ndarray, position: int, window: int) -> np.ndarray:
    """The positions up to `position` that stand in the slots of a ring of `window`, as listed."""
    slots = slots[slots >= 0]
    return position - (position - slots) % window


# Compressor and attention layers


@pytest.mark.parametrize("layer,source", [(2, 0), (6, 2)])
def test_compressor(model: Model, layer: int, source: int) -> None:
    """Two sequences in one batch: 9 rows, then one by one; 12 rows at once."""
    golden = recorded("ops/compressor_attention")
    x = golden[f"layer{layer}.x"]
    ratio = model.config.source_ratios[source]
    state = init_state(model.config, CacheShape(2, 6), REFERENCE)
    state = compressed_rows(model, state, x, source, 0, 9)
    for position in range(9, x.shape[1]):
        state = compressed_rows(model, state, x, source, position, position + 1)
    tables = page_tables(model.config, slots=2)
    for name, expected in golden.items():
        if not name.startswith((f"layer{layer}.prefill9", f"layer{layer}.decode")):
            continue
        count, last = expected.shape[1], 8 if "prefill" in name else int(name.split("_pos")[1])
        groups = range((last + 1) // ratio - count, (last + 1) // ratio)
        check_compressed(state, tables, source, groups, expected)
    whole = init_state(model.config, CacheShape(2, 6), REFERENCE)
    whole = compressed_rows(model, whole, x, source, 0, 12)
    expected = golden[f"layer{layer}.prefill12"]
    check_compressed(whole, tables, source, range(12 // ratio), expected)


@functools.partial(jax.jit, static_argnames=("source", "config"))
def store_compressed(
    x: jax.Array, state: KVState, weights: Any, batch: Any, source: int, config: Any
) -> KVState:
    ratio = config.source_ratios[source]
    made = compressor.compress(x, weights, source, ratio, state.carry, batch, config, REFERENCE)
    return compressor.store(made, source, state, batch, config, REFERENCE)


def compressed_rows(
    model: Model, state: KVState, x: np.ndarray, source: int, first: int, last: int
) -> KVState:
    rows = [(slot, first, last) for slot in range(2)]
    tables = page_tables(model.config, slots=2)
    batch = plain_batch(model.config, rows, tables, buckets=(2, 24))
    flat = padded(x[:, first:last].reshape(-1, x.shape[-1]), len(batch.positions))
    return store_compressed(flat, state, model.params.compressor, batch, source, model.config)


def check_compressed(
    state: KVState, tables: np.ndarray, source: int, groups: range, expected: np.ndarray
) -> None:
    """Recorded rows are latents before rotation and quantisation."""
    config = tiny_model().config
    positions = jnp.asarray(groups) * config.source_ratios[source]
    for slot in range(2):
        latent = jnp.asarray(expected[slot])
        rotated = rotate(latent, positions, compressed_frequencies(config), REFERENCE)
        stored = global_values(state.pages, tables, source, groups, slot)
        assert_same(stored, values(encode(rotated, Format.KV_FP4)))


ATTENTION_LAYERS = (0, 2, 3, 6, 8, 9)


@functools.cache
def attention_run() -> dict[str, Any]:
    """The recorded sequence of attention layers: 41 rows, then four single ones."""
    model = tiny_model()
    config, params = model.config, model.params
    tables = page_tables(config)
    x = recorded("ops/compressor_attention")["attn.x"][0]
    state = init_state(config, CacheShape(1, tables.size), REFERENCE)
    found: dict[str, Any] = {}
    for first, last in [(0, 41)] + [(p, p + 1) for p in range(41, 45)]:
        batch = plain_batch(config, [(0, first, last)], tables)
        rows = padded(x[first:last], len(batch.positions))
        selection = empty_selection(batch, config)
        for layer in ATTENTION_LAYERS:
            out, state, selection = run_attention(
                rows, layer, state, selection, params, batch, config, REFERENCE
            )
            scores = None
            if config.index_source_index[layer] >= 0:
                ratio = config.layer_ratios[layer]
                scores = run_scores(rows, layer, state, params, batch, ratio, config, REFERENCE)
            step = "prefill" if first == 0 else f"pos{first}"
            found[f"attn.{step}.layer{layer}"] = (
                last - first,
                first,
                out,
                state,
                selection,
                scores,
            )
    return found


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("step", ["prefill", "pos41", "pos42", "pos43", "pos44"])
def test_attention_layer(model: Model, step: str, layer: int) -> None:
    golden, key = recorded("ops/compressor_attention"), f"attn.{step}.layer{layer}"
    count, first, out, state, selection, scores = attention_run()[key]
    config, tables = model.config, page_tables(model.config)
    assert_within(rel_rms, out[:count], golden[f"{key}.out"][0], LAYER_LIMIT)
    kept = range(max(first, first + count - 16), first + count)
    expected = golden[f"{key}.window_kv"][0][-len(kept) :]
    assert_same(wide(window_values(state, layer, kept)), wide(expected))
    if layer in config.kv_source_layer_ids:
        check_published(golden, key, state, tables, config.kv_source_index[layer], first, count)
    if scores is not None:
        check_selected(golden, key, selection, scores[3], config.candidate_block_size)


def check_published(
    golden: Any, key: str, state: KVState, tables: np.ndarray, source: int, first: int, count: int
) -> None:
    """New global rows and index keys; an open pair publishes nothing."""
    if f"{key}.compress_kv" not in golden:
        assert source == 0 and first % 2 == 0
        return
    rows, keys = golden[f"{key}.compress_kv"][0], golden[f"{key}.index_k"][0]
    last = (first + count) // (2 if source == 0 else 1)
    groups = range(last - len(rows), last)
    assert_same(wide(global_values(state.pages, tables, source, groups)), wide(rows))
    assert_same(wide(global_values(state.index_pages, tables, source, groups)), wide(keys))


def check_selected(golden: Any, key: str, selection: Any, scores: Any, block: int) -> None:
    expected = wide(golden[f"{key}.index_score"][0])
    scores = wide(scores)[: len(expected), : expected.shape[1]]
    assert_same(np.isfinite(scores), np.isfinite(expected))
    visible = np.isfinite(expected)
    assert_within(rel_rms, scores[visible], expected[visible], LAYER_LIMIT)
    topk, margin = golden[f"{key}.topk"][0], golden[f"{key}.topk_rel_margin"][0]
    rows = np.asarray(selection.rows)[: len(topk)]
    assert_same(rows[margin >= 0.02], topk[margin >= 0.02])
    for row in np.flatnonzero(margin < 0.02):
        mine, theirs = (expected[row, ids[ids >= 0]] for ids in (rows[row], topk[row]))
        assert_within(rel_rms, np.sort(mine), np.sort(theirs), LAYER_LIMIT)
    if f"{key}.candidates" in golden:
        mask = golden[f"{key}.candidates"][0].astype(bool)
        found = np.repeat(np.asarray(selection.blocks), block, axis=1)
        found = found[: len(mask), : mask.shape[1]]
        assert_same(found & visible, mask & visible)


@pytest.mark.parametrize("case", ["0", "1", "2", "decode"])
def test_candidate_blocks(case: str) -> None:
    golden = recorded("ops/candidate_blocks")
    logits = (
        golden[f"{case}.logits"].astype(np.float32).reshape(-1, golden[f"{case}.mask"].shape[-1])
    )
    top, block = golden[f"{case}.topk_blocks_block_size"].tolist()
    for row, visible, mask in zip(
        logits,
        golden[f"{case}.compress_lens"].ravel(),
        golden[f"{case}.mask"].reshape(logits.shape),
        strict=True,
    ):
        scores = jnp.where(jnp.arange(len(row)) < visible, row, -jnp.inf)
        found = candidate_blocks(scores, jnp.asarray(visible), top, block)
        kept = np.repeat(np.asarray(found), block)[: len(row)]
        seen = np.arange(len(row)) < visible
        assert_same(kept & seen, mask.astype(bool) & seen)
        assert kept[visible - 1]


def test_ties_go_to_the_lowest_index() -> None:
    scores = jnp.asarray([1.0, 3.0, 2.0, 2.0, 2.0, -jnp.inf])
    assert top_rows(scores, 3).tolist() == [1, 2, 3]
    assert top_rows(scores, 8).tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    blocks = candidate_blocks(jnp.asarray([2.0, 0.0, 2.0, 1.0, 0.0, 0.0]), jnp.asarray(6), 2, 2)
    assert blocks.tolist() == [True, False, True]


# Experts


def moe_weights(model: Model, layer: int | str) -> tuple[Any, int]:
    config, params = model.config, model.params
    if layer == "mtp1":
        return at_layer(params.drafter.stages.ffn, 1), config.dspark_num_experts_per_tok
    return at_layer(params.layers.ffn, layer), config.num_experts_per_tok


@functools.partial(jax.jit, static_argnames=("k", "config"))
def run_moe(x: jax.Array, is_image: jax.Array, weights: Any, k: int, config: Any) -> Any:
    scores = router_scores(x, weights.gate.weight)
    chosen = route(x, is_image, weights.gate, k, config)
    return scores, *chosen, moe(x, is_image, weights, k, config, REFERENCE)


@pytest.mark.parametrize("layer", [0, 3, 7, "mtp1"])
@pytest.mark.parametrize("kind", ["text", "mixed"])
def test_moe(model: Model, layer: int | str, kind: str) -> None:
    golden = recorded("ops/moe")
    weights, k = moe_weights(model, layer)
    name = layer if layer == "mtp1" else f"layer{layer}.{kind}"
    is_image = golden["image_mask"].astype(bool) & (kind == "mixed") & (layer != "mtp1")
    scores, ids, routing, out = run_moe(golden["x"], is_image, weights, k, model.config)
    if layer != "mtp1":
        assert_within(max_abs, scores, golden[f"gate.layer{layer}.scores"], FLOAT_LIMIT)
    assert_same(ids, golden[f"gate.{name}.indices"])
    assert_within(max_abs, routing, golden[f"gate.{name}.weights"], FLOAT_LIMIT)
    assert_within(rel_rms, out, golden[f"moe.{name}.out"], LAYER_LIMIT)


def test_image_rows_route_differently() -> None:
    golden = recorded("ops/moe")
    pairs = [
        (golden[f"gate.layer{n}.text.indices"], golden[f"gate.layer{n}.mixed.indices"])
        for n in (0, 3, 7)
    ]
    assert any(np.any(text != mixed) for text, mixed in pairs)


@pytest.mark.parametrize("case", ["small", "clamped"])
def test_expert(model: Model, case: str) -> None:
    """Expert 2 of layer 3 and the shared expert, with the SwiGLU clamp at rest and at work."""
    golden, config = recorded("ops/moe"), model.config
    x, weight = jnp.asarray(golden[f"expert.{case}.x"]), golden[f"expert.{case}.route_weight"]
    ffn = at_layer(model.params.layers.ffn, 3)
    e = ffn.experts
    stack = (e.w1, e.w2, e.w3)
    ids = jnp.full((len(x), 1), 2, jnp.int32)
    for name, w in ("w1", e.w1), ("w3", e.w3):
        one = values(jax.tree.map(lambda leaf: leaf[3, 2], w.at_layer(None)))
        out = quantized_linear(x, one, REFERENCE)
        assert_within(bf16_ulps, out, golden[f"expert.{case}.{name}_out"], 1)
    clamped = np.abs(wide(golden[f"expert.{case}.w3_out"])) > config.swiglu_limit
    assert clamped.any() == (case == "clamped")
    out = routed_experts(x, ids, jnp.asarray(weight), stack, config.swiglu_limit, REFERENCE)
    assert_within(rel_rms, out, golden[f"expert.{case}.out"], LAYER_LIMIT)
    s = ffn.shared_experts
    dense = values(s.w1), values(s.w2), values(s.w3)
    out = expert_mlp(x, dense, None, config.swiglu_limit, REFERENCE)
    assert_within(rel_rms, out, golden[f"shared.{case}.out"], LAYER_LIMIT)


# Engram


@pytest.mark.parametrize("layer", [1, 4])
def test_engram(model: Model, layer: int) -> None:
    golden, place = recorded("ops/engram"), model.config.engram_index[layer]
    lookup = model.engram
    assert lookup is not None
    weights = at_layer(model.params.engram, place)

    @jax.jit
    def run(stream: jax.Array, rows: Any, admitted: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = values(rows).reshape(len(admitted), -1)
        kv = quantized_linear(flat, values(weights.wkv), REFERENCE)
        return kv, engram(stream, rows, admitted, weights, model.config, REFERENCE)

    for n in range(2):
        text = golden["mask"][n, :9].astype(bool)
        rows = lookup.gather(golden["ids"][n, :9], ~text, 0).map(lambda x: x[:, place])
        assert_same(wide(values(rows)), wide(golden[f"layer{layer}.rows"][n]))
        stream = jnp.asarray(golden["stream"][n])
        kv, out = run(stream, rows, text)
        assert_within(bf16_ulps, kv, golden[f"layer{layer}.kv"][n], 1)
        assert_within(bf16_ulps, out, golden[f"layer{layer}.out"][n], 1)
        assert_same(out[~text], stream[~text])
        _, out = run(stream, rows, np.ones(9, bool))
        assert_within(bf16_ulps, out, golden[f"layer{layer}.out_nomask"][n], 1)


# Drafter

PROMPT_ROWS = 13


@functools.cache
def draft_steps() -> list[Any]:
    """Three drafts, each after one more target row; every stage looked into."""
    model = tiny_model()
    config, weights = model.config, model.params.drafter
    golden, tables = recorded("ops/dspark"), page_tables(model.config)

    @jax.jit
    def absorb(state: KVState, hidden: jax.Array, batch: Any) -> KVState:
        return drafter.absorb(weights, state, hidden, batch, config, REFERENCE)

    looked_into = jax.jit(functools.partial(look_into_draft, config=config, compute=REFERENCE))
    state = init_state(config, CacheShape(1, tables.size), REFERENCE)
    hidden, steps = golden["main_hidden"][0], []
    for first, last in [(0, PROMPT_ROWS)] + [(p, p + 1) for p in range(PROMPT_ROWS, 16)]:
        batch = plain_batch(config, [(0, first, last)], tables, buckets=(1, 16))
        state = absorb(state, padded(hidden[first:last], len(batch.positions)), batch)
        if first:
            anchor = jnp.asarray([golden["tokens"][first - PROMPT_ROWS + 1]])
            steps.append(looked_into(model.params, state, anchor, jnp.asarray([last])))
    return steps


@pytest.mark.parametrize("step", range(3))
def test_draft(step: int) -> None:
    golden, prefix = recorded("ops/dspark"), f"step{step}"
    out, stages = draft_steps()[step]
    for i, stage in enumerate(stages):
        for name in ("attn_out", "ffn_out", "stream_out", "pre_mix_out"):
            expected = golden[f"{prefix}.stage{i}.{name}"][0]
            assert_within(rel_rms, stage[name], expected, 0.08)
        assert_same(stage["gate_idx"], golden[f"{prefix}.stage{i}.gate_idx"])
    assert out.token_ids[0].tolist() == golden[f"{prefix}.ids"][0, 1:].tolist()
    assert_within(logit_error, out.base_logits, golden[f"{prefix}.base_logits"], 0.03)
    assert_within(logit_error, out.logits, golden[f"{prefix}.logits"], 0.03)
    assert_within(max_abs, out.confidence, golden[f"{prefix}.confidence"], 0.12)


@pytest.mark.parametrize("step", range(3))
def test_first_stage_of_a_draft(step: int) -> None:
    """Its attention sees recorded input alone, so the tight limit holds."""
    expected = recorded("ops/dspark")[f"step{step}.stage0.attn_out"][0]
    assert_within(rel_rms, draft_steps()[step][1][0]["attn_out"], expected, LAYER_LIMIT)


def test_main_projection_and_draft_heads(model: Model) -> None:
    golden, weights = recorded("ops/dspark"), model.params.drafter
    for step in range(3):
        hidden = jnp.asarray(golden["main_hidden"][0, PROMPT_ROWS + step][None])
        x = quantized_linear(hidden, values(weights.main_proj), REFERENCE)
        x = rms_norm(x, weights.main_norm, model.config.rms_norm_eps, REFERENCE)
        assert_within(bf16_ulps, x, golden[f"step{step}.main_x"][0], 1)
    embedding = weights.markov_embed[golden["tokens"]]
    assert_same(embedding, golden["markov.embed"])
    bias = dot(embedding, weights.markov_head)
    assert_within(max_abs, bias, golden["markov.bias"], 1e-4)
    features = jnp.concatenate([jnp.asarray(golden["confidence.hidden"][0]), embedding], axis=-1)
    confidence = dot(features, weights.confidence)[:, 0]
    assert_within(max_abs, confidence, golden["confidence.out"][0], 1e-4)
