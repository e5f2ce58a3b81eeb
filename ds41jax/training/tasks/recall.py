"""Recall of what nothing but the prompt can tell: tables asked for again and again, repetitions.

Most of an answer's tokens are copies of strings without meaning, several answers to a text, so
that these few tokens teach attention to look back early in training.
"""

import json
import random
from collections.abc import Callable

from ds41jax.training.tasks.example import Check, Example, assistant, build, fill, user
from ds41jax.training.tasks.words import (
    CITIES,
    NOUNS,
    OBJECTS,
    PLAIN_WORDS,
    identifier,
    invented_word,
    title,
)

_LETTERS, _HEX = "abcdefghijklmnopqrstuvwxyz", "0123456789abcdef"
_MIXED = _LETTERS + _LETTERS.upper() + "0123456789"
_FORMS = (
    "{k} = {v}",
    "{k}: {v}",
    "{k} -> {v}",
    "- {k}: {v}",
    "{k}={v}",
    "| {k} | {v} |",
    "{k} {v}",
)
_ABOVE = ("{t}\n\n{q}", "Here is a table.\n{t}\n\n{q}", "Remember this:\n{t}\n\n{q}", "{q}\n\n{t}")
_VALUE = (
    "What is the value of {k}?", "Which value does {k} have?", "{k}?", "And {k}?", "What is {k}?",
    "Look up {k}.", "Value of {k}",
)  # fmt: skip
_LINE = ("Give me the whole line of {k}.", "Write the line with {k}.", "Quote the entry {k}.")
_KEY = ("Which key has the value {v}?", "What has the value {v}?", "Where does it say {v}?")
_REPEAT = (
    "Repeat: {x}", "Say exactly this: {x}", "{x}\n\nRepeat the text above.", "Copy this:\n{x}",
    "Write this once more:\n\n{x}", "Echo {x}",
)  # fmt: skip
_AGAIN = ("Once more.", "Again, please.", "Repeat it.", "And again.")
_ENTRY_TOKENS = 12  # of a table, about


def recall(rng: random.Random) -> Example:
    """A table with one to eight questions, or texts to repeat; scored on the last reply."""
    if rng.random() < 0.7:
        return table(rng, rng.randint(2, 36), rng.randint(1, 8))
    turns = [_repeated(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    while len(turns) < 5 and rng.random() < 0.3:
        turns.append((rng.choice(_AGAIN), turns[-1][1]))
    return _conversation(rng, turns, 0.15)


def table(rng: random.Random, entries: int, questions: int) -> Example:
    """A table of so many entries and questions about it."""
    draw_key = rng.choice((_key, _key, opaque))
    keys = _distinct(rng, draw_key, entries)
    values = _distinct(rng, rng.choice((opaque, one_form(rng))), entries)
    form = rng.choice(_FORMS)
    lines = [form.format(k=k, v=v) for k, v in zip(keys, values, strict=True)]
    text = "\n".join(lines)
    kinds, weights = ("value", "key", "line"), (75, 13, 12)
    if rng.random() < 0.2:
        shown = dict(zip(keys, values, strict=True))
        text, weights = json.dumps(shown, indent=rng.choice((None, 1))), (85, 15, 0)
    turns = []
    for at in rng.choices(range(entries), k=questions):
        kind = rng.choices(kinds, weights)[0]
        answer = {"value": values[at], "line": lines[at], "key": keys[at]}[kind]
        templates = {"value": _VALUE, "line": _LINE, "key": _KEY}[kind]
        turns.append((fill(rng, templates, k=keys[at], v=values[at]), answer))
    turns[0] = (fill(rng, _ABOVE, t=text, q=turns[0][0]), turns[0][1])
    return _conversation(rng, turns, 0.15)


def long_table(rng: random.Random, tokens: int) -> Example:
    """A table of about so many tokens; the more of them, the more questions."""
    entries = max(4, tokens // _ENTRY_TOKENS)
    return table(rng, entries, rng.randint(4, 8 + entries // 20))


def _conversation(rng: random.Random, turns: list[tuple[str, str]], thinking: float) -> Example:
    history = []
    for request, answer in turns[:-1]:
        history += [user(request), assistant(answer)]
    request, answer = turns[-1]
    reasoning = "The answer is in the text above."
    check = Check("equals", answer)
    return build("recall", rng, [*history, user(request)], answer, reasoning, check, thinking)


def _repeated(rng: random.Random) -> tuple[str, str]:
    draw = rng.choice((opaque, opaque, one_form(rng), lambda rng: rng.choice(PLAIN_WORDS)))
    parts = [draw(rng) for _ in range(rng.randint(1, 16))]
    text = rng.choice((" ", " ", ", ", "\n", "; ", "")).join(parts)
    return fill(rng, _REPEAT, x=text), text


def _key(rng: random.Random) -> str:
    return rng.choice(
        (
            f"{rng.choice(NOUNS)}_{rng.choice(NOUNS)}",
            f"{rng.choice(PLAIN_WORDS)} {rng.choice(OBJECTS)}",
            invented_word(rng),
            str(rng.randint(1, 9999)),
        )
    )


def opaque(rng: random.Random) -> str:
    """A string of one of many forms that cannot be guessed."""
    return rng.choice(_OPAQUE)(rng)


def one_form(rng: random.Random) -> Callable[[random.Random], str]:
    """Makes strings of the same form."""
    return rng.choice(_OPAQUE)


def _letters(alphabet: str, low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: "".join(rng.choices(alphabet, k=rng.randint(low, high)))


def _syllables(rng: random.Random) -> str:
    return "".join(invented_word(rng) for _ in range(rng.randint(1, 2)))


_OPAQUE: tuple[Callable[[random.Random], str], ...] = (
    _syllables,
    invented_word,
    identifier,
    title,
    _letters(_LETTERS, 3, 9),
    _letters(_HEX, 4, 12),
    _letters(_MIXED, 4, 10),
    _letters("0123456789", 2, 7),
    lambda rng: f"{rng.randint(0, 999)}.{rng.randint(0, 99):02d}",
    lambda rng: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
    lambda rng: f"20{rng.randint(0, 29):02d}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
    lambda rng: f"{invented_word(rng)}/{rng.choice(PLAIN_WORDS)}.{rng.choice(('txt', 'py', 'md'))}",
    lambda rng: rng.choice(CITIES),
    lambda rng: " ".join(rng.sample(PLAIN_WORDS, 2)),
)


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    """So many different strings; one that is drawn again is lengthened."""
    found: dict[str, None] = {}
    while len(found) < count:
        value = draw(rng)
        found[f"{value}{len(found)}" if value in found else value] = None
    return list(found)
