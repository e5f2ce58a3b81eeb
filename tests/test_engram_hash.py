"""Engram hashing against the constants and ids of the official implementation."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from paths import GOLDEN
from safetensors import safe_open

from ds41jax.config import ConfigError, load_config
from ds41jax.model.engram_hash import (
    TOKEN_MAP_FILE,
    EngramHash,
    compressed_token_map,
    is_prime,
    load_token_map,
    token_map_json,
)
from ds41jax.tokenizer import Tokenizer, TokenizerError

OFFICIAL = json.loads((GOLDEN / "engram_official.json").read_text())
OFFICIAL_CONFIG = Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json"
TINY = GOLDEN / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_vendor()


@pytest.fixture(scope="module")
def official(tokenizer):
    return EngramHash.from_config(load_config(OFFICIAL_CONFIG), compressed_token_map(tokenizer))


@pytest.fixture(scope="module")
def tiny():
    config = load_config(TINY)
    return EngramHash.from_config(config, load_token_map(TINY, config))


def test_official_constants(official):
    np.testing.assert_array_equal(official.primes, np.reshape(OFFICIAL["primes"], (2, 24)))
    assert official.offsets.tolist() == OFFICIAL["offsets"]
    assert official.multipliers.astype(str).tolist() == OFFICIAL["multipliers"]
    assert official.pad == OFFICIAL["pad_compressed_id"]


def test_official_token_map(official, tokenizer):
    raw = official.token_map.astype("<i4").tobytes()
    assert hashlib.sha256(raw).hexdigest() == OFFICIAL["token_map_int32_le_sha256"]
    for sample in OFFICIAL["samples"]:
        assert official.token_map[sample["token_id"]] == sample["compressed_id"]
    assert official.token_map.max() + 1 == OFFICIAL["compressed_vocab_size"]


@pytest.mark.parametrize("sentence", OFFICIAL["sentences"], ids=lambda row: row["name"])
def test_official_hash_ids(official, tokenizer, sentence):
    ids = np.array(sentence["token_ids"])
    if sentence["text"] is not None:
        assert tokenizer.encode(sentence["text"]) == sentence["token_ids"]
    text = sentence["token_mask"]
    image = None if text is None else ~np.array(text)
    assert official.token_map[ids].tolist() == sentence["compressed_ids"]
    np.testing.assert_array_equal(official.hash_ids(ids, image), sentence["hash_ids"])


def test_tiny_hash_ids(tiny):
    names = "primes offsets multipliers ids mask hash.nomask hash.prefill9 hash.pos9 hash.pos10"
    with safe_open(GOLDEN / "ops" / "engram.safetensors", "np") as file:
        golden = {name: file.get_tensor(name) for name in names.split()}
    np.testing.assert_array_equal(tiny.primes, golden["primes"].reshape(2, 6))
    np.testing.assert_array_equal(tiny.offsets, golden["offsets"])
    np.testing.assert_array_equal(tiny.multipliers, golden["multipliers"])
    for row, (ids, mask) in enumerate(zip(golden["ids"], golden["mask"], strict=True)):
        image = mask == 0
        np.testing.assert_array_equal(tiny.hash_ids(ids), golden["hash.nomask"][row])
        np.testing.assert_array_equal(
            tiny.hash_ids(ids[:9], image[:9]), golden["hash.prefill9"][row]
        )
        for at in (9, 10):
            got = tiny.hash_ids(ids[at : at + 1], image[at : at + 1], ids[:at], image[:at])
            np.testing.assert_array_equal(got, golden[f"hash.pos{at}"][row])


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 11])
def test_any_cut_gives_the_same_ids(tiny, cut):
    ids = np.arange(40, 57)
    image = (ids > 45) & (ids < 50)
    whole = tiny.hash_ids(ids, image)
    rest = tiny.hash_ids(ids[cut:], image[cut:], ids[:cut], image[:cut])
    np.testing.assert_array_equal(rest, whole[cut:])
    assert tiny.hash_ids(ids[:0]).shape == (0, 2, 6)


def test_primality():
    sieve = [n for n in range(2000) if n > 1 and all(n % d for d in range(2, n))]
    assert [n for n in range(2000) if is_prime(n)] == sieve
    assert not is_prime(3215031751)  # a strong pseudoprime to bases 2, 3, 5 and 7
    assert is_prime(2**61 - 1)


def test_contradicting_table_rows(tiny):
    config = dataclasses.replace(load_config(TINY), engram_num_embeddings=(660, 865))
    with pytest.raises(ConfigError, match=r"engram_num_embeddings.*\[660, 864\]"):
        EngramHash.from_config(config, tiny.token_map)


def test_map_of_another_vocabulary(tiny):
    with pytest.raises(ConfigError, match="takes 511 tokens to 266"):
        EngramHash.from_config(load_config(TINY), tiny.token_map[:-1])


def test_token_map_file_round_trip(tiny, tmp_path):
    config = load_config(TINY)
    (tmp_path / TOKEN_MAP_FILE).write_text(json.dumps(token_map_json(tiny.token_map, config)))
    np.testing.assert_array_equal(load_token_map(tmp_path, config), tiny.token_map)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_token_id": 3}, "pad_token_id is 3"),
        ({"compressed_vocab_size": 7}, "compressed_vocab_size is 7"),
        ({"token_map": "abc"}, "list of token numbers"),
        ({"token_map": [0, -1]}, "list of token numbers"),
        ({"token_map": [0, True]}, "list of token numbers"),
        ({"token_map": [0, 1]}, "takes 2 tokens to 2"),
    ],
)
def test_malformed_token_map(tiny, tmp_path, change, message):
    config = load_config(TINY)
    data = token_map_json(tiny.token_map, config) | change
    (tmp_path / TOKEN_MAP_FILE).write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        load_token_map(tmp_path, config)


def test_neither_map_nor_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_token_map(tmp_path, load_config(TINY))
