"""The tokenizer against ids recorded from the official one."""

import json

import pytest
from paths import GOLDEN

from ds41jax.tokenizer import (
    IMAGE,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    StreamDecoder,
    Tokenizer,
    TokenizerError,
    byte_tokenizer,
)

ROWS = json.loads((GOLDEN / "encoding" / "tokenize.json").read_text())


@pytest.fixture(scope="module")
def official():
    return Tokenizer.from_vendor()


@pytest.mark.parametrize("row", ROWS["encode"], ids=lambda row: row["name"])
def test_encode_and_decode(official, row):
    encode = official.encode if row["mode"] == "plain" else official.encode_special
    assert encode(row["text"]) == row["ids"]
    assert official.decode(row["ids"]) == row["text"]


@pytest.mark.parametrize("row", ROWS["incremental"], ids=lambda row: row["name"])
def test_stream(official, row):
    stream = StreamDecoder(official)
    assert [stream.push(id) for id in row["ids"]] == row["pieces"]
    assert stream.held_bytes == row["held_bytes_at_end"]


def test_vocabulary_size_counts_no_token_twice(official):
    assert official.vocab_size == ROWS["vocab_size"] == 129280  # B058


def test_renamed_tokens(official):
    for id, spelling in ROWS["rename_added_tokens"].items():
        assert official.special_id(spelling) == int(id)
        assert official.decode([int(id)]) == spelling


def test_every_special_token_is_official(official):
    assert [official.encode_special(token) for token in SPECIAL_TOKENS] == [
        [official.special_id(token)] for token in SPECIAL_TOKENS
    ]


def test_typed_special_tokens_stay_text(official):
    text = f"</think>{IMAGE}<｜User｜>{PAD}"
    ids = official.encode(text)
    assert official.decode(ids) == text
    assert not set(ids) & {official.special_id(token) for token in (*SPECIAL_TOKENS, PAD)}


def test_ids_outside_the_vocabulary_are_refused(official):
    for id in (-1, 129280):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            official.decode([id])


def test_folder_round_trip(official, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(official.to_json())
    again = Tokenizer.from_checkpoint(tmp_path)
    text = f"Grüße 😀 {SYSTEM} 12345"
    assert again.vocab_size == official.vocab_size
    assert again.encode(text) == official.encode(text)
    assert again.encode_special(text) == official.encode_special(text)


@pytest.mark.parametrize("size", [259, 270, 284, 512, 1200])
def test_byte_tokenizer(size):
    tokenizer = byte_tokenizer(size)
    text = f"the Ünïcode 😀\n{IMAGE}\x00"
    assert tokenizer.vocab_size == size
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.to_json() == byte_tokenizer(size).to_json()
    assert all(tokenizer.token(id) is not None for id in range(size))
    if size >= 284:
        assert tokenizer.encode_special(IMAGE) == [tokenizer.special_id(IMAGE)]
        assert len(tokenizer.encode(IMAGE)) > 1


def test_byte_tokenizer_too_small():
    with pytest.raises(TokenizerError, match="at least 259"):
        byte_tokenizer(258)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"added_tokens": 3}', "[" * 100_000])
def test_malformed_files_are_one_clear_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_checkpoint(tmp_path)


@pytest.mark.parametrize("token", ["two words", "中文"])
def test_vocabularies_that_are_not_byte_level(tmp_path, token):
    data = json.loads(byte_tokenizer(259).to_json())
    data["model"]["vocab"][token] = 259
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="cannot be used"):
        Tokenizer.from_checkpoint(tmp_path)


def test_ids_that_would_fill_memory(tmp_path):
    data = json.loads(byte_tokenizer(259).to_json())
    data["model"]["vocab"]["x"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="above the limit"):
        Tokenizer.from_checkpoint(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(TokenizerError, match="cannot read"):
        Tokenizer.from_checkpoint(tmp_path)
