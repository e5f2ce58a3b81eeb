"""The nano model's vocabulary: byte-level BPE, trained on the corpus and the rendered tasks.

Ids in the order of the official vocabulary: beginning, end and padding, then bytes and merges,
the other special tokens last. Every digit is a token; a run of blanks is one before a word's own.
"""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ds41jax.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer

VOCAB_SIZE = 3072
_PIECES = (
    r"[^\r\n\p{L}\p{N}\p{P}\p{S}]?\p{L}+"  # a word with the blank before it
    r"|\p{N}"
    r"| ?[\p{P}\p{S}]+"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"  # blanks but for the last, which belongs to the word behind
    r"|\s+"
)


def train_vocabulary(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains a vocabulary of exactly `vocab_size` ids, the special tokens among them.

    Args:
      texts: plain texts, without special tokens.

    Raises:
      ValueError: if the texts hold too few different pairs for that many ids.
    """
    learner = _untrained(models.BPE())
    size = vocab_size - 3 - len(SPECIAL_TOKENS)
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            min_frequency=2,
        ),
    )
    model = json.loads(learner.to_str())["model"]
    if len(model["vocab"]) != size:
        raise ValueError(
            f"a vocabulary of {vocab_size} needs {size} bytes and merges, "
            f"but the texts give {len(model['vocab'])}; train on more text"
        )
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    words = [BOS, EOS, PAD, *learned, *SPECIAL_TOKENS]
    vocab = {word: id for id, word in enumerate(words)}
    merges = [tuple(merge) for merge in model["merges"]]
    finished = _untrained(models.BPE(vocab=vocab, merges=merges))
    added = (BOS, EOS, PAD, *SPECIAL_TOKENS)
    finished.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in added])
    return Tokenizer(json.loads(finished.to_str()))


def _untrained(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
