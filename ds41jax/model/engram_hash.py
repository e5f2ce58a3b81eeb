"""Which Engram table rows each token looks up: the host side of Engram, in numpy int64.

A row of a table stands for an n-gram (n = 2 .. max) of *compressed* token ids, hashed by several
heads into buckets of prime size. Products reach 2^62, so nothing here may run in int32.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, normalizers

from ds41jax.config import ConfigError, ModelConfig, read_json_object
from ds41jax.tokenizer import FILE_NAME as TOKENIZER_FILE
from ds41jax.tokenizer import Tokenizer

TOKEN_MAP_FILE = "engram_token_map.json"
MAX_TOKEN_MAP_BYTES = 16 << 20
UNREACHABLE = -1
_SEED_PER_LAYER = 10007
_LONE_SPACE = "\ue000"  # keeps a token that is one space from being stripped to nothing
_MILLER_RABIN_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # exact below 3.3e24


@dataclass(frozen=True, eq=False)
class EngramHash:
    """Hash constants of all Engram layers. L layers; C columns, ordered by n-gram order, then head.

    Attributes:
      primes: [L, C] int64, bucket sizes.
      offsets: [L, C] int64, first table row of each column.
      multipliers: [L, N] int64, one odd factor per look-back distance; N is the longest n-gram.
      token_map: [vocab] int32, compressed id of each token.
      pad: compressed id that stands for a token out of reach.
    """

    primes: np.ndarray
    offsets: np.ndarray
    multipliers: np.ndarray
    token_map: np.ndarray
    pad: int

    @classmethod
    def from_config(cls, config: ModelConfig, token_map: np.ndarray) -> "EngramHash":
        """Derives the constants; raises `ConfigError` if they contradict the configuration."""
        _check_token_map(token_map, config)
        primes = engram_primes(
            len(config.engram_layer_ids),
            config.engram_max_ngram_size,
            config.engram_n_heads,
            config.engram_vocab_size,
        )
        rows = tuple(int(total) for total in primes.sum(axis=1))
        if rows != config.engram_num_embeddings:
            raise ConfigError(
                f"text_config.engram_num_embeddings: {list(config.engram_num_embeddings)}, but the "
                f"buckets from engram_vocab_size {config.engram_vocab_size} sum to {list(rows)}"
            )
        pad = int(token_map[config.engram_pad_token_id])
        offsets = primes.cumsum(axis=1) - primes
        return cls(primes, offsets, _multipliers(config), token_map, pad)

    def hash_ids(
        self,
        tokens: np.ndarray,
        image_mask: np.ndarray | None = None,
        previous: np.ndarray | None = None,
        previous_image_mask: np.ndarray | None = None,
    ) -> np.ndarray:
        """Table rows of consecutive tokens of one sequence.

        Looking back from a row, the first image row or the sequence start ends the reach: from
        there on the pad id is hashed. An image row does not even reach itself.

        Args:
          tokens: [T] ids.
          image_mask: [T] bool, true for image rows; None if there are none.
          previous: [P] ids right before `tokens`; only the last N - 1 matter. Fewer than that mean
            that the sequence starts there.
          previous_image_mask: [P] bool, for `previous`.

        Returns:
          [T, L, C] int64.
        """
        orders = self.multipliers.shape[1]
        lead = np.zeros(0, np.int64) if previous is None else previous[-(orders - 1) :]
        lead_image = _mask(previous_image_mask, previous)[-(orders - 1) :]
        outside = orders - 1 - len(lead)
        image = np.concatenate([lead_image, _mask(image_mask, tokens)])
        reached = np.where(image, UNREACHABLE, np.concatenate([lead, tokens]))
        padded = np.concatenate([np.full(outside, UNREACHABLE), reached])
        return self.hash_rows(padded, np.arange(orders - 1, len(padded)))

    def hash_rows(self, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Table rows of chosen tokens of any number of sequences.

        Args:
          tokens: [M] ids of the sequences one after another, UNREACHABLE for image rows and for
            what lies before a sequence's start.
          rows: [T] places in `tokens`, each with the N - 1 tokens before it in front of it.

        Returns:
          [T, L, C] int64.
        """
        blocked = tokens == UNREACHABLE
        ids = self.token_map[np.where(blocked, 0, tokens)].astype(np.int64)
        mixed = np.zeros((len(rows), len(self.multipliers)), np.int64)
        reachable = np.ones(len(rows), bool)
        grams = []
        for shift, factor in enumerate(self.multipliers.T):
            reachable = reachable & ~blocked[rows - shift]
            mixed = mixed ^ (np.where(reachable, ids[rows - shift], self.pad)[:, None] * factor)
            grams.append(mixed)
        heads = self.primes.shape[1] // (len(grams) - 1)
        hashes = np.stack(grams[1:], axis=-1).repeat(heads, axis=-1)
        return hashes % self.primes + self.offsets


