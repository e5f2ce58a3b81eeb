"""Engram tables of the released size: sparse files of 384 million rows, read by row."""

import numpy as np
import pytest
from paths import ROOT

from ds41jax.checkpoint.engram_tables import EngramTable
from ds41jax.config import load_config
from ds41jax.engine.engram_lookup import EngramLookup
from ds41jax.formats import decode
from ds41jax.model.engram_hash import EngramHash

BLOCK = 1 << 12


@pytest.fixture(scope="module")
def lookup(tmp_path_factory):
    """Both tables of the release, 203 GB that take no room: a row's bytes tell its number."""
    config = load_config(ROOT / "configs" / "deepseek-v4.1-flash.json")
    folder = tmp_path_factory.mktemp("tables")
    tables = []
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        maps = []
        for kind, width in (("weight", 256), ("scale", 8)):
            file = folder / f"{layer}.{kind}"
            with open(file, "wb") as handle:
                handle.truncate(rows * width)
            maps.append(np.memmap(file, np.uint8, "r+", shape=(rows, width)))
        tables.append(EngramTable(f"layers.{layer}.engram.embed", *maps))
    token_map = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    return EngramLookup(EngramHash.from_config(config, token_map), tuple(tables))


def mark(table, rows):
    """Writes each row's number into its bytes, as small valid codes."""
    for row in rows:
        table.codes[row, :8] = [(row >> (4 * i)) & 15 for i in range(8)]
        table.scales[row] = 127


def test_rows_far_beyond_32_bits_of_bytes_are_found(lookup):
    tokens = np.random.default_rng(0).integers(0, 129280, 64).astype(np.int32)
    text = np.zeros(64, bool)
    ids = lookup.hash.hash_ids(tokens)
    for layer, table in enumerate(lookup.tables):
        mark(table, np.unique(ids[:, layer]))
    assert ids.max() * 256 > 2**36
    read = lookup.gather(tokens, text, 0)
    assert read.codes.shape == (64, 2, 24, 256)
    digits = read.codes.view(np.uint8)[..., :8].astype(np.int64)
    np.testing.assert_array_equal((digits << (4 * np.arange(8))).sum(-1), ids & 0xFFFFFFFF)
    assert np.isfinite(decode(read)).all()


def test_a_chunk_and_its_parts_read_the_same(lookup):
    tokens = np.random.default_rng(1).integers(0, 129280, 40).astype(np.int32)
    is_image = np.zeros(40, bool)
    is_image[10:14] = True
    whole = lookup.gather(tokens, is_image, 0).codes
    for start in (1, 3, 12, 15, 39):
        before = max(0, start - lookup.history)
        part = lookup.gather(tokens[before:], is_image[before:], start - before).codes
        np.testing.assert_array_equal(part, whole[start:])
