"""Prompts as sequences of u32 symbols: token ids below 2^31, image identities from 2^31 on.

Every position of an image span becomes the symbol of its image, so that two images behind the same
placeholder tokens diverge at the span's first position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FIRST_IMAGE_SYMBOL = 1 << 31


class ImageSpan(NamedTuple):
    """Positions start .. stop - 1 show the image called `identity` (a strong hash)."""

    start: int
    stop: int
    identity: bytes


def images_in(symbols: np.ndarray) -> list[int]:
    """The distinct image symbols of a sequence."""
    return np.unique(symbols[symbols >= FIRST_IMAGE_SYMBOL]).tolist()


class ImageSymbols:
    """Numbers image identities for as long as a request or a cached prefix refers to them."""

    def __init__(self) -> None:
        self._symbols: dict[bytes, int] = {}
        self._held: dict[int, tuple[bytes, int]] = {}  # symbol: identity, references
        self._recycled: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    def encode(
        self, token_ids: Sequence[int] | np.ndarray, spans: Sequence[ImageSpan]
    ) -> np.ndarray:
        """[n] uint32 symbols; holds each distinct image once, until `release` of the result.

        Raises:
          ValueError: naming the span or token that is out of range.
        """
        ids = np.asarray(token_ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < FIRST_IMAGE_SYMBOL:
            raise ValueError("token ids must be at least 0 and below 2^31")
        last = 0
        for span in spans:
            if not last <= span.start < span.stop <= len(ids):
                raise ValueError(
                    f"image span {span.start} to {span.stop} overlaps or leaves {len(ids)} tokens"
                )
            last = span.stop
        symbols = ids.astype(np.uint32)
        for span in spans:
            symbols[span.start : span.stop] = self._symbol(span.identity)
        self.retain(symbols)
        return symbols

    def retain(self, symbols: np.ndarray) -> None:
        """One more reference on each distinct image of a sequence."""
        for symbol in images_in(symbols):
            identity, references = self._held[symbol]
            self._held[symbol] = identity, references + 1

    def release(self, symbols: np.ndarray) -> None:
        """One reference less; a number that nobody holds may later mean another image."""
        for symbol in images_in(symbols):
            identity, references = self._held[symbol]
            if references > 1:
                self._held[symbol] = identity, references - 1
            else:
                del self._held[symbol], self._symbols[identity]
                self._recycled.append(symbol)

    def _symbol(self, identity: bytes) -> int:
        if identity not in self._symbols:
            fresh = FIRST_IMAGE_SYMBOL + len(self._held)
            symbol = self._recycled.pop() if self._recycled else fresh
            self._symbols[identity] = symbol
            self._held[symbol] = identity, 0
        return self._symbols[identity]
