"""Reading and writing checkpoints: geometry, bits, memory, and every fault refused."""

import json
import os
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from paths import GOLDEN

from ds41jax.checkpoint import reader
from ds41jax.checkpoint.reader import (
    check_checkpoint,
    expected_entries,
    load_params,
    open_engram_tables,
)
from ds41jax.checkpoint.safetensors_files import (
    DTYPES,
    INDEX_NAME,
    CheckpointError,
    TensorEntry,
    open_checkpoint,
)
from ds41jax.checkpoint.writer import plan_shards, write_checkpoint
from ds41jax.config import load_config
from ds41jax.model.params import engram_table_specs, param_specs, spec_leaves

OFFICIAL_CONFIG = Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json"
TINY = GOLDEN / "tiny"
SHARD = "model-00001-of-00004.safetensors"
MTP_SHARD = "model-00003-of-00004.safetensors"
ENGRAM_SHARD = "model-00004-of-00004.safetensors"


@pytest.fixture(scope="module")
def config():
    return load_config(TINY)


@pytest.fixture
def tiny(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def read_shard(file):
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])


def write_shard(file, header, data):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def edit_header(file, edit):
    header, data = read_shard(file)
    edit(header)
    write_shard(file, header, data)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def rename(folder, shard, old, new):
    edit_header(folder / shard, lambda header: header.update({new: header.pop(old)}))
    edit_index(folder, lambda i: i["weight_map"].update({new: i["weight_map"].pop(old)}))


def set_bytes(folder, name, value, at=0):
    """Overwrites bytes of a stored tensor."""
    tensor = open_checkpoint(folder).tensors[name]
    with open(tensor.file, "r+b") as handle:
        handle.seek(tensor.offset + at)
        handle.write(bytes(value))


def device_bytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# Geometry


def test_official_geometry():
    config = load_config(OFFICIAL_CONFIG)
    entries = list(expected_entries((param_specs(config), engram_table_specs(config))))
    assert len({entry.name for entry in entries}) == len(entries) == 96_085
    assert sum(entry.nbytes for entry in entries) == 510_286_023_000


def test_official_memory_is_the_disk_size_without_engram_tables():
    config = load_config(OFFICIAL_CONFIG)
    specs = param_specs(config)
    loaded = sum(
        leaf.size * leaf.dtype.itemsize
        for spec in spec_leaves(specs)
        for leaf in jax.tree.leaves(spec.abstract())
    )
    tables = sum(entry.nbytes for entry in expected_entries(engram_table_specs(config)))
    on_disk = 510_286_023_000 - tables
    assert on_disk <= loaded <= 1.1 * on_disk


def test_official_shards():
    config = load_config(OFFICIAL_CONFIG)
    shards = plan_shards(expected_entries((param_specs(config), engram_table_specs(config))))
    assert len(shards) == 48
    assert [entry.name for entry in shards[1]] == ["embed.weight"]
    assert {entry.name for entry in shards[42]} == {"norm.weight", "head.weight"}
    for number, prefix in {2: "layers.0.", 41: "layers.39.", 43: "mtp.0.", 45: "mtp.2."}.items():
        assert all(entry.name.startswith(prefix) for entry in shards[number])
    for number, layer in {46: 1, 47: 14}.items():
        assert all(e.name.startswith(f"layers.{layer}.engram.") for e in shards[number])


# Loading


@pytest.mark.parametrize("fill", ["_fill_whole", "_fill_by_layer"])
def test_every_tensor_has_the_bits_of_the_file(config, monkeypatch, fill):
    monkeypatch.setattr(reader, "_filler", lambda device: getattr(reader, fill))
    params = load_params(TINY, config, progress=False)
    files = open_checkpoint(TINY)
    specs = spec_leaves(param_specs(config))
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "codes"))
    assert len(specs) == len(leaves)
    seen = set()
    for spec, leaf in zip(specs, leaves, strict=True):
        arrays = jax.tree.leaves(leaf)
        for index, *names in spec.stored():
            for array, name in zip(arrays, names, strict=False):
                np.testing.assert_array_equal(bits(array[index]), bits(files.view(name)), name)
                seen.add(name)
    tables = {entry.name for entry in expected_entries(engram_table_specs(config))}
    assert seen | tables == set(files.tensors)


def test_loaded_bytes(config):
    tables = sum(entry.nbytes for entry in expected_entries(engram_table_specs(config)))
    size = json.loads((TINY / INDEX_NAME).read_text())["metadata"]["total_size"] - tables
    assert size <= device_bytes(load_params(TINY, config, progress=False)) <= 1.1 * size


