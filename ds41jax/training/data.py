"""Makes the nano model's training rows.

    python -m ds41jax.training.data --out FOLDER --seed 0

writes `short_*.npy` (rows of 1024 targets), `long_*.npy` (8192) and their `heldout_` companions,
each as tokens (uint16) and loss weights in sixteenths (uint8) of equal shape [rows, length + 1],
with `manifest.json` (counts, sources, licences) and `data.tar.xz`, which holds them all.
"""

import argparse
import json
import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ds41jax.tokenizer import BOS, EOS, FILE_NAME, Tokenizer
from ds41jax.training.corpus import Source, Text, find_sources, read_texts
from ds41jax.training.packing import CorpusStream, corpus_row, pack
from ds41jax.training.rendering import Document, Encoder, render
from ds41jax.training.tasks import TASKS, planted_fact, rng_of
from ds41jax.training.tasks.example import Example
from ds41jax.training.tasks.prose import paragraph
from ds41jax.training.vocabulary import train_vocabulary

SHORT, LONG = 1025, 8193  # a row's tokens: one more than it has targets
SHORT_TOKENS, LONG_TOKENS = 45_000_000, 10_000_000
HELD_OUT_SHORT, HELD_OUT_LONG = 200, 16  # rows
# Shares of the short rows' tokens; what they leave is corpus.
SHARES = {
    "counting": 0.05,
    "arithmetic": 0.08,
    "json": 0.09,
    "tools": 0.11,
    "copying": 0.035,
    "retrieval": 0.045,
    "chat": 0.075,
    "code": 0.06,
    "docstrings": 0.055,
}
LONG_RETRIEVAL = 0.65  # of the long rows' tokens
_CONTEXTS = (1000, 2000, 3000, 4000, 5500, 7000, 7700)
_BATCH = 500  # examples encoded at once
_VOCABULARY_TEXT = 16_000_000  # letters of the corpus
_VOCABULARY_EXAMPLES = 1200  # of each task


@dataclass
class Shard:
    """Rows of one kind, and tokens by what they came from."""

    rows: list[Document]
    tokens: dict[str, int] = field(default_factory=dict)


def vocabulary_texts(texts: list[Text]) -> Iterator[str]:
    """A mixture of corpus and tasks in the proportion of the training rows."""
    taken = 0
    for text in random.Random(0).sample(texts, len(texts)):
        if taken > _VOCABULARY_TEXT:
            break
        taken += len(text.text)
        yield text.text
    for task, make in TASKS.items():
        for index in range(_VOCABULARY_EXAMPLES):
            pieces = render(make(rng_of("training", task, index))).pieces()
            yield from (piece for special, piece in pieces if not special)


