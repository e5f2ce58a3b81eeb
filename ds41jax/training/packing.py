"""Documents to rows of one length, as few tokens wasted as possible.

A row holds several documents, each opened by the beginning-of-sentence token. A task's document
is never split; what it leaves free is filled with the next piece of the corpus.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ds41jax.training.rendering import UNIT, Document

MAX_DOCUMENTS = 23  # a row; the trainer has room for 24
LOOK_AHEAD = 48  # documents tried for the room that is left in a row
MIN_PIECE = 24  # a shorter piece of the corpus is not worth its beginning


class CorpusStream:
    """Pieces of any length from files in an endless, shuffled sequence."""

    def __init__(self, files: Sequence[np.ndarray], bos: int, eos: int, seed: int):
        """A stream over files of token ids.

        Raises:
          ValueError: if there are none.
        """
        if not any(len(file) for file in files):
            raise ValueError("the corpus is empty; check the folders that it is read from")
        self._files, self._bos, self._eos = files, bos, eos
        self._rng = np.random.default_rng(seed)
        self._order: list[int] = []
        self._rest = np.zeros(0, np.uint16)
        self.taken = 0

    def piece(self, length: int) -> Document:
        """A document of at most `length` tokens; shorter where a file ends."""
        while not len(self._rest):
            if not self._order:
                self._order = self._rng.permutation(len(self._files)).tolist()
            file = self._files[self._order.pop()]
            self._rest = np.append(file, np.uint16(self._eos)) if len(file) else file
        ids = np.concatenate([[self._bos], self._rest[: length - 1]]).astype(np.uint16)
        self._rest = self._rest[length - 1 :]
        self.taken += len(ids)
        weights = np.full(len(ids), UNIT, np.uint8)
        weights[0] = 0
        return Document(ids, weights)


def pack(
    documents: Sequence[Document], length: int, corpus: CorpusStream, seed: int
) -> Iterator[Document]:
    """Rows of `length` tokens that hold all documents, in shuffled order.

    Raises:
      ValueError: for a document that is longer than a row.
    """
    order = np.random.default_rng(seed).permutation(len(documents)).tolist()
    longest = max((len(document.ids) for document in documents), default=0)
    if longest > length:
        raise ValueError(f"a document of {longest} tokens does not fit into a row of {length}")
    while order:
        row, room = [documents[order.pop()]], length
        room -= len(row[0].ids)
        while order and len(row) < MAX_DOCUMENTS:
            nearby = range(len(order) - 1, max(len(order) - LOOK_AHEAD, 0) - 1, -1)
            at = next((i for i in nearby if len(documents[order[i]].ids) <= room), None)
            if at is None:
                break
            row.append(documents[order.pop(at)])
            room -= len(row[-1].ids)
        yield _filled(row, length, corpus)


def corpus_row(length: int, corpus: CorpusStream) -> Document:
    """A row of the corpus alone."""
    return _filled([], length, corpus)


def _filled(row: list[Document], length: int, corpus: CorpusStream) -> Document:
    room = length - sum(len(document.ids) for document in row)
    while room >= MIN_PIECE and len(row) <= MAX_DOCUMENTS:
        row.append(corpus.piece(room))
        room -= len(row[-1].ids)
    ids, weights = np.full(length, 2, np.uint16), np.zeros(length, np.uint8)
    at = 0
    for document in row:
        ids[at : at + len(document.ids)] = document.ids
        weights[at : at + len(document.ids)] = document.weights
        at += len(document.ids)
    return Document(ids, weights)