def test_loading_on_the_cpu_copies_nothing(config, monkeypatch):
    buffers = []
    empty = reader.aligned_empty
    monkeypatch.setattr(
        reader, "aligned_empty", lambda *args: buffers.append(empty(*args)) or buffers[-1]
    )
    params = load_params(TINY, config, progress=False)
    loaded = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert loaded == {buffer.ctypes.data for buffer in buffers}


def test_progress_goes_to_stderr(config, capsys):
    load_params(TINY, config)
    captured = capsys.readouterr()
    assert captured.out == "" and "loading" in captured.err and "100%" in captured.err


def test_packed_codes_may_be_unsigned(config, tiny):
    def unsigned(header):
        for entry in header.values():
            entry["dtype"] = {"I8": "U8"}.get(entry.get("dtype"), entry.get("dtype"))

    edit_header(tiny / MTP_SHARD, unsigned)
    load_params(tiny, config, progress=False)


def test_one_file_without_index(tmp_path):
    entry = TensorEntry("a", "F32", (2, 3))
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_checkpoint(tmp_path / "x", {}, [("a", values)], [[entry]])
    (tmp_path / "x" / INDEX_NAME).unlink()
    (tmp_path / "x" / "model-00001-of-00001.safetensors").rename(
        tmp_path / "x" / "model.safetensors"
    )
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "x").view("a"), values)


# Engram tables


def test_engram_gather(config):
    tables = open_engram_tables(TINY, config)
    files = open_checkpoint(TINY)
    assert [len(table.codes) for table in tables] == list(config.engram_num_embeddings)
    for table, layer in zip(tables, config.engram_layer_ids, strict=True):
        rows = np.array([[5, 0, len(table.codes) - 1], [5, 17, 5]])
        codes, scales = table.gather(rows)
        stored = files.view(f"layers.{layer}.engram.embed.weight").view(np.uint8)
        np.testing.assert_array_equal(codes, stored[rows])
        stored = files.view(f"layers.{layer}.engram.embed.scale")
        np.testing.assert_array_equal(scales, stored[rows])
        assert codes.shape == (2, 3, 32) and scales.shape == (2, 3, 1)
        assert table.gather(np.zeros((0, 6), np.int64))[0].shape == (0, 6, 32)
        assert not table.codes.flags.owndata and not table.codes.flags.writeable


@pytest.mark.parametrize("row", [-1, 660])
def test_engram_rows_outside_the_table(config, row):
    with pytest.raises(IndexError, match="table of 660"):
        open_engram_tables(TINY, config)[0].gather(np.array([3, row]))


@pytest.mark.parametrize(("part", "value"), [("weight", 0x7F), ("weight", 0xFF), ("scale", 0xFF)])
def test_engram_nan_is_refused_when_read(config, tiny, part, value):
    width = 32 if part == "weight" else 1
    set_bytes(tiny, f"layers.4.engram.embed.{part}", [value], at=7 * width)
    table = open_engram_tables(tiny, config)[1]
    table.gather(np.array([6, 8]))
    with pytest.raises(CheckpointError, match=r"layers\.4\.engram.*row 7 holds a NaN"):
        table.gather(np.array([8, 7]))


def test_missing_engram_table(config, tiny):
    rename(tiny, ENGRAM_SHARD, "layers.1.engram.embed.scale", "other")
    for use in (open_engram_tables, load_params):
        with pytest.raises(CheckpointError, match=r"layers\.1\.engram\.embed\.scale"):
            use(tiny, config)


# Tensors that do not fit the model


def test_a_renamed_scale_is_an_error(config, tiny):  # B057
    rename(tiny, SHARD, "layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.weight_scale_inv")
    with pytest.raises(CheckpointError) as error:
        load_params(tiny, config, progress=False)
    assert "missing (1):\n    layers.0.attn.wq_a.scale: F8_E8M0 [2, 4]" in str(error.value)
    assert "unexpected (1):\n    layers.0.attn.wq_a.weight_scale_inv" in str(error.value)


def test_wrong_shape_and_dtype_are_listed_together(config, tiny):
    def edit(header):
        header["layers.0.attn.q_norm.weight"]["shape"] = [8, 8]
        header["layers.0.attn.wq_a.scale"]["dtype"] = "U8"

    edit_header(tiny / SHARD, edit)
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(tiny, config, param_specs(config))
    text = str(error.value)
    assert "malformed (2)" in text
    assert "layers.0.attn.q_norm.weight: BF16 [8, 8], expected BF16 [64]" in text
    assert "layers.0.attn.wq_a.scale: U8 [2, 4], expected F8_E8M0 [2, 4]" in text


