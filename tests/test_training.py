"""Training computes what inference does, and its gradients reach every weight that it trains."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds41jax.checkpoint.presets import slice_config, tiny_config
from ds41jax.config import parse_config
from ds41jax.engine.batching import SequenceRows, build_batch
from ds41jax.engine.loading import load_model
from ds41jax.formats import Format, Numerics, QuantizedArray, values
from ds41jax.formats.numerics import steer, straight_through
from ds41jax.formats.quantized import encode
from ds41jax.kernels.compute import Compute
from ds41jax.model import backbone, drafter
from ds41jax.model.engram_hash import EngramHash, compressed_token_map
from ds41jax.model.params import param_specs
from ds41jax.model.state import CacheShape, init_state
from ds41jax.tokenizer import byte_tokenizer
from ds41jax.training import run as runs
from ds41jax.training.batches import Rows, Shape, make_batch, step_batch
from ds41jax.training.curves import draw, read_log
from ds41jax.training.draft_forward import draft_in_training
from ds41jax.training.evaluate import bits_per_byte
from ds41jax.training.export import encoded_params, export_checkpoint
from ds41jax.training.losses import drafter_loss, target_forward, target_loss
from ds41jax.training.masters import (
    checkpoint_masters,
    engram_rows,
    initial_masters,
    stored_params,
)
from ds41jax.training.recipe import Recipe
from ds41jax.training.run import Data, OutOfTime, Run, train_target
from ds41jax.training.trainer import Phase, drafter_optimiser, interleaved, new_learner

# a layer of each kind: Engram, a paired source, the candidate source, one that selects within
CONFIG_JSON = slice_config(
    tiny_config(), [1, 2, 6, 8], draft_stages=1, vision=True, engram_buckets=101
)
CONFIG = parse_config(CONFIG_JSON)
SHAPE = Shape(rows=2, length=64)
FIRST, SECOND = 24, 40  # tokens of the documents of each row
HASH = EngramHash.from_config(CONFIG, compressed_token_map(byte_tokenizer(512)))

FORWARD = jax.jit(target_forward, static_argnums=(2, 3, 4))
INFERENCE = jax.jit(lambda *args: _inference(*args), static_argnums=(3, 4))


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Compiling is nearly all of the time here, and no program runs for long."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def stored():
    """Random weights as a checkpoint holds them, and their values as masters."""
    return jax.jit(_as_stored)(jax.tree.map(_noisy, initial_masters(CONFIG, seed=3)))


@pytest.fixture(scope="module")
def masters(stored):
    """Random weights at values that the checkpoint's formats hold exactly."""
    return stored[1]


def _as_stored(masters):
    params = encoded_params(masters, CONFIG)
    held = jax.tree.map(values, params, is_leaf=_is_quantized)
    return params, dataclasses.replace(masters, params=held)


def _noisy(x):
    return x + 0.05 * np.random.default_rng(x.size).standard_normal(x.shape, np.float32)


def _is_quantized(x):
    return isinstance(x, QuantizedArray)


@pytest.fixture(scope="module")
def batch():
    return _batch(seed=0)


def _batch(seed):
    tokens = np.random.default_rng(seed).integers(3, 259, (SHAPE.rows, SHAPE.length + 1))
    tokens[:, [0, FIRST]] = CONFIG.bos_token_id
    return make_batch(tokens, np.full(tokens.shape, 16), CONFIG, HASH)


def _alone(stored, batch, first, count, compute):
    """Inference of one document: logits, taps, state."""
    params, masters = stored
    pages = np.arange(len(CONFIG.kv_source_layer_ids), dtype=np.int32).reshape(-1, 1, 1)
    rows = slice(first, first + count)
    plain = dataclasses.replace(compute, differentiable=True)
    table = engram_rows(masters, jnp.asarray(batch.engram_ids[rows]), plain)
    tokens = np.asarray(batch.tokens[rows])
    sequence = SequenceRows(
        slot=0, start=0, token_ids=tokens, engram=encode(table, Format.FP8_GROUP)
    )
    step = build_batch([sequence], pages, CONFIG, buckets=(SECOND,))  # one program for all
    engram = jnp.pad(table, ((0, SECOND - count), *[(0, 0)] * (table.ndim - 1)))
    step = jax.tree.map(jnp.asarray, dataclasses.replace(step, engram=engram))
    state = init_state(CONFIG, CacheShape(slots=1, pages=len(pages)), compute)
    state, logits, taps = INFERENCE(params, state, step, CONFIG, compute)
    return logits[:count], taps[:count], state


def _inference(params, state, step, config, compute):
    state, logits, taps = backbone.forward(params, state, step, config, compute)
    return drafter.absorb(params.drafter, state, taps, step, config, compute), logits, taps


