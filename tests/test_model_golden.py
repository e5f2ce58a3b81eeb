"""The whole tiny model against the recorded runs of the official implementation.

The float32 numerics are compared tightly: they show wiring errors. The reference numerics amplify
rounding, so whole runs have wide limits; single layers from recorded input have narrow ones.
"""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from oracle import (
    BOTH,
    Run,
    assert_same,
    assert_within,
    bf16_ulps,
    global_values,
    logit_error,
    look_into,
    look_into_draft,
    max_abs,
    padded,
    recorded,
    rel_rms,
    run_attention,
    run_scores,
    tiny_model,
    wide,
    window_values,
)

from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.streams import collapse, expand
from ds41jax.model import backbone, text_layer
from ds41jax.model.block import attention_input
from ds41jax.model.hyper_connections import initial_pre, split_mixes, stream_mixes
from ds41jax.model.indexer import empty_selection
from ds41jax.model.moe import moe, route, router_scores
from ds41jax.model.tensors import at_layer
from ds41jax.model.vision import image_span

SMOOTH = 1e-3  # absolute, everything in float32 numerics
RUNS = ("p20", "p33", "p64", "img", "b13", "b27")
SPAN = slice(6, 16)


def golden_run(file: str, case: str, compute: Compute) -> dict[str, np.ndarray]:
    """Recorded values of a case: those of the numerics, under the keys without prefix."""
    plain = {
        k.removeprefix(f"{case}."): v for k, v in recorded(file).items() if k.startswith(f"{case}.")
    }
    smooth = {k.removeprefix("smooth."): v for k, v in plain.items() if k.startswith("smooth.")}
    return plain | smooth if compute is FLOAT32 else plain


def start_run(case: str, compute: Compute, tokens: np.ndarray) -> Run:
    """A run with its prompt's image, if it has one: rows of every span type are image rows."""
    run = Run(compute, tokens)
    if case == "img":
        golden, config = recorded("tiny_runs"), run.config
        run.is_image = golden["img.token_types"] >= 0
        assert np.flatnonzero(run.is_image).tolist() == list(range(6, 16))
        vision, weights = config.vision, run.model.params.vision
        span = image_span(weights, golden["img.patches"], 6, 8, vision, compute)
        run.image_embeds[SPAN] = wide(span)
    return run


def decode(run: Run, tokens: np.ndarray, drafts: bool = True) -> dict[str, np.ndarray]:
    """Teacher-forced steps over tokens[:-1]; after each a draft that starts with the next."""
    found: dict[str, list[Any]] = {}
    for token, following in itertools.pairwise(tokens):
        logits, hidden = run.append(token)
        step = {"decode_logits": logits, "decode_main_hidden": hidden}
        if drafts:
            step |= drafted(run, following)
        for name, value in step.items():
            found.setdefault(name, []).append(value)
    return {name: np.stack(each) for name, each in found.items()}


def drafted(run: Run, anchor: int) -> dict[str, np.ndarray]:
    draft = run.draft(anchor)
    return {
        "spec_ids": np.append(anchor, np.asarray(draft.token_ids)[0]),
        "spec_base_logits": np.asarray(draft.base_logits)[0],
        "spec_logits": np.asarray(draft.logits)[0],
        "spec_confidence": np.asarray(draft.confidence)[0],
    }


# Exact prefill and decoding


@functools.cache
def full_run(case: str, compute: Compute) -> dict[str, np.ndarray]:
    golden = golden_run("tiny_runs", case, compute)
    run = start_run(case, compute, golden["input_ids"])
    logits, hidden = run.full(0, len(run.tokens))
    found = {"prefill_logits": logits, "prefill_main_hidden": hidden}
    return found | decode(run, golden["decode_tokens"])


@pytest.mark.parametrize("case", RUNS)
def test_float32_run(case: str) -> None:
    golden, found = golden_run("tiny_runs", case, FLOAT32), full_run(case, FLOAT32)
    for name, value in found.items():
        assert_within(max_abs, value, golden[name], SMOOTH)
        if name.endswith("logits"):
            assert_same(value.argmax(-1), golden[name].argmax(-1))
    assert_same(found["spec_ids"], golden["spec_ids"])


