"""Generated conversations: what the nano model is taught and what it is examined on.

A task is a function of a `random.Random` and of nothing else, so a seed names an example. Training
draws from even seeds, held-out sets from odd ones: `rng_of(split, task, index)` gives both.
"""

import random
from collections.abc import Callable

from ds41jax.training.tasks.arithmetic import arithmetic
from ds41jax.training.tasks.chat import chat
from ds41jax.training.tasks.code import code
from ds41jax.training.tasks.counting import counting
from ds41jax.training.tasks.docstrings import docstrings
from ds41jax.training.tasks.example import Check, Example, score
from ds41jax.training.tasks.json_objects import json_object
from ds41jax.training.tasks.retrieval import copying, planted_fact, retrieval
from ds41jax.training.tasks.tools import tools

TASKS: dict[str, Callable[[random.Random], Example]] = {
    "counting": counting,
    "arithmetic": arithmetic,
    "json": json_object,
    "tools": tools,
    "copying": copying,
    "retrieval": retrieval,
    "chat": chat,
    "code": code,
    "docstrings": docstrings,
}

__all__ = ["TASKS", "Check", "Example", "planted_fact", "rng_of", "score"]


def rng_of(split: str, task: str, index: int) -> random.Random:
    """The generator of one example; the splits "training" and "held-out" never share one.

    Raises:
      ValueError: for another split.
    """
    if split not in ("training", "held-out"):
        raise ValueError(f'split must be "training" or "held-out", got {split!r}')
    return random.Random(f"{task}:{2 * index + (split == 'held-out')}")
