"""Radix index: which retained snapshots share how long a prefix with a prompt.

A tree with compressed edges over u32 symbols. Entries sit at the node where their sequence ends, at
most one a bank. Every node but the root has an entry or at least two children.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ALIGNMENT = 2  # a partly shared prefix is cut to whole pairs, so that no carry crosses the cut


class Bank(enum.IntEnum):
    """Why an entry was made; each bank has limits of its own."""

    PROMPT = 0  # a prefill reached this position
    TURN = 1  # a request ended here with stop or length


class Reuse(enum.Enum):
    """What a lookup may answer with.

    EXACT: only entries that end on the prompt's path, whose state equals that of a cold run.
    BOUNDED: also a part of an entry, whose last window is then computed again from nothing.
    """

    OFF = "off"
    EXACT = "exact"
    BOUNDED = "bounded"


@dataclass(eq=False)
class Entry:
    """One retained snapshot.

    Attributes:
      end: tokens that it holds.
      approximate: whether a replay went into its state, so that it is no exact frontier.
      logits: float32 [vocabulary] of position end - 1, or None.
      device, host: where its state lies; `cache.retained` and `cache.host_tier` fill them.
      last_used: the cache's clock when it was made or last hit.
      pins: uses that are under way; a pinned entry is never evicted.
    """

    bank: Bank
    end: int
    approximate: bool = False
    logits: np.ndarray | None = None
    device: Any = None
    host: Any = None
    last_used: int = 0
    pins: int = 0
    node: "Node | None" = None


@dataclass(eq=False)
class Node:
    """A point of the tree; `edge` are the symbols that lead to it from its parent."""

    edge: np.ndarray
    end: int
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    entries: dict[Bank, Entry] = field(default_factory=dict)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def partial_start(common: int, window: int) -> int:
    """Tokens that need no computing when `common` are shared with the inside of an entry."""
    return max(0, common // ALIGNMENT * ALIGNMENT - window)


class RadixIndex:
    """The tree; knows nothing about pages or slots."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.uint32), 0)

    def find(self, symbols: np.ndarray, bank: Bank) -> Entry | None:
        """The entry for exactly these symbols."""
        node, common = self._descend(symbols)
        return node.entries.get(bank) if common == node.end == len(symbols) else None

    def insert(self, symbols: np.ndarray, entry: Entry) -> None:
        """Places an entry where `symbols` end; there must be none of its bank."""
        assert entry.end == len(symbols) > 0, "an entry lies at the end of its symbols"
        node, common = self._descend(symbols)
        if common < node.end:
            node = self._split(node, common)
        if common < len(symbols):
            child = Node(symbols[common:].copy(), len(symbols), node)
            node.children[int(symbols[common])] = child
            node = child
        assert entry.bank not in node.entries, "an entry for these symbols exists"
        node.entries[entry.bank] = entry
        entry.node = node

    def remove(self, entry: Entry) -> None:
        """Takes an entry out and collapses the edges that only it kept apart."""
        node = entry.node
        assert node is not None, "the entry is not in the index"
        del node.entries[entry.bank]
        entry.node = None
        parent = node.parent
        if parent is not None and not node.entries and not node.children:
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and not node.entries and len(node.children) == 1:
            self._merge(node)

    def matches(self, symbols: np.ndarray) -> Iterator[tuple[Entry, int]]:
        """Every entry that shares symbols, with how many."""
        stack = [(self.root, 0)]
        while stack:
            node, common = stack.pop()
            if common:
                yield from ((entry, common) for entry in node.entries.values())
            for child in node.children.values():
                more = 0
                if common == node.end:
                    more = common_length(child.edge, symbols[common:])
                if common + more:
                    stack.append((child, common + more))

    def entries(self) -> Iterator[Entry]:
        """All entries."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield from node.entries.values()
            stack.extend(node.children.values())

    def symbols(self, entry: Entry) -> np.ndarray:
        """The symbols that lead to an entry, [end] uint32."""
        edges = []
        node = entry.node
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])

    def saved(self, entry: Entry, window: int | None) -> int:
        """Tokens that a request for this entry's sequence would compute again without it.

        `window` is the replay of a partial hit, or None where those do not count.
        """
        node = entry.node
        assert node is not None, "the entry is not in the index"
        best = node.end if len(node.entries) > 1 else 0
        if window is not None and node.children:
            best = max(best, partial_start(node.end, window))
        above = node.parent
        while above is not None and above.end > best:
            if above.entries:
                best = above.end
            elif window is not None:
                best = max(best, partial_start(above.end, window))
            above = above.parent
        return node.end - best

    def check(self) -> None:
        """Asserts the tree's own rules; for tests."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            assert node is self.root or node.entries or len(node.children) > 1, "edge to collapse"
            assert all(e.node is node and e.end == node.end for e in node.entries.values())
            for symbol, child in node.children.items():
                assert child.parent is node and int(child.edge[0]) == symbol
                assert child.end == node.end + len(child.edge)
                stack.append(child)

    def _descend(self, symbols: np.ndarray) -> tuple[Node, int]:
        """The node whose edge the symbols end in or leave, and the common length up to there."""
        node, common = self.root, 0
        while common == node.end and common < len(symbols):
            child = node.children.get(int(symbols[common]))
            if child is None:
                break
            common += common_length(child.edge, symbols[common:])
            node = child
        return node, common

    def _split(self, node: Node, at: int) -> Node:
        """Puts a node at depth `at` into the edge of `node`."""
        parent = node.parent
        assert parent is not None and parent.end < at < node.end
        cut = at - parent.end
        upper = Node(node.edge[:cut].copy(), at, parent)
        parent.children[int(upper.edge[0])] = upper
        node.edge, node.parent = node.edge[cut:].copy(), upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _merge(self, node: Node) -> None:
        """Joins a node without entries to its only child."""
        parent, (child,) = node.parent, node.children.values()
        assert parent is not None
        child.edge = np.concatenate([node.edge, child.edge])
        child.parent = parent
        parent.children[int(child.edge[0])] = child