def _distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_a_packed_document_is_computed_as_alone(stored, masters, batch):
    """Without rounding, that is: with it, random weights turn last bits into other experts."""
    compute = Compute(Numerics.FLOAT32)
    trained = dataclasses.replace(compute, differentiable=True)
    logits, taps, _ = FORWARD(masters, batch, SHAPE, CONFIG, trained)
    for first, count in ((0, FIRST), (FIRST, SECOND), (SHAPE.length, FIRST)):
        wanted, wanted_taps, _ = _alone(stored, batch, first, count, compute)
        rows = slice(first, first + count)
        assert _distance(logits[rows], wanted) < 1e-4
        assert _distance(taps[rows], wanted_taps) < 1e-4


@pytest.mark.parametrize("format", [Format.FP8_GROUP, Format.MXFP4, Format.KV_FP4])
def test_training_rounds_as_the_formats_do(format):
    x = jax.random.normal(jax.random.key(1), (5, 64))
    made = Compute(differentiable=True).quantize(x, format)
    assert np.array_equal(made, values(encode(x, format)))


def test_a_draft_of_the_text_is_the_draft_of_inference(stored, masters, batch):
    compute = Compute(Numerics.FLOAT32)
    trained = dataclasses.replace(compute, differentiable=True)
    _, taps, step = FORWARD(masters, batch, SHAPE, CONFIG, trained)
    params = stored_params(masters, CONFIG, trained)
    anchor = FIRST + 20
    made = jax.jit(draft_in_training, static_argnums=(4, 5))(
        params, taps, step, jnp.asarray([anchor]), CONFIG, trained
    )
    quantized, (_, _, state) = stored[0], _alone(stored, batch, FIRST, anchor - FIRST, compute)
    wanted = jax.jit(drafter.draft, static_argnums=(7, 8))(
        quantized.drafter,
        quantized.embed,
        quantized.head,
        state,
        jnp.zeros(1, jnp.int32),
        jnp.asarray(batch.tokens[anchor : anchor + 1]),
        jnp.asarray([anchor - FIRST], jnp.int32),
        CONFIG,
        compute,
    )
    assert _distance(made.base_logits, wanted.base_logits) < 1e-4
    assert _distance(made.logits[:, 0], wanted.logits[:, 0]) < 1e-4
    assert _distance(made.confidence[:, 0], wanted.confidence[:, 0]) < 1e-3


@pytest.fixture(scope="module")
def gradient(masters, batch):
    learn = jax.jit(jax.grad(target_loss), static_argnums=(2, 3, 4))
    return learn(masters, batch, SHAPE, CONFIG, Compute(differentiable=True))


def test_the_gradient_reaches_every_trained_weight(gradient):
    params = dataclasses.replace(gradient.params, drafter=None, vision=None)
    flat, _ = jax.tree_util.tree_flatten_with_path(dataclasses.replace(gradient, params=params))
    dead = [jax.tree_util.keystr(at) for at, x in flat if not np.abs(x).max() > 0]
    assert all(np.isfinite(x).all() for _, x in flat)
    assert dead == [".params.layers.ffn.gate.bias_vl"]  # image rows alone have it


def test_a_selection_bias_is_steered_against_the_load(gradient):
    bias = np.asarray(gradient.params.layers.ffn.gate.bias)
    assert np.allclose(bias.sum(axis=1), 0, atol=1e-6)
    assert (bias > 0).any(axis=1).all()


def test_the_drafter_learns_and_the_target_stays(masters, batch):
    compute = Compute(differentiable=True)
    anchors = jnp.arange(2, SHAPE.length, 7)
    learn = jax.jit(jax.value_and_grad(drafter_loss, has_aux=True), static_argnums=(4, 5, 6))
    (_, metrics), gradient = learn(
        masters.params.drafter, masters, batch, anchors, SHAPE, CONFIG, compute
    )
    flat, _ = jax.tree_util.tree_flatten_with_path(gradient)
    dead = [jax.tree_util.keystr(at) for at, x in flat if not np.abs(x).max() > 0]
    assert dead == [".stages.ffn.gate.bias_vl"]
    assert metrics["acceptance"].shape == (CONFIG.dspark_block_size,)


# Stopping and going on does not depend on the geometry: two layers compile sooner.
SMALL = parse_config(slice_config(tiny_config(), [1, 2], vision=True, engram_buckets=101))
SMALL_HASH = EngramHash.from_config(SMALL, compressed_token_map(byte_tokenizer(512)))
STEPS = 8  # between two lines of the log


def _run(folder, seconds):
    tokens = np.random.default_rng(5).integers(3, 40, (6, SHAPE.length + 1)).astype(np.uint16)
    tokens[:, 0] = CONFIG.bos_token_id
    rows = Rows(tokens, np.full(tokens.shape, 16, np.uint8))
    folder.mkdir(exist_ok=True)
    recipe = Recipe(rate=1e-2, phases=(Phase(2 * STEPS, SHAPE),))
    return Run(recipe, SMALL, SMALL_HASH, Data(rows, rows), folder, time.monotonic() + seconds)


