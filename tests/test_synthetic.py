"""Synthetic checkpoints: presets, slices of the official geometry, the command."""

import argparse
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from paths import GOLDEN

from ds41jax.checkpoint import make_command
from ds41jax.checkpoint.presets import PRESETS, slice_config, tiny_config
from ds41jax.checkpoint.reader import load_params, open_engram_tables
from ds41jax.checkpoint.safetensors_files import CheckpointError, TensorEntry
from ds41jax.checkpoint.synthetic import draw_tensor, make_checkpoint
from ds41jax.config import ConfigError, load_config, parse_config
from ds41jax.formats import Format, QuantizedArray, decode
from ds41jax.model.engram_hash import EngramHash, load_token_map
from ds41jax.model.tensors import TensorSpec
from ds41jax.tokenizer import Tokenizer

OFFICIAL = json.loads(
    (Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json").read_text()
)


@pytest.fixture(scope="module", params=sorted(PRESETS))
def preset(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / request.param
    make_checkpoint(path, PRESETS[request.param](), progress=False)
    return path


def test_presets_load(preset):
    config = load_config(preset)
    params = load_params(preset, config, progress=False)
    assert all(part is not None for part in vars(params).values())
    tables = open_engram_tables(preset, config)
    hashing = EngramHash.from_config(config, load_token_map(preset, config))
    tokenizer = Tokenizer.from_checkpoint(preset)
    assert tokenizer.vocab_size == config.vocab_size
    ids = tokenizer.encode("Every mechanism is present.")
    rows = hashing.hash_ids(np.array(ids))
    for i, table in enumerate(tables):
        assert table.gather(rows[:, i])[0].shape == (len(ids), 6, config.engram_head_dim)


def test_presets_name_the_special_tokens(preset):
    config, tokenizer = load_config(preset), Tokenizer.from_checkpoint(preset)
    assert tokenizer.special_id("<｜begin▁of▁sentence｜>") == config.bos_token_id
    assert tokenizer.special_id("<｜end▁of▁sentence｜>") == config.eos_token_id
    assert tokenizer.special_id("<｜deepseek_image｜>") == config.image_token_id
    assert tokenizer.special_id("<｜System｜>") == config.dspark_noise_token_id


def test_presets_are_small(preset):
    assert sum(file.stat().st_size for file in preset.iterdir()) <= 100e6


def test_tiny_is_the_golden_geometry():
    own, golden = parse_config(tiny_config()), load_config(GOLDEN / "tiny")
    differing = {
        field.name
        for field in dataclasses.fields(own)
        if getattr(own, field.name) != getattr(golden, field.name)
    }
    assert differing <= {"engram_compressed_vocab_size", "dspark_noise_token_id", "image_token_id"}


def folder_digest(path):
    parts = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return hashlib.sha256(b"".join(parts.values())).hexdigest()


def test_the_seed_decides_every_byte(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_checkpoint(tmp_path / name, tiny_config(), seed, progress=False)
    digests = [folder_digest(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("format", [Format.FP8_BLOCK, Format.FP8_GROUP, Format.MXFP4])
@pytest.mark.parametrize("columns", [96, 4096])
def test_quantised_weights_keep_the_input_variance(format, columns):
    leaf = TensorSpec("layers.0.x.weight", (320, columns), format)
    parts = [
        np.concatenate(list(draw_tensor(TensorEntry(*entry), leaf, 0))).reshape(entry[2])
        for entry in leaf.files()
    ]
    values = decode(QuantizedArray(*parts, format=format))
    assert abs(values.std() * np.sqrt(columns) - 1) < 0.06
    assert abs(values.mean() * np.sqrt(columns)) < 0.02


# Slices


@pytest.mark.parametrize(
    ("layers", "kv", "index", "candidate", "engram"),
    [
        ([0], [], [], None, []),
        ([1], [], [], None, [0]),
        ([2], [0], [0], None, []),
        ([2, 3], [0], [0], None, []),
        ([20], [0], [0], 0, []),
        ([1, 2, 20, 24, 27], [1, 2], [1, 2, 3], 2, [0]),
        ([20, 36, 37], [0], [0, 1], 0, []),
    ],
)
def test_slices_of_the_official_geometry(layers, kv, index, candidate, engram):
    config = parse_config(slice_config(OFFICIAL, layers))
    assert config.num_hidden_layers == len(layers)
    assert list(config.kv_source_layer_ids) == kv
    assert list(config.index_source_layer_ids) == index
    assert config.candidate_source_layer_id == candidate
    assert list(config.engram_layer_ids) == engram
    assert config.hidden_size == 5120 and config.n_routed_experts == 384
    assert config.vision is None and config.num_nextn_predict_layers == 0


def test_a_whole_model_is_its_own_slice():
    whole = slice_config(OFFICIAL, range(40), None, 3, True, engram_buckets=16_000_000)
    assert whole == OFFICIAL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [3]}, "layer 3 needs the KV rows of layer 2"),
        ({"layers": [20, 25]}, "layer 25 needs the index selection of layer 24"),
        ({"layers": [24]}, "layer 24 needs the KV rows of layer 20"),
        ({"layers": [14]}, "layer 14 has Engram, .* add layer 20"),
        ({"layers": []}, "ascending"),
        ({"layers": [20, 2]}, "ascending"),
        ({"layers": [40]}, r"0\.\.39"),
        ({"layers": [-1]}, r"0\.\.39"),
        ({"layers": [2], "draft_stages": 1}, r"read layers \[37, 38, 39\]"),
        ({"layers": [2], "draft_stages": 4}, r"0\.\.3"),
        ({"layers": [2], "experts": 0}, "n_routed_experts"),
        ({"layers": [2], "experts": 385}, "the model has 384"),
    ],
)
def test_incomplete_slices(arguments, message):
    with pytest.raises(ConfigError, match=message):
        slice_config(OFFICIAL, **arguments)


def test_a_slice_with_drafter_loads(tmp_path):
    config = slice_config(tiny_config(), [6, 7, 8], experts=2, draft_stages=2, vision=True)
    make_checkpoint(tmp_path / "x", config, progress=False)
    params = load_params(tmp_path / "x", load_config(tmp_path / "x"), progress=False)
    assert params.drafter is not None and params.vision is not None and params.engram is None
    assert open_engram_tables(tmp_path / "x", load_config(tmp_path / "x")) == ()


def test_any_vocabulary(tmp_path):
    config = tiny_config()
    config["text_config"]["engram_compressed_vocab_size"] = 266
    make_checkpoint(tmp_path / "x", config, progress=False)
    parsed = load_config(tmp_path / "x")
    assert load_token_map(tmp_path / "x", parsed).max() == 265


def test_a_full_disk_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: argparse.Namespace(free=60 << 20))
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GB, 0\.1 GB are free"):
        make_checkpoint(tmp_path / "a" / "x", tiny_config(), progress=False)
    assert list(tmp_path.iterdir()) == []


