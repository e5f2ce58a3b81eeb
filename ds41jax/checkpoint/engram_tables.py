"""Engram tables that stay on disk: 203 GB in the official checkpoint, 48 rows read per token."""

from dataclasses import dataclass

import numpy as np

from ds41jax.checkpoint.safetensors_files import CheckpointError

_E4M3_NAN = 0x7F  # with either sign
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
        codes, scales = self.codes[rows], self.scales[rows]
        bad = ((codes & 0x7F) == _E4M3_NAN).any(axis=-1) | (scales == _E8M0_NAN).any(axis=-1)
        if bad.any():
            raise CheckpointError(f"{self.name}: row {rows[bad.argmax()]} holds a NaN")
        where = where.reshape(np.shape(row_ids))
        return codes[where], scales[where]
