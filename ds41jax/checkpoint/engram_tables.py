"""Engram tables that stay on disk: 203 GB in the official checkpoint, 48 rows read per token."""

from dataclasses import dataclass

import numpy as np

from ds41jax.checkpoint.safetensors_files import CheckpointError

_E8M0_NAN = 0xFF


@dataclass(frozen=True, eq=False)
class EngramTable:
    """One layer's memory-mapped table, in the FP8_GROUP format.

    Attributes:
      name: tensor name of the codes, for messages.
      codes: [rows, dim] uint8, the bits of E4M3 codes.
      scales: [rows, dim / 32] uint8, E8M0.
    """

    name: str
    codes: np.ndarray
    scales: np.ndarray

    def gather(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows, each distinct one once and in ascending order.

        Args:
          row_ids: [...] int64.

        Returns:
          Codes [..., dim] and scales [..., dim / 32], both uint8, in memory.

        Raises:
          IndexError: for a row outside the table.
          CheckpointError: for a row that holds a NaN code or scale.
        """
        rows, where = np.unique(row_ids, return_inverse=True)
        if rows.size and not 0 <= rows[0] <= rows[-1] < len(self.codes):
            raise IndexError(
                f"{self.name}: rows {rows[0]}..{rows[-1]} asked of a table of {len(self.codes)}"
            )
        codes, scales = np.asarray(self.codes)[rows], np.asarray(self.scales)[rows]
        bad = broken_rows(codes, scales)
        if bad.any():
            raise CheckpointError(f"{self.name}: row {rows[bad.argmax()]} holds a NaN")
        where = where.reshape(np.shape(row_ids))
        return codes[where], scales[where]

    def take(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads a few rows as they come, duplicates too, and judges none: see `broken_rows`.

        Args and results as `gather`'s; raises IndexError like it.
        """
        if row_ids.size and not 0 <= row_ids.min() <= row_ids.max() < len(self.codes):
            raise IndexError(
                f"{self.name}: a row outside a table of {len(self.codes)} is asked for"
            )
        return np.asarray(self.codes)[row_ids], np.asarray(self.scales)[row_ids]


def broken_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[...] bool, the rows that hold a NaN: codes [..., dim] and scales [..., dim / 32], uint8."""
    # Adding one carries into a byte's sign bit only from E4M3's NaN: eight codes at once.
    words = np.ascontiguousarray(codes).view(np.uint64) & np.uint64(0x7F7F7F7F7F7F7F7F)
    words += np.uint64(0x0101010101010101)
    found = (words & np.uint64(0x8080808080808080)).any(axis=-1)
    return found | (scales == _E8M0_NAN).any(axis=-1)