@pytest.mark.parametrize("case", RUNS)
def test_reference_run(case: str) -> None:
    golden, found = golden_run("tiny_runs", case, REFERENCE), full_run(case, REFERENCE)
    expected = np.concatenate([golden["prefill_logits"], golden["decode_logits"]])
    logits = np.concatenate([found["prefill_logits"], found["decode_logits"]])
    assert_within(logit_error, logits, expected, 0.10)
    agree = logits.argmax(-1) == expected.argmax(-1)
    assert agree.mean() >= 0.80
    assert agree[golden["argmax_gap"] >= 1.2].all()
    for phase in "prefill", "decode":
        name = f"{phase}_main_hidden"
        assert_within(rel_rms, found[name], golden[name], 0.09)


@pytest.mark.parametrize("case", RUNS)
def test_reference_drafts(case: str) -> None:
    """Drafts while the tokens drafted before them agree."""
    golden, found = golden_run("tiny_runs", case, REFERENCE), full_run(case, REFERENCE)
    equal = found["spec_ids"] == golden["spec_ids"]
    assert equal[:, 1:].mean() >= 0.80
    same = np.cumprod(equal[:, :-1], axis=1).astype(bool)
    assert_within(logit_error, found["spec_base_logits"], golden["spec_base_logits"], 0.04)
    assert_within(logit_error, found["spec_logits"][same], golden["spec_logits"][same], 0.04)
    confidence = found["spec_confidence"][same]
    assert_within(max_abs, confidence, golden["spec_confidence"][same], 0.45)


@pytest.mark.parametrize("case", RUNS)
def test_routing_and_selection(case: str) -> None:
    """Choices of every layer where their margin is clear, scores where it is thin."""
    golden = golden_run("tiny_runs", case, REFERENCE)
    run = start_run(case, REFERENCE, golden["input_ids"])
    count, config = len(run.tokens), run.config
    batch = run.batch(0, count, 64)
    (_, logits, _), seen = look_into(run.model.params, run.state, batch, config, REFERENCE)
    assert_within(logit_error, logits[:count], golden["prefill_logits"], 0.10)
    for layer, (ids, weights) in enumerate(seen["routing"]):
        sure = golden["sel.gate_margin"][layer] >= 0.02
        ids, weights = np.asarray(ids)[:count], np.asarray(weights)[:count]
        assert_same(ids[sure].astype(np.uint8), golden["sel.gate_idx"][layer][sure])
        assert_within(max_abs, weights[sure], golden["sel.gate_weights"][layer][sure], 0.02)
    for place, layer in enumerate(config.index_source_layer_ids):
        selection, scores = seen["selection"][place], seen["scores"][place]
        check_index(golden, layer, np.asarray(selection.rows)[:count], wide(scores)[:count])
    blocks = np.asarray(seen["selection"][2].blocks)[:count]
    kept = np.repeat(blocks, config.candidate_block_size, axis=1)[:, :count]
    visible = np.tri(count, dtype=bool)
    differ = (kept & visible) != (golden["sel.candidates.6"].astype(bool) & visible)
    assert differ[visible].mean() <= 0.10


def check_index(golden: Any, layer: int, rows: np.ndarray, scores: np.ndarray) -> None:
    expected = wide(golden[f"sel.index_score.{layer}"])
    scores = scores[:, : expected.shape[1]]
    visible = np.isfinite(expected)
    assert_same(np.isfinite(scores), visible)
    assert_within(rel_rms, scores[visible], expected[visible], 0.10)
    topk = golden[f"sel.index_topk.{layer}"]
    everything = np.isinf(golden[f"sel.index_margin.{layer}"])
    padded_topk = np.pad(topk, ((0, 0), (0, rows.shape[1] - topk.shape[1])), constant_values=-1)
    assert_same(rows[everything], padded_topk[everything])
    assert_same((rows >= 0).sum(1), (topk >= 0).sum(1))
    chosen = [
        [np.sort(score[ids[ids >= 0]]) for ids, score in zip(choice, expected, strict=True)]
        for choice in (rows, topk)
    ]
    assert_within(rel_rms, *(np.concatenate(scores) for scores in chosen), 0.10)