def test_long_lists_are_capped(tiny):
    config = load_config(OFFICIAL_CONFIG)
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(tiny, config, param_specs(config))
    assert len(str(error.value).splitlines()) < 80
    assert "more" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.3.attn.wkv.scale", [0xFF]),
        ("layers.3.attn.wkv.weight", [0x7F]),
        ("layers.3.attn.wkv.weight", [0xFF]),
        ("mtp.1.ffn.experts.3.w2.scale", [0xFF]),
        ("layers.3.attn_norm.weight", [0xC0, 0x7F]),
        ("layers.3.attn_norm.weight", [0x80, 0xFF]),
        ("layers.3.hc_attn_base", [0, 0, 0xC0, 0x7F]),
        ("layers.3.hc_attn_base", [0, 0, 0x80, 0xFF]),
    ],
)
def test_nan_and_infinity_are_refused(config, tiny, name, value):
    set_bytes(tiny, name, value)
    with pytest.raises(CheckpointError, match=rf"{name}: .*NaN"):
        load_params(tiny, config, progress=False)


# Files that contradict themselves


def test_truncated_shard(config, tiny):
    os.truncate(tiny / SHARD, (tiny / SHARD).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tiny)


def test_shard_truncated_after_opening(tiny):
    files = open_checkpoint(tiny)
    os.truncate(tiny / SHARD, 50_000)
    with pytest.raises(CheckpointError, match="truncated since"):
        files.read_into("embed.weight", np.empty((512, 128), ml_dtypes.bfloat16))


def test_trailing_bytes(tiny):
    with open(tiny / SHARD, "ab") as handle:
        handle.write(b"x")
    with pytest.raises(CheckpointError, match="foreign bytes"):
        open_checkpoint(tiny)


@pytest.mark.parametrize("size", [0, 3, 8, 12])
def test_nearly_empty_shard(tiny, size):
    os.truncate(tiny / SHARD, size)
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tiny)


@pytest.mark.parametrize("length", [(100 << 20) + 1, 2**63, 2**64 - 1])
def test_huge_header_length(tiny, length):
    with open(tiny / SHARD, "r+b") as handle:
        handle.write(length.to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=f"header of {length} bytes"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"a": NaN', b'{"a": 1, "a": 2}']
)
def test_malformed_header(tiny, header):
    write_shard(tiny / SHARD, header, b"")
    with pytest.raises(CheckpointError, match=SHARD):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "F64"),
        ("dtype", ["F32"]),
        ("shape", [-1, 8]),
        ("shape", [True]),
        ("shape", "8"),
        ("shape", [1] * 9 + [8]),
        ("shape", [10**30]),
        ("data_offsets", [0]),
        ("data_offsets", [32, 0]),
        ("data_offsets", [0, 10**30]),
        ("data_offsets", [0.0, 32.0]),
        ("data_offsets", None),
    ],
)
def test_malformed_entry(tiny, field, value):
    edit_header(tiny / SHARD, lambda h: h["layers.0.attn.attn_sink"].update({field: value}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.attn_sink"):
        open_checkpoint(tiny)


def test_overlapping_tensors(tiny):
    def overlap(header):
        first, second = "layers.0.hc_attn_base", "layers.0.hc_ffn_base"
        header[first]["data_offsets"] = header[second]["data_offsets"]

    edit_header(tiny / SHARD, overlap)
    with pytest.raises(CheckpointError, match=r"overlaps|gap"):
        open_checkpoint(tiny)


def test_tensor_missing_from_its_shard(tiny):
    edit_index(tiny, lambda i: i["weight_map"].update({"embed.weight": MTP_SHARD}))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tiny)
    assert f"embed.weight in {MTP_SHARD}" in str(error.value)
    assert f"embed.weight in {SHARD}, listed for {MTP_SHARD}" in str(error.value)


def test_tensor_not_in_the_index(tiny):
    edit_index(tiny, lambda i: i["weight_map"].pop("embed.weight"))
    with pytest.raises(CheckpointError, match="index does not list"):
        open_checkpoint(tiny)


def test_tensor_in_two_shards(tiny):
    header, data = read_shard(tiny / ENGRAM_SHARD)
    header["norm.weight"] = {
        "dtype": "BF16",
        "shape": [128],
        "data_offsets": [len(data), len(data) + 256],
    }
    write_shard(tiny / ENGRAM_SHARD, header, data + bytes(256))
    with pytest.raises(CheckpointError, match="second shard"):
        open_checkpoint(tiny)


def test_wrong_total_size(tiny):
    edit_index(tiny, lambda i: i["metadata"].update(total_size=5))
    with pytest.raises(CheckpointError, match="total_size is 5, the tensors have 5225236"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {"a": 1}, "metadata": {"total_size": 1}}',
        '{"weight_map": {}, "metadata": {"total_size": "1"}}',
        '{"weight_map": {"a": "x", "a": "y"}, "metadata": {"total_size": 1}}',
        "[" * 50_000,
    ],
)
def test_malformed_index(tiny, text):
    (tiny / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tiny)


