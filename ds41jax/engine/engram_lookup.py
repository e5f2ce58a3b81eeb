"""Engram rows of a step: hashed and gathered on the host, ahead of the device."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ds41jax.checkpoint.engram_tables import EngramTable, broken_rows
from ds41jax.formats import Format, QuantizedArray
from ds41jax.model.engram_hash import EngramHash


@dataclass(frozen=True)
class EngramLookup:
    """The hash and the memory-mapped tables of all Engram layers."""

    hash: EngramHash
    tables: tuple[EngramTable, ...]

    @property
    def history(self) -> int:
        """How many tokens before a row its hashes look back to."""
        return self.hash.multipliers.shape[1] - 1

    def gather(self, tokens: np.ndarray, is_image: np.ndarray, start: int) -> QuantizedArray:
        """Table rows of tokens[start:], given everything before them.

        Args:
          tokens: [n] ids of a sequence from its beginning, or from `history` before `start`.
          is_image: [n] bool.

        Returns:
          FP8_GROUP codes and scales in numpy, [n - start, Engram layers, columns, width].
        """
        ids = self.hash.hash_ids(tokens[start:], is_image[start:], tokens[:start], is_image[:start])
        read = [table.gather(ids[:, layer]) for layer, table in enumerate(self.tables)]
        codes = np.stack([codes for codes, _ in read], axis=1)
        scales = np.stack([scales for _, scales in read], axis=1)
        return QuantizedArray(codes.view(ml_dtypes.float8_e4m3fn), scales, format=Format.FP8_GROUP)

    def take(
        self, tokens: np.ndarray, rows: np.ndarray, codes: np.ndarray, scales: np.ndarray
    ) -> np.ndarray:
        """Table rows of a few tokens of several sequences, in one hash and one read a table.

        Args:
          tokens, rows: as for `EngramHash.hash_rows`, T rows.
          codes, scales: uint8 [>= T, Engram layers, columns, ...], filled up to T.

        Returns:
          [T] bool, tokens whose rows hold a NaN and must not be used.
        """
        ids = self.hash.hash_rows(tokens, rows)
        count = len(rows)
        for layer, table in enumerate(self.tables):
            codes[:count, layer], scales[:count, layer] = table.take(ids[:, layer])
        broken: np.ndarray = np.any(broken_rows(codes[:count], scales[:count]), axis=(1, 2))
        return broken
