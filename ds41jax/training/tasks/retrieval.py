"""Copying, and finding a planted fact in a long text."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ds41jax.training.tasks.example import Check, Example, assistant, build, fill, user
from ds41jax.training.tasks.prose import paragraph, sentence
from ds41jax.training.tasks.words import (
    ADJECTIVES,
    CITIES,
    COLOURS,
    NOUNS,
    OBJECTS,
    PLACES,
    PLAIN_WORDS,
    identifier,
    invented_word,
)

Paragraph = Callable[[random.Random], str]
_LETTERS_PER_TOKEN = 3


@dataclass(frozen=True)
class _Fact:
    """A kind of fact: how it is stated, asked for, and what its key and value are drawn from."""

    statement: str
    questions: tuple[str, ...]
    keys: tuple[Sequence[str], Sequence[str]]
    value: Callable[[random.Random], str]

    def key(self, rng: random.Random) -> str:
        return f"{rng.choice(self.keys[0])} {rng.choice(self.keys[1])}"


_FACTS = (
    _Fact(
        "The access code of the {k} is {v}.",
        ("What is the access code of the {k}?", "Which access code does the {k} have?"),
        (COLOURS, PLACES),
        lambda rng: str(rng.randint(1000, 9999)),
    ),
    _Fact(
        "The secret number of the {k} is {v}.",
        ("What is the secret number of the {k}?", "Tell me the secret number of the {k}."),
        (ADJECTIVES, OBJECTS),
        lambda rng: str(rng.randint(10, 99999)),
    ),
    _Fact(
        "The password for the {k} is {v}.",
        ("What is the password for the {k}?", "Which password opens the {k}?"),
        (COLOURS, PLACES),
        invented_word,
    ),
    _Fact(
        "The {k} is kept in {v}.",
        ("Where is the {k} kept?", "In which city is the {k}?", "Where is the {k}?"),
        (COLOURS, OBJECTS),
        lambda rng: rng.choice(CITIES),
    ),
    _Fact(
        "The serial number of the {k} is {v}.",
        ("What is the serial number of the {k}?", "Give me the serial number of the {k}."),
        (ADJECTIVES, OBJECTS),
        identifier,
    ),
    _Fact(
        "The magic word of the {k} is {v}.",
        ("What is the magic word of the {k}?", "Which magic word belongs to the {k}?"),
        (ADJECTIVES, PLACES),
        lambda rng: rng.choice(PLAIN_WORDS),
    ),
    _Fact(
        "The price of the {k} is {v} coins.",
        ("What is the price of the {k}?", "How much does the {k} cost?"),
        (COLOURS, OBJECTS),
        lambda rng: str(rng.randint(2, 999)),
    ),
)
_OPENINGS = (
    "Read the following text.\n\n{text}\n\n{q}",
    "{text}\n\n{q}",
    "Here is a text:\n\n{text}\n\nQuestion: {q}",
    "{text}\n\nAnswer from the text above: {q}",
    "I will ask about this text: {q}\n\n{text}\n\n{q}",
)
_VALUE_ONLY = (" Reply with the value only.", " Answer with just the value.")


def retrieval(rng: random.Random) -> Example:
    """One to six facts planted in 150 to 700 tokens."""
    return planted_fact(rng, rng.randint(150, 700), questions=rng.choice((1, 1, 2, 3, 4, 6)))


def planted_fact(
    rng: random.Random,
    tokens: int,
    count: Callable[[str], int] | None = None,
    filler: Paragraph = paragraph,
    questions: int = 1,
) -> Example:
    """A fact asked for at the end of a text; scored on whether the reply contains its value.

    Args:
      tokens: of the text, which is not exceeded unless the facts alone do so.
      count: tokens of a text; an estimate from its letters if left out.
      filler: makes the paragraphs around the fact.
      questions: further ones follow in turns of their own, about other facts.
    """
    measure = count or (lambda text: len(text) // _LETTERS_PER_TOKEN)
    stated, turns = _facts(rng, questions)
    parts = [filler(rng)]
    length = sum(map(measure, stated)) + measure(parts[0])
    while (length := length + measure(further := filler(rng)) + 1) <= tokens:
        parts.append(further)
    for statement in stated:
        _plant(rng, parts, statement)
    asked = turns[0][0]
    history = [user(fill(rng, _OPENINGS, text="\n\n".join(parts), q=asked))]
    for (_, answer, _), (following, _, _) in pairwise(turns):
        history += [assistant(answer), user(following)]
    _, answer, value = turns[-1]
    reasoning = f'The text says: "{answer}"'
    if rng.random() < 0.25:
        history[-1]["content"] += rng.choice(_VALUE_ONLY)
        answer = value
    return build("retrieval", rng, history, answer, reasoning, Check("contains", value), 0.3)


def _facts(rng: random.Random, questions: int) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Statements, and (question, statement, value) of those asked for; no key occurs twice."""
    stated: list[str] = []
    turns: list[tuple[str, str, str]] = []
    used: set[str] = set()
    others = (0, 0, 1, 2, 4) if questions < 8 else (0, 0, 0, 1)
    for _ in range(questions):
        fact = rng.choice(_FACTS)
        keys = _distinct(rng, fact.key, 1 + rng.choice(others), used)
        values = _distinct(rng, fact.value, len(keys))
        said = [fact.statement.format(k=k, v=v) for k, v in zip(keys, values, strict=True)]
        stated += said
        turns.append((rng.choice(fact.questions).format(k=keys[0]), said[0], values[0]))
        used |= set(keys)
    return stated, turns