def test_huge_index(tiny):
    os.truncate(tiny / INDEX_NAME, (64 << 20) + 1)
    with pytest.raises(CheckpointError, match="larger than"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "a\0b"]
)
def test_paths_in_the_index(tiny, name):
    edit_index(tiny, lambda i: i["weight_map"].update({"embed.weight": name}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_checkpoint(tiny)


@pytest.mark.parametrize("name", [SHARD, INDEX_NAME])
def test_link_out_of_the_folder(tiny, tmp_path, name):
    shutil.move(tiny / name, tmp_path / "elsewhere")
    (tiny / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the checkpoint folder"):
        open_checkpoint(tiny)


def test_link_within_the_folder_and_linked_folder(config, tiny, tmp_path):
    (tiny / SHARD).rename(tiny / "blob")
    (tiny / SHARD).symlink_to("blob")
    (tmp_path / "link").symlink_to(tiny)
    load_params(tmp_path / "link", config, progress=False)


@pytest.mark.parametrize("kind", ["absent", "loop", "pipe", "folder"])
def test_shard_that_is_no_file(tiny, kind):
    (tiny / SHARD).unlink()
    if kind == "loop":
        (tiny / SHARD).symlink_to(SHARD)
    elif kind == "pipe":
        os.mkfifo(tiny / SHARD)
    elif kind == "folder":
        (tiny / SHARD).mkdir()
    with pytest.raises(CheckpointError, match=SHARD):
        open_checkpoint(tiny)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        open_checkpoint(tmp_path / "absent")


# Writing

ENTRIES = [
    TensorEntry("vision.norm.weight", "BF16", (5,)),
    TensorEntry("embed.weight", "BF16", (4, 3)),
    TensorEntry("layers.0.a.weight", "F8_E4M3", (2, 32)),
    TensorEntry("layers.0.a.scale", "F8_E8M0", (1, 1)),
    TensorEntry("layers.0.e.weight", "I8", (2, 16)),
    TensorEntry("norm.weight", "F32", ()),
]


def random_tensors():
    rng = np.random.default_rng(0)
    for entry in ENTRIES:
        raw = rng.integers(0, 120, entry.nbytes, np.uint8)
        yield entry.name, raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def test_round_trip(tmp_path):
    shards = plan_shards(ENTRIES)
    write_checkpoint(tmp_path / "deep" / "x", {"a": 1}, random_tensors(), shards, {"t": b"z"})
    files = open_checkpoint(tmp_path / "deep" / "x")
    for name, values in random_tensors():
        found = files.view(name)
        assert found.dtype == values.dtype and found.shape == values.shape
        np.testing.assert_array_equal(bits(found), bits(values))
    assert all(files.tensors[shard[0].name].offset % 64 == 0 for shard in shards)
    assert json.loads((tmp_path / "deep" / "x" / "config.json").read_text()) == {"a": 1}
    assert (tmp_path / "deep" / "x" / "t").read_bytes() == b"z"
    assert not files.view("embed.weight").flags.writeable


def test_pieces(tmp_path):
    tensors = ((name, iter(bits(v).view(v.dtype)[:, None])) for name, v in random_tensors())
    write_checkpoint(tmp_path / "x", {}, tensors, plan_shards(ENTRIES))
    files = open_checkpoint(tmp_path / "x")
    for name, values in random_tensors():
        np.testing.assert_array_equal(bits(files.view(name)), bits(values))


def change(name, values):
    return [(n, values if n == name else v) for n, v in random_tensors()]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (list(random_tensors())[:-1], "expected tensor norm.weight, got None"),
        (list(random_tensors())[1:], "expected tensor vision.norm.weight, got embed.weight"),
        ([*random_tensors(), ("x", np.zeros(1))], "x belongs to no shard"),
        (change("embed.weight", np.zeros((3, 4), ml_dtypes.bfloat16)), "got shape"),
        (change("embed.weight", np.zeros((4, 3), np.float32)), "got dtype float32"),
        (change("embed.weight", iter([np.zeros(11, ml_dtypes.bfloat16)])), "22 bytes of 24"),
    ],
)
def test_unannounced_tensors_leave_nothing_behind(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "x", {}, tensors, plan_shards(ENTRIES))
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_kept(tmp_path):
    with pytest.raises(CheckpointError, match="already exists"):
        write_checkpoint(tmp_path, {}, random_tensors(), plan_shards(ENTRIES))