def _mask(mask: np.ndarray | None, tokens: np.ndarray | None) -> np.ndarray:
    if mask is None:
        return np.zeros(0 if tokens is None else len(tokens), bool)
    return np.asarray(mask, bool)


def engram_primes(layers: int, max_ngram: int, heads: int, start: int) -> np.ndarray:
    """Bucket sizes [layers, (max_ngram - 1) * heads] int64: distinct primes from `start` upwards.

    Every n-gram order searches from `start` anew and skips what is taken.
    """
    taken: set[int] = set()
    rows = []
    for _ in range(layers * (max_ngram - 1)):
        fresh = (p for p in _primes_from(start) if p not in taken)
        found = list(itertools.islice(fresh, heads))
        taken.update(found)
        rows.append(found)
    return np.array(rows, np.int64).reshape(layers, (max_ngram - 1) * heads)


def _primes_from(start: int) -> Iterator[int]:
    return (n for n in itertools.count(start) if is_prime(n))


def is_prime(n: int) -> bool:
    """Miller-Rabin with the bases that make it exact for every 64-bit number."""
    if n < 2:
        return False
    for p in _MILLER_RABIN_BASES:
        if n % p == 0:
            return n == p
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    odd = (n - 1) >> twos
    return all(_passes(n, base, odd, twos) for base in _MILLER_RABIN_BASES)


def _passes(n: int, base: int, odd: int, twos: int) -> bool:
    x = pow(base, odd, n)
    if x in (1, n - 1):
        return True
    return any((x := x * x % n) == n - 1 for _ in range(twos - 1))


def _multipliers(config: ModelConfig) -> np.ndarray:
    largest = np.iinfo(np.int64).max // config.engram_compressed_vocab_size
    bound = max(1, largest // 2)
    rows = [
        np.random.default_rng(_SEED_PER_LAYER * layer).integers(
            0, bound, size=config.engram_max_ngram_size, dtype=np.int64
        )
        for layer in config.engram_layer_ids
    ]
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size)
    return np.array(rows, np.int64).reshape(shape) * 2 + 1


def compressed_token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Compressed id of every token, [vocab] int32, numbered by first appearance.

    Tokens fall together that differ only in case, accents, compatibility forms or white space
    around them.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    keys = (_compression_key(tokenizer, id, normalizer) for id in range(tokenizer.vocab_size))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)


def _compression_key(tokenizer: Tokenizer, id: int, normalizer: Any) -> str:
    text = tokenizer.decode([id])
    if "\ufffd" in text:  # part of a character: has no text to normalise
        return tokenizer.token(id) or text
    normal: str = normalizer.normalize_str(text)
    return normal or text


def load_token_map(path: str | Path, config: ModelConfig) -> np.ndarray:
    """The token map of a checkpoint folder, [vocab] int32.

    Reads `engram_token_map.json` if there is one, else derives the map from `tokenizer.json`.

    Raises:
      ConfigError: if the map does not fit the configuration.
      TokenizerError: if there is neither.
    """
    file = Path(path) / TOKEN_MAP_FILE
    if not file.exists():
        token_map = compressed_token_map(Tokenizer.from_checkpoint(path))
        _check_token_map(token_map, config, f"{Path(path) / TOKENIZER_FILE}: ")
        return token_map
    data = read_json_object(file, MAX_TOKEN_MAP_BYTES)
    wanted = {
        "pad_token_id": config.engram_pad_token_id,
        "compressed_vocab_size": config.engram_compressed_vocab_size,
    }
    for name, value in wanted.items():
        if data.get(name) != value:
            raise ConfigError(f"{file}: {name} is {data.get(name)!r}, config.json says {value}")
    ids = data.get("token_map")
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        raise ConfigError(f"{file}: token_map must be a list of token numbers")
    token_map = np.array(ids, np.int32)
    _check_token_map(token_map, config, f"{file}: ")
    return token_map


def token_map_json(token_map: np.ndarray, config: ModelConfig) -> dict[str, Any]:
    """Contents of an `engram_token_map.json`."""
    return {
        "pad_token_id": config.engram_pad_token_id,
        "compressed_vocab_size": config.engram_compressed_vocab_size,
        "token_map": token_map.tolist(),
    }


def _check_token_map(token_map: np.ndarray, config: ModelConfig, where: str = "") -> None:
    size = int(token_map.max(initial=-1)) + 1
    if len(token_map) != config.vocab_size or size != config.engram_compressed_vocab_size:
        raise ConfigError(
            f"{where}the token map takes {len(token_map)} tokens to {size}, config.json says "
            f"{config.vocab_size} to {config.engram_compressed_vocab_size}"
        )