def _plant(rng: random.Random, parts: list[str], statement: str) -> None:
    """Puts a statement between two paragraphs or at the end of one."""
    at = rng.randrange(len(parts))
    if rng.random() < 0.5:
        parts.insert(at, statement)
    else:
        parts[at] += " " + statement


def _distinct(
    rng: random.Random,
    draw: Callable[[random.Random], str],
    count: int,
    used: Collection[str] = (),
) -> list[str]:
    """So many different strings, none of them used before."""
    found: list[str] = []
    while len(found) < count:
        value = draw(rng)
        if value not in found and value not in used:
            found.append(value)
    return found


_COPY = (
    "Repeat exactly: {x}",
    "Repeat this: {x}",
    "Copy this text: {x}",
    "Say this back to me: {x}",
    "Echo: {x}",
    "Write exactly this: {x}",
    "Repeat after me: {x}",
    "Copy the following exactly:\n\n{x}",
    "Repeat the following text word for word:\n{x}",
)
_LOOKUP = (
    "{table}\n\nWhat is the value of {k}?",
    "{table}\n\nWhich value does {k} have?",
    "Here are some settings:\n{table}\nWhat is {k}?",
    "Given\n\n{table}\n\nwhat is {k}?",
    "Look up {k} in this list:\n{table}",
)
_ITEM = (
    "Here is a list: {x}. What is the {n} item?",
    "List: {x}\nWhich is the {n} one?",
    "What is the {n} word of this list? {x}",
)
_ORDINALS = "first second third fourth fifth sixth".split()


def copying(rng: random.Random) -> Example:
    """Verbatim copies, look-ups in a small table, items of a list; scored on the exact reply."""
    kind = rng.choices(("copy", "lookup", "item"), (55, 30, 15))[0]
    if kind == "copy":
        text = _copied(rng)
        request, answer = fill(rng, _COPY, x=text), text
        reasoning = "The user wants the text back unchanged."
    elif kind == "lookup":
        keys = _distinct(rng, _key, rng.randint(3, 14))
        values = [_value(rng) for _ in keys]
        form = rng.choice(("{} = {}", "{}: {}", "{} -> {}", "- {}: {}", "{}={}"))
        rows = [form.format(k, v) for k, v in zip(keys, values, strict=True)]
        at = rng.randrange(len(keys))
        request = fill(rng, _LOOKUP, table="\n".join(rows), k=keys[at])
        answer = values[at]
        reasoning = f'The line "{rows[at]}" gives it.'
    else:
        items = _distinct(rng, lambda r: r.choice(PLAIN_WORDS + OBJECTS), rng.randint(3, 6))
        at = rng.randrange(len(items))
        at, ordinal = (len(items) - 1, "last") if rng.random() < 0.2 else (at, _ORDINALS[at])
        request, answer = fill(rng, _ITEM, x=", ".join(items), n=ordinal), items[at]
        reasoning = ", ".join(f"{i + 1}: {item}" for i, item in enumerate(items[: at + 1]))
    return build("copying", rng, request, answer, reasoning, Check("equals", answer), 0.3)


def _key(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"{rng.choice(NOUNS)}_{rng.choice(NOUNS)}"
    return rng.choice((invented_word(rng), rng.choice(OBJECTS)))


def _value(rng: random.Random) -> str:
    return rng.choice((str(rng.randint(0, 9999)), identifier(rng), rng.choice(PLAIN_WORDS)))


def _copied(rng: random.Random) -> str:
    kind = rng.randrange(7)
    if kind == 0:
        return sentence(rng)
    if kind == 1:
        return " ".join(identifier(rng) for _ in range(rng.randint(1, 5)))
    if kind == 2:
        return ", ".join(rng.choice(PLAIN_WORDS + OBJECTS) for _ in range(rng.randint(3, 10)))
    if kind == 3:
        return "\n".join(f"{_key(rng)} = {_value(rng)}" for _ in range(rng.randint(2, 6)))
    if kind == 4:
        return " ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(2, 10)))
    if kind == 5:
        words = [rng.choice(PLAIN_WORDS + ADJECTIVES + OBJECTS) for _ in range(rng.randint(2, 9))]
        return " ".join(words)
    return f"{_key(rng)} = [{', '.join(_value(rng) for _ in range(rng.randint(2, 5)))}]"