# Layer by layer, from recorded input

PHASES = ("prefill", "step0", "step1")


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def run_layer_parts(
    given: dict[str, jax.Array],
    index: int,
    params: Any,
    batch: Any,
    config: Any,
    compute: Compute,
) -> dict[str, jax.Array]:
    """The parts of a layer, each from recorded input."""
    weights = at_layer(params.layers, index)
    stream = given["stream_in"]
    attn = split_mixes(stream_mixes(stream, weights.hc_attn, config), weights.hc_attn, config)
    made = expand(
        given["attn_out"],
        stream,
        given.get("attn_post", attn[1]),
        given.get("attn_comb", attn[2]),
        compute,
    )
    mid, attn_pre = given.get("stream_mid", made), given.get("attn_pre", attn[0])
    ffn = split_mixes(stream_mixes(mid, weights.hc_ffn, config), weights.hc_ffn, config)
    x = collapse(mid, attn_pre, compute)
    x = rms_norm(x, weights.ffn_norm, config.rms_norm_eps, compute)
    k = config.num_experts_per_tok
    ids, routing = route(x, batch.is_image, weights.ffn.gate, k, config)
    return {
        "attn_in": attention_input(stream, given["pre_mix_in"], weights, config, compute),
        "attn_pre": attn[0],
        "attn_post": attn[1],
        "attn_comb": attn[2],
        "stream_mid": made,
        "gate_scores": router_scores(x, weights.ffn.gate.weight),
        "gate_idx": ids,
        "gate_w": routing,
        "ffn_out": moe(x, batch.is_image, weights.ffn, k, config, compute),
        "stream_out": expand(given["ffn_out"], mid, ffn[1], ffn[2], compute),
        "pre_mix_out": ffn[0],
        "hidden": collapse(given["stream_out"], given["pre_mix_out"], compute),
        "next_stream_in": text_layer.add_engram(
            given["stream_out"], index + 1, params, batch, config, compute
        ),
    }


@functools.cache
def layer_by_layer(compute: Compute) -> dict[str, Any]:
    """Everything recorded about the backbone layers of p20, recomputed from recorded input."""
    run = Run(compute, recorded("tiny_runs")["p20.input_ids"], pages=1)
    tokens = recorded("tiny_runs")["p20.decode_tokens"]
    found: dict[str, Any] = {}
    for phase, first, last in ("prefill", 0, 20), ("step0", 20, 21), ("step1", 21, 22):
        if first:
            run.tokens = np.append(run.tokens, tokens[first - 20])
            run.is_image = np.append(run.is_image, False)
        run.image_embeds = np.zeros((last, run.config.hidden_size), np.float32)
        found |= phase_layers(run, phase, first, last, compute)
    return found


GIVEN = (
    "stream_in attn_pre attn_post attn_comb attn_out stream_mid ffn_out stream_out pre_mix_out"
).split()


def mode_of(compute: Compute) -> str:
    return "smooth" if compute is FLOAT32 else "quant"


def layer_inputs(compute: Compute, phase: str, layer: int, rows: int) -> dict[str, jax.Array]:
    """What is recorded of a layer's inner values (float32 lacks some), padded to `rows`."""
    golden, lead = recorded("tiny_intermediates"), f"{mode_of(compute)}.{phase}.layers"
    given = {name: golden.get(f"{lead}.{layer}.{name}") for name in GIVEN}
    found = {name: padded(v[0], rows) for name, v in given.items() if v is not None}
    if layer == 0:
        return found | {"pre_mix_in": initial_pre(rows, tiny_model().config)}
    return found | {"pre_mix_in": padded(golden[f"{lead}.{layer - 1}.pre_mix_out"][0], rows)}


