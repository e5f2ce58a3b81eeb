"""Generated conversations: what the nano model is taught and what it is examined on.

A task is a function of a `random.Random` and of nothing else, so a seed names an example: training
draws from even seeds, held-out sets from odd ones. As two seeds may draw the same question, the
words decide too: an eighth of all questions and an eighth of all names of tools are reserved for
held-out sets, and no training conversation asks those questions or calls those tools.
"""

import hashlib
import random
from collections.abc import Callable

from ds41jax.training.tasks.arithmetic import arithmetic
from ds41jax.training.tasks.chat import chat
from ds41jax.training.tasks.code import code
from ds41jax.training.tasks.counting import counting
from ds41jax.training.tasks.docstrings import docstrings
from ds41jax.training.tasks.example import Check, Example, calls_of, score
from ds41jax.training.tasks.json_objects import json_object
from ds41jax.training.tasks.recall import recall
from ds41jax.training.tasks.retrieval import copying, planted_fact, retrieval
from ds41jax.training.tasks.tools import tools

TASKS: dict[str, Callable[[random.Random], Example]] = {
    "counting": counting,
    "arithmetic": arithmetic,
    "json": json_object,
    "tools": tools,
    "copying": copying,
    "recall": recall,
    "retrieval": retrieval,
    "chat": chat,
    "code": code,
    "docstrings": docstrings,
}
RESERVED_ONE_IN = 8

__all__ = ["TASKS", "Check", "Example", "draw", "planted_fact", "question", "rng_of", "score"]


def rng_of(split: str, task: str, index: int) -> random.Random:
    """The generator of one example; the splits "training" and "held-out" never share one.

    Raises:
      ValueError: for another split.
    """
    if split not in ("training", "held-out"):
        raise ValueError(f'split must be "training" or "held-out", got {split!r}')
    return random.Random(f"{task}:{2 * index + (split == 'held-out')}")


def draw(split: str, task: str, index: int, stream: str = "") -> Example:
    """Example `index` of a task; other streams of the same split have other examples."""
    rng = rng_of(split, task + stream, index)
    while True:
        example = TASKS[task](rng)
        if _belongs(example, split):
            return example


def question(example: Example) -> str:
    """All that the user says, in one case and with single blanks."""
    said = [message["content"] for message in example.prompt if message["role"] == "user"]
    return " ".join(" ".join(said).lower().split())


def _belongs(example: Example, split: str) -> bool:
    """Held-out questions are reserved, and so is the first tool of those that have one."""
    reserved = [_reserved(question(example))]
    reserved += [_reserved(name) for name in _called(example)]
    return all(reserved[:2]) if split == "held-out" else not any(reserved)


def _called(example: Example) -> list[str]:
    """Names of the tools that the assistant calls, in order."""
    return [call["name"] for message in example.messages for call in calls_of(message)]


def _reserved(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % RESERVED_ONE_IN == 0
