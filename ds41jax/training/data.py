"""Makes the nano model's training rows.

    python -m ds41jax.training.data --corpus corpus.jsonl.xz --out FOLDER --seed 0

writes `short_*.npy` (rows of 1024 targets), `long_*.npy` (8192) and their `heldout_` companions,
each as tokens (uint16) and loss weights in sixteenths (uint8) of equal shape [rows, length + 1],
with `manifest.json` (counts, sources, licences). The corpus file holds the cleaned texts of one
machine; it is written if it is not there. It is all that another machine needs to make the same
rows (with the same Python, whose own documentation is a task), as everything else is generated, in
parts by as many processes as there are cores.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from tqdm import tqdm

from ds41jax.tokenizer import FILE_NAME, Tokenizer
from ds41jax.training.corpus import (
    Source,
    Text,
    find_sources,
    read_corpus,
    read_texts,
    write_corpus,
)
from ds41jax.training.maker import LONG, SHORT, Maker, Shard
from ds41jax.training.rendering import render
from ds41jax.training.tasks import TASKS, draw
from ds41jax.training.vocabulary import train_vocabulary

SHORT_TOKENS, LONG_TOKENS = 96_000_000, 32_000_000
HELD_OUT_SHORT, HELD_OUT_LONG = 200, 16  # rows
PARTS = 32  # of the training rows; each has texts and examples of its own
_VOCABULARY_TEXT = 16_000_000  # letters of the corpus
_VOCABULARY_EXAMPLES = 1200  # of each task


def vocabulary_texts(texts: list[Text]) -> Iterator[str]:
    """A mixture of corpus and tasks in the proportion of the training rows."""
    taken = 0
    for text in random.Random(0).sample(texts, len(texts)):
        if taken > _VOCABULARY_TEXT:
            break
        taken += len(text.text)
        yield text.text
    for task in TASKS:
        for index in range(_VOCABULARY_EXAMPLES):
            pieces = render(draw("training", task, index)).pieces()
            yield from (piece for special, piece in pieces if not special)


@dataclass(frozen=True)
class Plan:
    """What the processes that make parts are told.

    Attributes:
      short, long: training rows of each part.
    """

    corpus: Path
    tokenizer: Path
    out: Path
    seed: int
    parts: int
    short: int
    long: int


def make_part(plan: Plan, part: int) -> dict[str, dict[str, int]]:
    """Writes one part of the training rows into the files; returns its tokens by origin."""
    texts = [text for text in read_corpus(plan.corpus)[1] if not text.held_out]
    random.Random(plan.seed).shuffle(texts)
    mine = texts[part :: plan.parts]
    maker = Maker(Tokenizer.from_checkpoint(plan.tokenizer), mine, "training", plan.seed, part)
    made = {"short": maker.short(plan.short), "long": maker.long(plan.long)}
    for name, shard in made.items():
        rows = slice(part * len(shard.rows), (part + 1) * len(shard.rows))
        for kind, array in shard.arrays().items():
            np.load(plan.out / f"{name}_{kind}.npy", mmap_mode="r+")[rows] = array
    return {name: shard.tokens for name, shard in made.items()}


def make_training(plan: Plan, workers: int) -> dict[str, Any]:
    """Writes the training rows; returns what the manifest says of them."""
    lengths = {"short": SHORT, "long": LONG}
    rows = {"short": plan.parts * plan.short, "long": plan.parts * plan.long}
    for name, length in lengths.items():
        for kind, dtype in (("tokens", np.uint16), ("weights", np.uint8)):
            path = plan.out / f"{name}_{kind}.npy"
            open_memmap(path, "w+", dtype, (rows[name], length)).flush()
    os.environ["RAYON_NUM_THREADS"] = "1"  # of the tokenizer: the processes share the cores
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        parts = pool.map(make_part, [plan] * plan.parts, range(plan.parts))
        made = list(tqdm(parts, "parts", plan.parts))
    return {
        name: {
            "rows": rows[name],
            "length": length,
            "tokens": {k: sum(part[name].get(k, 0) for part in made) for k in made[0][name]},
        }
        for name, length in lengths.items()
    }


def write_shard(folder: Path, name: str, shard: Shard) -> dict[str, Any]:
    """Writes `NAME_tokens.npy` and `NAME_weights.npy`; returns what the manifest says of them."""
    for kind, array in shard.arrays().items():
        np.save(folder / f"{name}_{kind}.npy", array)
    return {"rows": len(shard.rows), "length": len(shard.rows[0].ids), "tokens": shard.tokens}


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
    if not args.corpus.exists():
        found = find_sources(args.packages, args.documentation)
        write_corpus(args.corpus, found, list(tqdm(read_texts(found), "files")))
    sources, texts = read_corpus(args.corpus)
    if args.vocabulary:
        args.tokenizer.mkdir(parents=True, exist_ok=True)
        trained = train_vocabulary(vocabulary_texts([t for t in texts if not t.held_out]))
        (args.tokenizer / FILE_NAME).write_bytes(trained.to_json())
    held_out = [text for text in texts if text.held_out]
    maker = Maker(Tokenizer.from_checkpoint(args.tokenizer), held_out, "held-out", args.seed)
    said = {
        "heldout_short": write_shard(args.out, "heldout_short", maker.short(HELD_OUT_SHORT)),
        "heldout_long": write_shard(args.out, "heldout_long", maker.long(HELD_OUT_LONG)),
    }
    short = max(1, int(SHORT_TOKENS * args.scale) // (SHORT * PARTS))
    long = max(1, int(LONG_TOKENS * args.scale) // (LONG * PARTS))
    plan = Plan(args.corpus, args.tokenizer, args.out, args.seed, PARTS, short, long)
    said |= make_training(plan, args.workers)
    write_manifest(args.out, said, sources, texts, args.seed)
    print(json.dumps(said, indent=1))
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    packages = Path(np.__file__).parent.parent
    nano = Path(__file__).parent.parent / "nano"
    parser = argparse.ArgumentParser(prog="python -m ds41jax.training.data", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE", help="of the texts")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="share of all rows")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--packages", type=Path, default=packages, help="site-packages to read")
    parser.add_argument("--documentation", type=Path, default=Path("/usr/share/doc"))
    parser.add_argument("--tokenizer", type=Path, default=nano, help="folder of tokenizer.json")
    parser.add_argument("--vocabulary", action="store_true", help="train the vocabulary first")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