def test_a_run_lowers_the_loss_and_one_that_was_stopped_goes_on_as_if_it_were_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runs, "LOG_EVERY", STEPS)
    whole = train_target(_run(tmp_path / "whole", 1e6))
    with pytest.raises(OutOfTime, match=f"{STEPS} of {2 * STEPS}"):
        train_target(_run(tmp_path / "parts", 0))
    parts = train_target(_run(tmp_path / "parts", 1e6))
    assert all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(parts)))
    first = initial_masters(SMALL, 0).params
    assert all(map(np.array_equal, *map(jax.tree.leaves, (first.vision, whole.params.vision))))
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").open()]
    losses = [entry["loss"] for entry in log if entry.get("part") == "target"]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.5


def test_an_exported_checkpoint_holds_what_was_trained(masters, tmp_path):
    export_checkpoint(tmp_path / "made", masters, CONFIG_JSON, byte_tokenizer(512))
    again = checkpoint_masters(tmp_path / "made", CONFIG)
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(masters.params)))
    for read, table in zip(again.tables, masters.tables, strict=True):
        assert np.array_equal(read, values(encode(table, Format.FP8_GROUP)))
    assert load_model(tmp_path / "made", progress=False).tokenizer is not None


def test_the_optimiser_of_the_drafter_takes_its_tree():
    optimiser = drafter_optimiser(CONFIG, 1e-3, 10)
    drawn = initial_masters(CONFIG, seed=0).params.drafter
    learner = jax.eval_shape(lambda drawn: new_learner(drawn, optimiser), drawn)
    updates, _ = jax.eval_shape(optimiser.update, drawn, learner.moments, drawn)
    assert jax.tree.structure(updates) == jax.tree.structure(drawn)


def test_rounding_is_straight_through_and_steering_adds_what_it_is_told():
    x = jnp.asarray([0.3, 1.4])
    assert np.array_equal(
        jax.grad(lambda x: (3 * straight_through(x, jnp.round(x))).sum())(x), [3, 3]
    )
    target, wanted = jnp.zeros(2), jnp.asarray([5.0, -7.0])
    steered = jax.grad(lambda x, t: (2 * steer(x, t, wanted)).sum(), argnums=(0, 1))(x, target)
    assert np.array_equal(steered[0], [2, 2])
    assert np.array_equal(steered[1], wanted)


def test_phases_are_mixed_evenly():
    phases = [Phase(6, Shape(2, 64)), Phase(3, Shape(1, 128), long=True)]
    order = list(interleaved(phases))
    assert order == [0, 1, 0] * 3


def test_the_log_draws_itself(tmp_path):
    steps = [{"part": "target", "step": n, "loss": 5.0 / n} for n in (20, 40, 40)]
    drafts = [
        {"part": "drafter", "step": 20, "loss": 3.0, "acceptance": [0.5], "confidence": [0.4]}
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(e) + "\n" for e in [{"recipe": {}}, *steps, *drafts]))
    entries = read_log(log)
    assert sum(e.get("part") == "target" for e in entries) == 2
    draw(entries, tmp_path / "log.png")
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")


def test_bits_per_byte_counts_full_weights_alone(masters):
    tokens = np.random.default_rng(6).integers(3, 259, (2, SHAPE.length + 1)).astype(np.uint16)
    weights = np.zeros(tokens.shape, np.uint8)
    weights[:, 5:9] = 16
    tokenizer = byte_tokenizer(512)
    compute = Compute(Numerics.FLOAT32, differentiable=True)
    rows = Rows(tokens, weights)
    bits = bits_per_byte(masters, rows, tokenizer, CONFIG, HASH, compute, batch_rows=2)
    made = make_batch(tokens, weights, CONFIG, HASH)
    counted = made.weights > 0
    logits = np.asarray(FORWARD(masters, made, SHAPE, CONFIG, compute)[0][counted], np.float64)
    targets = made.targets[counted]
    nats = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(targets)), targets]
    size = sum(len(tokenizer.token_bytes(int(t))) for t in targets)
    assert bits == pytest.approx(nats.sum() / np.log(2) / size, rel=1e-5)


def test_engram_hashes_do_not_cross_documents():
    batch = _batch(seed=1)
    tokens = np.asarray(batch.tokens).reshape(SHAPE.rows, SHAPE.length)
    ids = np.asarray(batch.engram_ids).reshape(
        SHAPE.rows, SHAPE.length, *batch.engram_ids.shape[1:]
    )
    alone = HASH.hash_ids(tokens[1, FIRST:])
    assert np.array_equal(ids[1, FIRST:], alone)
    spec = param_specs(CONFIG)
    assert spec.engram is not None
    step = step_batch(batch, None, SHAPE, CONFIG)
    assert step.page_tables.shape[0] == len(CONFIG.kv_source_layer_ids)