def phase_layers(run: Run, phase: str, first: int, last: int, compute: Compute) -> dict[str, Any]:
    config, params = run.config, run.model.params
    batch = run.batch(first, last, 32 if first == 0 else 1)
    rows, selection, found = len(batch.positions), empty_selection(batch, config), {}
    for layer in range(config.num_hidden_layers):
        key = f"{phase}.layers.{layer}"
        given = layer_inputs(compute, phase, layer, rows)
        parts = run_layer_parts(given, layer, params, batch, config, compute)
        parts["attn_out"], run.state, selection = run_attention(
            parts["attn_in"], layer, run.state, selection, params, batch, config, compute
        )
        if config.index_source_index[layer] >= 0:
            parts["topk"], parts["blocks"] = selection.rows, selection.blocks
            ratio = config.layer_ratios[layer]
            parts["index_score"] = run_scores(
                parts["attn_in"], layer, run.state, params, batch, ratio, config, compute
            )[3]
        found[key] = parts | {"state": run.state}
    return found


@pytest.mark.parametrize("layer", range(10))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("compute", BOTH)
def test_layer_from_recorded_input(compute: Compute, phase: str, layer: int) -> None:
    prefix, file = f"{mode_of(compute)}.{phase}.", recorded("tiny_intermediates")
    mine = f"{prefix}layers.{layer}."
    golden = {k.removeprefix(mine): v for k, v in file.items() if k.startswith(mine)}
    golden["next_stream_in"] = file.get(f"{prefix}layers.{layer + 1}.stream_in")
    golden["hidden"] = file[f"{prefix}final_hidden"] if layer == 9 else None
    parts, count = layer_by_layer(compute)[f"{phase}.layers.{layer}"], golden["attn_out"].shape[1]
    for name, (measure, limit) in layer_limits(compute).items():
        expected = golden.get(name)
        if expected is None or (name == "next_stream_in" and layer == 9):
            assert compute is FLOAT32 or name in ("hidden", "next_stream_in")
            continue
        expected = expected if name.startswith("gate") else expected[0]
        assert_within(measure, np.asarray(parts[name])[:count], expected, limit)
    if "gate_idx" in golden:
        assert_same(np.asarray(parts["gate_idx"])[:count], golden["gate_idx"])
    check_caches(golden, parts, layer, phase, compute)


def layer_limits(compute: Compute) -> dict[str, tuple[Any, float]]:
    sums = ("stream_mid", "stream_out", "next_stream_in", "hidden")
    floats = ("attn_pre", "attn_post", "attn_comb", "pre_mix_out", "gate_scores", "gate_w")
    limits: dict[str, tuple[Any, float]] = dict.fromkeys(floats, (max_abs, 1e-5))
    if compute is FLOAT32:
        return limits | dict.fromkeys(("attn_out", "ffn_out", *sums), (max_abs, SMOOTH))
    return (
        limits
        | dict.fromkeys(("attn_out", "ffn_out"), (rel_rms, 0.008))
        | dict.fromkeys(sums, (bf16_ulps, 1))
    )


@pytest.mark.parametrize("compute", BOTH)
def test_embedding(compute: Compute) -> None:
    golden = recorded("tiny_intermediates")[f"{mode_of(compute)}.prefill.embed_out"][0]
    run = Run(compute, recorded("tiny_runs")["p20.input_ids"], pages=1)
    stream = backbone.embed(run.model.params, run.batch(0, 20, 20), run.config, compute)
    assert_same(stream, np.repeat(golden[:, None], 4, axis=1))


