"""Text from a checkpoint, with the simplest correct loop: one sequence, drafted or not."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from ds41jax.engine.loading import Model, load_model, on_cards
from ds41jax.engine.sampling import SamplingParams, choose_tokens, sampling_rows
from ds41jax.engine.session import Prompt, Session
from ds41jax.kernels.cards import ALL_PARTS, Cards, Part
from ds41jax.kernels.compute import Compute, default_compute
from ds41jax.model.sharding import find_cards
from ds41jax.prompt import encode_chat
from ds41jax.tokenizer import StreamDecoder


@dataclass(frozen=True)
class GenerateOptions:
    """How much to generate, and how.

    Attributes:
      max_tokens: tokens at most; fewer if the model ends its turn.
      sampling: greedy by default.
      dspark: draft with the checkpoint's drafter; the output is the same without.
      bounded: prefill the layers past the last KV source on the prompt's last window only.
      raw: continue the text as it is, rather than answer it as a user's turn.
      compute: rounding and kernels; Pallas kernels on an NVIDIA GPU unless something else is given.
      cards: devices that hold the model together, those of other hosts included.
      split: what is split over them.
    """

    max_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    dspark: bool = True
    bounded: bool = True
    raw: bool = False
    compute: Compute = field(default_factory=default_compute)
    cards: int = 1
    split: frozenset[Part] = ALL_PARTS

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def find_cards(self) -> Cards | None:
        """The cards to split over, or None for one; raises `ValueError` if they are not there."""
        return None if self.cards == 1 else find_cards(self.cards, self.split)


@dataclass
class Progress:
    """What a generation has done so far.

    Attributes:
      prompt_tokens, tokens: how many were fed and emitted.
      rounds: passes of the target after the prefill; drafted, accepted: tokens.
      prefill_seconds, decode_seconds: wall time, compilation included.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Generation:
    """A finished generation; `finish_reason` is "stop" (end token) or "length"."""

    text: str
    token_ids: list[int]
    finish_reason: str
    progress: Progress


def generate(
    prompt: str | Sequence[int],
    model: Model | str | Path | None = None,
    options: GenerateOptions | None = None,
) -> Generation:
    """Generates from a prompt.

    Args:
      prompt: text, answered as a user's turn unless `options.raw`; or token ids, taken as they are.
      model: a loaded model or a checkpoint folder; a small synthetic one if None.
      options: `GenerateOptions()` if None.

    Raises:
      ValueError: saying what is wrong with the prompt, the options or the checkpoint.
    """
    options = options or GenerateOptions()
    model = resolve_model(model, options.find_cards())
    progress, ids = Progress(), []
    for token in stream_tokens(prompt, model, options, progress):
        ids.append(token)
    stopped = ids[-1] == model.config.eos_token_id
    text = "" if model.tokenizer is None else model.tokenizer.decode(ids[:-1] if stopped else ids)
    return Generation(text, ids, "stop" if stopped else "length", progress)


def stream_text(
    prompt: str | Sequence[int],
    model: Model | str | Path | None = None,
    options: GenerateOptions | None = None,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Yields pieces of text as they are generated; whole characters only. See `generate`."""
    options = options or GenerateOptions()
    model = resolve_model(model, options.find_cards())
    if model.tokenizer is None:
        raise ValueError(f"{model.path} has no tokenizer.json, which text needs")
    decoder = StreamDecoder(model.tokenizer)
    for token in stream_tokens(prompt, model, options, progress or Progress()):
        piece = "" if token == model.config.eos_token_id else decoder.push(token)
        if piece:
            yield piece


def resolve_model(model: Model | str | Path | None, cards: Cards | None = None) -> Model:
    """A loaded model over the cards: the one given, that of a folder, or the default one."""
    if isinstance(model, Model):
        return on_cards(model, cards)
    if model is None:
        from ds41jax.engine.default_model import default_model_path

        model = default_model_path()
    return load_model(model, cards=cards)


def prompt_ids(prompt: str | Sequence[int], model: Model, options: GenerateOptions) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary and the context."""
    if not isinstance(prompt, str):
        ids = [int(token) for token in prompt]
    elif model.tokenizer is None:
        raise ValueError(f"{model.path} has no tokenizer.json: give token ids, not text")
    elif options.raw:
        ids = [model.config.bos_token_id, *model.tokenizer.encode(prompt)]
    else:
        ids = encode_chat(model.tokenizer, prompt)
    if not ids:
        raise ValueError("the prompt is empty")
    if not all(0 <= token < model.config.vocab_size for token in ids):
        raise ValueError(f"a prompt token lies outside the vocabulary of {model.config.vocab_size}")
    context = model.config.max_position_embeddings
    if len(ids) + options.max_tokens > context:
        raise ValueError(
            f"{len(ids)} prompt tokens and max_tokens {options.max_tokens} exceed the context of "
            f"{context}"
        )
    return ids


def stream_tokens(
    prompt: str | Sequence[int], model: Model, options: GenerateOptions, progress: Progress
) -> Iterator[int]:
    """Yields token ids, the end token included, and keeps `progress` up to date."""
    ids = prompt_ids(prompt, model, options)
    dspark = options.dspark and model.params.drafter is not None
    block = model.config.dspark_block_size if dspark else 0
    compute = replace(options.compute, cards=options.find_cards())
    session = Session(model, len(ids) + options.max_tokens + block, compute)
    progress.prompt_tokens = len(ids)
    start = time.perf_counter()
    result = session.prefill(Prompt.of_text(ids), bounded=options.bounded)[-1]
    emitted = [int(_choose(result.padded_logits[-1:], options.sampling, 0)[0])]
    progress.prefill_seconds = time.perf_counter() - start
    while True:
        for token in emitted:
            progress.tokens += 1
            yield token
            if token == model.config.eos_token_id or progress.tokens == options.max_tokens:
                return
        start = time.perf_counter()
        emitted = _round(session, emitted[-1], block, options, progress)
        progress.decode_seconds += time.perf_counter() - start


def _round(
    session: Session, anchor: int, block: int, options: GenerateOptions, progress: Progress
) -> list[int]:
    """Verifies a draft in one pass; returns what the target chose, as far as the draft agreed."""
    width = min(block, options.max_tokens - progress.tokens - 1)
    drafts = np.asarray(session.draft(anchor).token_ids)[0, :width].tolist() if width > 0 else []
    start = session.length
    result = session.step([anchor, *drafts])
    chosen = _choose(result.padded_logits, options.sampling, progress.tokens)
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == chosen[agreed]:
        agreed += 1
    session.rollback(start + 1 + agreed)
    progress.rounds += 1
    progress.drafted += len(drafts)
    progress.accepted += agreed
    return [int(token) for token in chosen[: agreed + 1]]


def _choose(logits: jax.Array, sampling: SamplingParams, index: int) -> np.ndarray:
    """Choices for consecutive tokens from emitted index `index` on, one a row of logits."""
    count = logits.shape[0]
    rows = sampling_rows([sampling] * count, list(range(index, index + count)))
    return np.asarray(choose_tokens(logits, rows))