# The command


def command(*arguments):
    parser = argparse.ArgumentParser()
    make_command.add_arguments(parser)
    return make_command.run(parser.parse_args(list(map(str, arguments))))


def test_command(tmp_path, capsys):
    assert command(tmp_path / "x", "--preset", "tiny", "--layers", "0,2", "--experts", 2) == 0
    config = load_config(tmp_path / "x")
    assert config.num_hidden_layers == 2 and config.n_routed_experts == 2
    assert capsys.readouterr().out.strip() == str(tmp_path / "x")


def test_command_keeps_all_parts_without_layers(tmp_path):
    file = GOLDEN / "tiny" / "config.json"
    assert command(tmp_path / "x", "--config", file, "--experts", 4, "--seed", 9) == 0
    config = load_config(tmp_path / "x")
    assert config.num_hidden_layers == 10 and config.vision is not None
    assert config.engram_num_embeddings == (660, 864) and config.n_routed_experts == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "absent.json"], "cannot read absent.json"),
        (["--preset", "tiny", "--layers", "3"], "needs the KV rows of layer 2"),
        (["--preset", "tiny", "--experts", "0"], "n_routed_experts"),
    ],
)
def test_command_errors(tmp_path, capsys, arguments, message):
    assert command(tmp_path / "x", *arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "x").exists()


def test_command_refuses_malformed_layers(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command(tmp_path / "x", "--layers", "2,a")
    assert "expected numbers like 2,20, got '2,a'" in capsys.readouterr().err


def test_command_refuses_existing_folder(tmp_path, capsys):
    assert command(tmp_path, "--preset", "tiny") == 1
    assert "already exists" in capsys.readouterr().err