@pytest.mark.parametrize("compute", BOTH)
def test_draft_stages_of_the_run(compute: Compute) -> None:
    """Every stage of the drafts after two decoded rows, whole run before them."""
    golden, tokens = recorded("tiny_intermediates"), recorded("tiny_runs")["p20.decode_tokens"]
    run = Run(compute, recorded("tiny_runs")["p20.input_ids"])
    run.full(0, 20)
    looked_into = jax.jit(functools.partial(look_into_draft, config=run.config, compute=compute))
    for step in range(2):
        run.append(tokens[step])
        position = np.array([len(run.tokens)], np.int32)
        draft, stages = looked_into(run.model.params, run.state, tokens[step + 1], position)
        prefix = f"{mode_of(compute)}.step{step}."
        if compute is REFERENCE:
            expected = golden[f"{prefix}dspark.base_logits"]
            assert_within(logit_error, draft.base_logits, expected, 0.04)
            continue
        for stage, found in enumerate(stages):
            for name in ("attn_out", "ffn_out", "stream_out", "pre_mix_out"):
                expected = golden[f"{prefix}layers.{10 + stage}.{name}"][0]
                assert_within(max_abs, found[name], expected, SMOOTH)


def check_caches(golden: Any, parts: Any, layer: int, phase: str, compute: Compute) -> None:
    """Window rows, global rows, index keys, scores and selections; exact unless in float32."""
    config, limit = tiny_model().config, SMOOTH if compute is FLOAT32 else 0
    last = {"prefill": 20, "step0": 21, "step1": 22}[phase]
    tables = np.arange(3, dtype=np.int32).reshape(3, 1, 1)
    if "window_kv" in golden:
        expected = golden["window_kv"][0][-16:]
        found = window_values(parts["state"], layer, range(last - len(expected), last))
        assert_within(max_abs, found, expected, limit)
    if "compress_kv" in golden:
        source = config.kv_source_index[layer]
        for name, pages in ("compress_kv", "pages"), ("index_k", "index_pages"):
            expected, end = golden[name][0], last // config.source_ratios[source]
            groups = range(end - len(expected), end)
            found = global_values(getattr(parts["state"], pages), tables, source, groups)
            assert_within(max_abs, found, expected, limit)
    if "index_score" in golden:
        expected = wide(golden["index_score"][0])
        found = wide(parts["index_score"])[: len(expected), : expected.shape[1]]
        assert_same(np.isfinite(found), np.isfinite(expected))
        seen = np.isfinite(expected)
        measure, limit = (max_abs, SMOOTH) if compute is FLOAT32 else (rel_rms, 0.008)
        assert_within(measure, found[seen], expected[seen], limit)
    if "topk" in golden:
        topk = golden["topk"][0]
        rows = np.asarray(parts["topk"])[: len(topk)]
        assert_same(rows[:, : topk.shape[1]], topk)
        assert (rows[:, topk.shape[1] :] == -1).all()
    if "candidates" in golden:
        mask = golden["candidates"][0].astype(bool)
        kept = np.repeat(np.asarray(parts["blocks"]), config.candidate_block_size, axis=1)
        seen = np.isfinite(wide(golden["index_score"][0]))
        assert_same(kept[: len(mask), : mask.shape[1]] & seen, mask & seen)


# Bounded prefill and prefix reuse

BOUNDED = ("p20", "p33", "p64", "b13", "img", "edge7", "edge8", "edge9")
REPLAYS = {"replay0": 45, "replay1": 30, "replay2": 17, "replay3": 64, "replay4": 40}


@functools.cache
def bounded_run(case: str, compute: Compute) -> dict[str, Any]:
    golden = golden_run("tiny_bounded", case, compute)
    run = start_run(case, compute, golden["input_ids"])
    logits, hidden = replay(run, golden, REPLAYS[case]) if case in REPLAYS else run.bounded()
    count, tables = len(run.tokens), run.tables
    found: dict[str, Any] = {"prefill_logits": logits, "main_hidden": hidden}
    for name in golden:
        kind, _, number = name.partition(".")
        if kind == "window_kv":
            kept = range(max(0, count - 8), count)
            found[name] = np.asarray(window_values(run.state, int(number), kept))
        elif kind in ("compress_kv", "index_k") and len(golden[name]):
            source = run.config.kv_source_index[int(number)]
            end = count // run.config.source_ratios[source]
            groups = range(end - len(golden[name]), end)
            pages = run.state.pages if kind == "compress_kv" else run.state.index_pages
            found[name] = np.asarray(global_values(pages, tables, source, groups))
    first = drafted(run, golden["decode_tokens"][0])
    found |= {f"first_{name}": value for name, value in first.items()}
    return found | decode(run, golden["decode_tokens"])