class Maker:
    """Makes shards from one vocabulary and one corpus."""

    def __init__(self, tokenizer: Tokenizer, texts: list[Text], seed: int, progress: bool = True):
        """Encodes the corpus."""
        self._tokenizer, self._texts, self._seed, self._progress = tokenizer, texts, seed, progress
        self._encoder = Encoder(tokenizer)
        self._files = [
            np.array(ids, np.uint16)
            for at in tqdm(range(0, len(texts), 100), "corpus", disable=not progress)
            for ids in tokenizer.encode_batch([t.text for t in texts[at : at + 100]])
        ]

    def short(self, tokens: int, split: str) -> Shard:
        """Tasks by `SHARES`, the rest corpus."""
        documents, counts = [], {}
        for task, share in SHARES.items():
            made = self._documents(task, TASKS[task], int(tokens * share), SHORT, split)
            counts[task] = sum(len(document.ids) for document in made)
            documents += made
        return self._packed(documents, counts, tokens, SHORT, split)

    def long(self, tokens: int, split: str) -> Shard:
        """Facts planted in long texts, the rest corpus; raises `ValueError` without paragraphs."""
        blocks = [block for text in self._chosen(split) for block in _blocks(text.text)]
        if not blocks:
            raise ValueError(f"the {split} corpus has no paragraphs to plant facts between")

        def filler(rng: random.Random) -> str:
            return rng.choice(blocks) if rng.random() < 0.5 else paragraph(rng)

        def count(text: str) -> int:
            return len(self._tokenizer.encode(text))

        def make(rng: random.Random) -> Example:
            return planted_fact(rng, rng.choice(_CONTEXTS), count, filler, rng.randint(1, 6))

        made = self._documents("retrieval-long", make, int(tokens * LONG_RETRIEVAL), LONG, split)
        counts = {"retrieval": sum(len(document.ids) for document in made)}
        return self._packed(made, counts, tokens, LONG, split)

    def _chosen(self, split: str) -> list[Text]:
        return [text for text in self._texts if text.held_out == (split == "held-out")]

    def _documents(
        self,
        task: str,
        make: Callable[[random.Random], Example],
        tokens: int,
        longest: int,
        split: str,
    ) -> list[Document]:
        """Documents of a task until `tokens` are reached; longer ones than a row are left out."""
        found: list[Document] = []
        total = index = 0
        with tqdm(total=tokens, desc=task, disable=not self._progress) as bar:
            while total < tokens:
                step = min(_BATCH, 1 + (tokens - total) // longest)
                rngs = [rng_of(split, f"{task}/{self._seed}", index + i) for i in range(step)]
                index += step
                made = self._encoder.documents([make(rng) for rng in rngs])
                fitting = [document for document in made if len(document.ids) <= longest]
                found += fitting
                added = sum(len(document.ids) for document in fitting)
                total += added
                bar.update(added)
        return found

    def _packed(
        self,
        documents: list[Document],
        counts: dict[str, int],
        tokens: int,
        length: int,
        split: str,
    ) -> Shard:
        texts = zip(self._texts, self._files, strict=True)
        files = [ids for text, ids in texts if text.held_out == (split == "held-out")]
        bos, eos = (self._tokenizer.special_id(token) for token in (BOS, EOS))
        corpus = CorpusStream(files, bos, eos, self._seed)
        rows = list(pack(documents, length, corpus, self._seed))
        while len(rows) * length < tokens:
            rows.append(corpus_row(length, corpus))
        order = np.random.default_rng(self._seed + 1).permutation(len(rows))
        shard = Shard([rows[i] for i in order], counts | {"corpus": corpus.taken})
        return shard


def _blocks(text: str) -> list[str]:
    """Paragraphs of a file, of a size to stand between planted facts."""
    return [block.strip("\n") for block in text.split("\n\n") if 60 < len(block) < 900]


def write_shard(folder: Path, name: str, shard: Shard) -> dict[str, Any]:
    """Writes `NAME_tokens.npy` and `NAME_weights.npy`; returns what the manifest says of them."""
    np.save(folder / f"{name}_tokens.npy", np.stack([row.ids for row in shard.rows]))
    np.save(folder / f"{name}_weights.npy", np.stack([row.weights for row in shard.rows]))
    length = len(shard.rows[0].ids)
    return {"rows": len(shard.rows), "length": length, "tokens": shard.tokens}


def write_manifest(
    folder: Path, shards: dict[str, Any], sources: list[Source], texts: list[Text], seed: int
) -> None:
    """Writes `manifest.json`: what was made, from which sources, under which licences."""
    letters: dict[str, int] = {}
    for text in texts:
        letters[text.source] = letters.get(text.source, 0) + len(text.text)
    used = [
        {"name": s.name, "version": s.version, "licence": s.licence, "letters": letters[s.name]}
        for s in sources
        if s.name in letters
    ]
    manifest = {"seed": seed, "shards": shards, "sources": used}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Writes everything into a folder; with `--vocabulary`, trains and writes the vocabulary."""
    args = _arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    sources = find_sources(args.packages, args.documentation)
    texts = list(tqdm(read_texts(sources), "files"))
    if args.vocabulary:
        args.tokenizer.mkdir(parents=True, exist_ok=True)
        trained = train_vocabulary(vocabulary_texts([t for t in texts if not t.held_out]))
        (args.tokenizer / FILE_NAME).write_bytes(trained.to_json())
    maker = Maker(Tokenizer.from_checkpoint(args.tokenizer), texts, args.seed)
    shards = {
        "heldout_short": maker.short(HELD_OUT_SHORT * SHORT, "held-out"),
        "heldout_long": maker.long(HELD_OUT_LONG * LONG, "held-out"),
        "short": maker.short(int(SHORT_TOKENS * args.scale), "training"),
        "long": maker.long(int(LONG_TOKENS * args.scale), "training"),
    }
    said = {name: write_shard(args.out, name, shard) for name, shard in shards.items()}
    write_manifest(args.out, said, sources, texts, args.seed)
    print(json.dumps(said, indent=1))
    with tarfile.open(args.out / "data.tar.xz", "w:xz", preset=args.preset) as archive:
        for file in [*sorted(args.out.glob("*.npy")), args.out / "manifest.json"]:
            archive.add(file, file.name)
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    packages = Path(np.__file__).parent.parent
    nano = Path(__file__).parent.parent / "nano"
    parser = argparse.ArgumentParser(prog="python -m ds41jax.training.data", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="share of all rows")
    parser.add_argument("--preset", type=int, default=6, help="of xz, 0 to 9")
    parser.add_argument("--packages", type=Path, default=packages, help="site-packages to read")
    parser.add_argument("--documentation", type=Path, default=Path("/usr/share/doc"))
    parser.add_argument("--tokenizer", type=Path, default=nano, help="folder of tokenizer.json")
    parser.add_argument("--vocabulary", action="store_true", help="train the vocabulary first")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
