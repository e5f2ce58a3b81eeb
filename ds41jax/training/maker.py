"""Rows of training data from one vocabulary and some texts: generated tasks, and corpus."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds41jax.tokenizer import BOS, EOS, Tokenizer
from ds41jax.training.corpus import Text
from ds41jax.training.packing import CorpusStream, corpus_row, pack
from ds41jax.training.rendering import Document, Encoder
from ds41jax.training.tasks import draw, planted_fact, rng_of
from ds41jax.training.tasks.example import Example
from ds41jax.training.tasks.prose import paragraph
from ds41jax.training.tasks.recall import long_table

SHORT, LONG = 1025, 8193  # a row's tokens: one more than it has targets
# Shares of the short rows' tokens; what they leave is corpus.
SHARES = {
    "counting": 0.05,
    "arithmetic": 0.04,
    "json": 0.12,
    "tools": 0.24,
    "copying": 0.06,
    "recall": 0.12,
    "retrieval": 0.10,
    "chat": 0.04,
    "code": 0.05,
    "docstrings": 0.03,
}
LONG_FACTS, LONG_TABLES = 0.65, 0.2  # of the long rows' tokens
_SIZES = (300, 7900)  # tokens of a document of the long rows
_QUESTION_TOKENS = 45  # of a question about a fact and its answer, about
_MAX_QUESTIONS = 20
_BATCH = 500  # examples encoded at once


@dataclass
class Shard:
    """Rows of one kind, and tokens by what they came from."""

    rows: list[Document]
    tokens: dict[str, int] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        """What the files hold, by the second part of their names: [rows, length] each."""
        return {
            "tokens": np.stack([row.ids for row in self.rows]),
            "weights": np.stack([row.weights for row in self.rows]),
        }


class Maker:
    """Makes rows of one split; every part of a split has examples of its own."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Sequence[Text], split: str, seed: int, part: int = 0
    ):
        """Encodes the texts, the corpus of all rows."""
        self._tokenizer, self._split = tokenizer, split
        self._stream = f"/{seed}/{part}"
        self._seed = 1000 * seed + part
        self._encoder = Encoder(tokenizer)
        self._blocks = [block for text in texts for block in _blocks(text.text)]
        self._files = [
            np.array(ids, np.uint16)
            for at in range(0, len(texts), 100)
            for ids in tokenizer.encode_batch([t.text for t in texts[at : at + 100]])
        ]

    def short(self, rows: int) -> Shard:
        """Tasks by `SHARES`, the rest corpus."""
        made = {
            task: self._documents(self._task(task), int(rows * SHORT * share), SHORT)
            for task, share in SHARES.items()
        }
        return self._packed(made, rows, SHORT)

    def _task(self, task: str) -> Callable[[int], Example]:
        return lambda index: draw(self._split, task, index, self._stream)

    def long(self, rows: int) -> Shard:
        """Facts in long texts and long tables, the rest corpus; `ValueError` without paragraphs."""
        if not self._blocks:
            raise ValueError(f"the {self._split} corpus has no paragraphs to plant facts between")

        def examples(name: str, make: Callable[[random.Random], Example]) -> list[Document]:
            share = {"retrieval": LONG_FACTS, "recall": LONG_TABLES}[name]

            def example(index: int) -> Example:
                return make(rng_of(self._split, f"{name}-long{self._stream}", index))

            return self._documents(example, int(rows * LONG * share), LONG)

        made = {
            "retrieval": examples("retrieval", self._facts),
            "recall": examples("recall", lambda rng: long_table(rng, _size(rng))),
        }
        return self._packed(made, rows, LONG)

    def _facts(self, rng: random.Random) -> Example:
        size = _size(rng)
        questions = rng.randint(1, min(_MAX_QUESTIONS, 1 + size // 120))
        text = size - _QUESTION_TOKENS * questions

        def filler(rng: random.Random) -> str:
            return rng.choice(self._blocks) if rng.random() < 0.5 else paragraph(rng)

        return planted_fact(rng, text, self._count, filler, questions)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _documents(
        self, example: Callable[[int], Example], tokens: int, longest: int
    ) -> list[Document]:
        """Documents until `tokens` are reached; longer ones than a row are left out."""
        found: list[Document] = []
        total = index = 0
        while total < tokens:
            step = min(_BATCH, 1 + (tokens - total) // longest)
            made = self._encoder.documents([example(index + i) for i in range(step)])
            index += step
            fitting = [document for document in made if len(document.ids) <= longest]
            found += fitting
            total += sum(len(document.ids) for document in fitting)
        return found

    def _packed(self, made: dict[str, list[Document]], rows: int, length: int) -> Shard:
        bos, eos = (self._tokenizer.special_id(token) for token in (BOS, EOS))
        corpus = CorpusStream(self._files, bos, eos, self._seed)
        documents = list(itertools.chain(*made.values()))
        packed = list(itertools.islice(pack(documents, length, corpus, self._seed), rows))
        packed += [corpus_row(length, corpus) for _ in range(rows - len(packed))]
        order = np.random.default_rng(self._seed + 1).permutation(rows)
        tokens = {task: sum(len(d.ids) for d in documents) for task, documents in made.items()}
        return Shard([packed[i] for i in order], tokens | {"corpus": corpus.taken})


def _size(rng: random.Random) -> int:
    """Tokens of a long document: every order of size alike, but half of them anywhere."""
    low, high = _SIZES
    if rng.random() < 0.5:
        return rng.randint(low, high)
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _blocks(text: str) -> list[str]:
    """Paragraphs of a file, of a size to stand between planted facts."""
    return [block.strip("\n") for block in text.split("\n\n") if 60 < len(block) < 900]