def replay(run: Run, golden: Any, common: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounded prefill that reuses the global rows of a prompt with `common` equal first tokens."""
    tokens, count = run.tokens, len(run.tokens)
    embeds, flags = run.image_embeds, run.is_image
    run.tokens = golden["prefix_ids"]
    assert_same(tokens[:common], run.tokens[:common])
    run.is_image, run.image_embeds = np.zeros(64, bool), np.zeros((64, 128), np.float32)
    run.bounded()
    run.tokens, run.is_image, run.image_embeds = tokens, flags, embeds
    reused = common // 2 * 2
    floors = {"window_floor": reused - 8, "global_floor": reused}
    run.encode(reused - 8, count, **floors)
    return run.suffix(count - 8, count, decoder_floor=count - 8, **floors)


@pytest.mark.parametrize("case", [*BOUNDED, *REPLAYS])
def test_bounded_in_float32(case: str) -> None:
    golden, found = golden_run("tiny_bounded", case, FLOAT32), bounded_run(case, FLOAT32)
    checked = 0
    for name, value in found.items():
        if name in golden:
            value = value[[0, 5, 11]] if name == "spec_base_logits" else value
            assert_within(max_abs, value, golden[name], SMOOTH)
            checked += 1
    assert checked >= 20
    for name in "prefill_logits", "decode_logits":
        assert_same(found[name].argmax(-1), golden[name].argmax(-1))


@pytest.mark.parametrize("case", [*BOUNDED, *REPLAYS])
def test_bounded_in_reference(case: str) -> None:
    golden, found = golden_run("tiny_bounded", case, REFERENCE), bounded_run(case, REFERENCE)
    expected = np.concatenate([golden["prefill_logits"], golden["decode_logits"]])
    logits = np.concatenate([found["prefill_logits"], found["decode_logits"]])
    assert_within(logit_error, logits, expected, 0.12)
    top = np.sort(expected, axis=-1)
    clear = top[:, -1] - top[:, -2] >= 1.2
    assert_same(logits.argmax(-1)[clear], expected.argmax(-1)[clear])
    first = found["first_spec_base_logits"]
    assert_within(logit_error, first, golden["first_spec_base_logits"], 0.06)
    for name in found:
        cached = name.startswith(("window_kv", "compress_kv", "index_k"))
        if name in golden and (cached or name.endswith("main_hidden")):
            assert_within(rel_rms, found[name], golden[name], 0.12)


@pytest.mark.parametrize("case", [*BOUNDED[:5], *REPLAYS])
def test_bounded_is_the_documented_rule(case: str) -> None:
    """Another engine's variant, with a floor at the last KV source too, is far away."""
    golden, found = golden_run("tiny_bounded", case, FLOAT32), bounded_run(case, FLOAT32)
    last = found["prefill_logits"][-1:]
    assert max_abs(last, golden["floor_all.prefill_logits"]) > 5 * SMOOTH
    assert max_abs(found["decode_logits"][:4], golden["floor_all.decode_logits"]) > 5 * SMOOTH


@pytest.mark.parametrize("case,count", [("edge7", 7), ("edge8", 8)])
@pytest.mark.parametrize("compute", BOTH)
def test_short_bounded_prefill_is_full(case: str, count: int, compute: Compute) -> None:
    full, found = full_run("p20", compute), bounded_run(case, compute)
    assert_same(found["prefill_logits"], full["prefill_logits"][:count])
    assert_same(found["main_hidden"], full["prefill_main_hidden"][:count])


# Every length from 1 to 40, and 3,000 tokens


@functools.cache
def run_of_length(count: int, compute: Compute) -> tuple[np.ndarray, np.ndarray]:
    golden = recorded("tiny_long")
    run = Run(compute, golden["lengths.input_ids"][count - 1, :count])
    logits, _ = run.full(0, count)
    following, _ = run.append(golden["lengths.next_token"][count - 1])
    return logits[-1], following


@pytest.mark.parametrize("count", range(1, 41))
def test_length_in_float32(count: int) -> None:
    golden = recorded("tiny_long")
    found = dict(zip(("last", "decode"), run_of_length(count, FLOAT32), strict=True))
    run = Run(FLOAT32, golden["lengths.input_ids"][count - 1, :count])
    found["bounded_last"] = run.bounded()[0][-1]
    for name, logits in found.items():
        expected = golden[f"lengths.smooth.{name}_logits"][count - 1]
        assert_within(max_abs, logits, expected, SMOOTH)
        assert logits.argmax() == expected.argmax()


def test_lengths_in_reference() -> None:
    golden = recorded("tiny_long")
    for name, place in ("last", 0), ("decode", 1):
        found = [run_of_length(n, REFERENCE)[place] for n in golden["lengths.quant_lengths"]]
        assert_within(logit_error, found, golden[f"lengths.quant.{name}_logits"], 0.08)


def chunks_of_long() -> list[tuple[int, int]]:
    return [(first, min(first + 64, 3000)) for first in range(0, 3000, 64)]


def long_decode(run: Run) -> np.ndarray:
    return decode(run, recorded("tiny_long")["long.decode_tokens"], drafts=False)["decode_logits"]


def test_long_run_in_float32() -> None:
    golden, run = recorded("tiny_long"), Run(FLOAT32, recorded("tiny_long")["long.input_ids"])
    logits, hidden, rows, blocks = [], [], [], []
    for first, last in chunks_of_long():
        (run.state, out, taps), seen = look_into(
            run.model.params, run.state, run.batch(first, last, 64), run.config, FLOAT32
        )
        logits.append(np.asarray(out)[: last - first])
        hidden.append(np.asarray(taps)[: last - first])
        rows.append([np.asarray(s.rows)[: last - first] for s in seen["selection"]])
        blocks.append(np.asarray(seen["selection"][2].blocks)[: last - first, :750])
    positions = golden["long.positions"]
    found, expected = np.concatenate(logits)[positions], golden["long.smooth.logits"]
    assert_within(max_abs, found, expected, SMOOTH)
    assert_same(found.argmax(-1), expected.argmax(-1))
    last_hidden = np.concatenate(hidden)[-8:]
    assert_within(max_abs, last_hidden, golden["long.smooth.main_hidden_last"], SMOOTH)
    for place, layer in enumerate(run.config.index_source_layer_ids):
        chosen = np.concatenate([chunk[place] for chunk in rows])[positions]
        assert_same(chosen, golden[f"long.smooth.index_topk.{layer}"])
    kept = np.concatenate(blocks)[positions].astype(np.uint8)
    assert_same(kept, golden["long.smooth.candidate_blocks.6"])
    following, expected = long_decode(run), golden["long.smooth.decode_logits"]
    assert_within(max_abs, following, expected, SMOOTH)
    assert_same(following.argmax(-1), expected.argmax(-1))


def test_long_run_in_reference() -> None:
    golden, run = recorded("tiny_long"), Run(REFERENCE, recorded("tiny_long")["long.input_ids"])
    results = [run.full(first, last) for first, last in chunks_of_long()]
    found = np.concatenate([logits for logits, _ in results])[golden["long.positions"]]
    found = np.concatenate([found, long_decode(run)])
    expected = np.concatenate([golden["long.logits"], golden["long.decode_logits"]])
    assert_within(logit_error, found, expected, 0.13)
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.75
    assert_within(rel_rms, results[-1][1][-8:], golden["long.main_hidden_last"], 0.13)
