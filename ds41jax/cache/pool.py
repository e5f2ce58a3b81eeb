"""The page pool: which pages of the global rows are free, how many hold each, and its generation.

Pages of all KV sources come from one pool. Only numbers are kept here; the rows themselves lie in
`model.state.KVState`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class PoolExhausted(Exception):
    """Too few free pages; nothing was taken."""

    def __init__(self, needed: int, free: int, total: int):
        super().__init__(f"{needed} pages are needed, {free} of {total} are free")
        self.needed, self.free, self.total = needed, free, total


class PageError(RuntimeError):
    """A page was released more often than it was taken, or used after its release."""


@dataclass(frozen=True)
class PageLayout:
    """How tokens become rows and rows become pages.

    Attributes:
      ratios: tokens a row, of each KV source.
      page_rows: rows a page.
    """

    ratios: tuple[int, ...]
    page_rows: int

    def rows(self, tokens: int) -> tuple[int, ...]:
        """Complete rows of each source: a pair's first half waits in the carry, not in a page."""
        return tuple(tokens // ratio for ratio in self.ratios)

    def pages(self, tokens: int) -> tuple[int, ...]:
        """Pages of each source that hold the rows of `tokens` positions."""
        return tuple([-(-(tokens // ratio) // self.page_rows) for ratio in self.ratios])

    def total_pages(self, tokens: int) -> int:
        """Pages of all sources together."""
        return sum(self.pages(tokens))

    @property
    def group_tokens(self) -> int:
        """Tokens after which every source fills a whole number of pages."""
        return self.page_rows * math.lcm(*self.ratios)

    @property
    def group_pages(self) -> int:
        """Pages of all sources that one group of tokens fills."""
        return self.total_pages(self.group_tokens)


class PageIdentity(NamedTuple):
    """Names the contents of a page for as long as somebody holds it, and never again after."""

    source: int
    page: int
    generation: int


class PagePool:
    """Free list, reference counts and generations of pages 0 .. size - 1."""

    def __init__(self, size: int):
        if size < 0:
            raise ValueError(f"a pool cannot have {size} pages")
        self.size = size
        self._references = np.zeros(size, np.int32)
        self._generations = np.zeros(size, np.int64)
        self._free = list(range(size))[::-1]

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - self.free

    def references(self) -> np.ndarray:
        """A copy of the reference counts, [size] int32."""
        return self._references.copy()

    def generation(self, page: int) -> int:
        """How often the page's last reference went."""
        return int(self._generations[page])

    def identity(self, source: int, page: int) -> PageIdentity:
        return PageIdentity(source, page, self.generation(page))

    def holds(self, identity: PageIdentity) -> bool:
        """Whether the contents that `identity` names are still there."""
        page = identity.page
        return bool(self._references[page]) and self.generation(page) == identity.generation

    def sharers(self, page: int) -> int:
        """References on a page."""
        return int(self._references[page])

    def writable(self, page: int) -> bool:
        """Whether its one holder may append in place; otherwise it must copy first."""
        return self.sharers(page) == 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages with one reference each.

        Raises:
          PoolExhausted: if there are fewer; none is taken then.
        """
        if count > self.free:
            raise PoolExhausted(count, self.free, self.size)
        if count == 0:
            return []
        taken = self._free[self.free - count :][::-1]
        del self._free[self.free - count :]
        self._references[taken] = 1
        return taken

    def retain(self, pages: Sequence[int] | np.ndarray) -> None:
        """One more reference on each page; all must be held already."""
        ids, counts = np.unique(np.asarray(pages, np.int64), return_counts=True)
        if not np.all(self._references[ids] > 0):
            raise PageError(f"pages {ids[self._references[ids] == 0].tolist()} are free")
        self._references[ids] += counts.astype(np.int32)

    def release(self, pages: Sequence[int] | np.ndarray) -> int:
        """One reference less on each page; returns how many became free."""
        ids, counts = np.unique(np.asarray(pages, np.int64), return_counts=True)
        left = self._references[ids] - counts
        if not np.all(left >= 0):
            raise PageError(f"pages {ids[left < 0].tolist()} were released too often")
        self._references[ids] = left
        gone = ids[left == 0]
        self._generations[gone] += 1
        self._free.extend(gone[::-1].tolist())
        return len(gone)

    def check(self, holders: Iterable[Sequence[int] | np.ndarray]) -> None:
        """Compares every count with the pages of all `holders`; for tests and after torture.

        Raises:
          PageError: naming the pages whose books do not balance.
        """
        expected = np.zeros(self.size, np.int64)
        for pages in holders:
            np.add.at(expected, np.asarray(pages, np.int64), 1)
        wrong = np.flatnonzero(expected != self._references)
        if len(wrong):
            raise PageError(
                f"pages {wrong.tolist()} have {self._references[wrong].tolist()} references, "
                f"but {expected[wrong].tolist()} holders"
            )
        if sorted(self._free) != np.flatnonzero(self._references == 0).tolist():
            raise PageError("the free list and the reference counts disagree")
