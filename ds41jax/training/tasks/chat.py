"""Talk: greetings, questions about the model, small facts, small jobs on words and numbers."""

import random
from collections.abc import Callable

from ds41jax.training.tasks import chat_facts as known
from ds41jax.training.tasks.example import (
    Check,
    Example,
    assistant,
    build,
    casual,
    fill,
    pick,
    user,
)
from ds41jax.training.tasks.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FRUITS,
    LANGUAGES,
    MONTHS,
    OBJECTS,
    PLAIN_WORDS,
    TOPICS,
    plural,
)

Turn = tuple[str, str, str]  # request, answer, reasoning
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a nano model.",
    "Answer briefly.",
    "Be brief and friendly.",
    "You answer in one sentence.",
    "You are a careful assistant that answers in plain English.",
)


def chat(rng: random.Random) -> Example:
    """One to four turns; scored on the exact last answer where there is only one."""
    turns = [_turn(rng) for _ in range(rng.choices((1, 2, 3, 4), (70, 17, 9, 4))[0])]
    history = [] if rng.random() < 0.8 else [{"role": "system", "content": rng.choice(_SYSTEMS)}]
    for request, answer, _ in turns[:-1]:
        history += [user(request), assistant(answer)]
    request, answer, reasoning = turns[-1]
    check = Check("open") if answer in known.HELLO else Check("equals", answer)
    return build("chat", rng, [*history, user(request)], answer, reasoning, check)


def _turn(rng: random.Random) -> Turn:
    return rng.choices(_TURNS, _WEIGHTS)[0](rng)


def _greeting(rng: random.Random) -> Turn:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(known.THANKS), rng.choice(known.WELCOME), "The user says thanks."
    if kind == 1:
        return rng.choice(known.BYES), rng.choice(known.GOODBYE), "The user says goodbye."
    if kind == 2:
        return rng.choice(known.HOW_ARE_YOU), rng.choice(known.FINE), "The user asks how I am."
    if kind == 3:
        return rng.choice(known.REMARKS), rng.choice(known.ALL_RIGHT), "This asks for nothing."
    return rng.choice(known.GREETINGS), rng.choice(known.HELLO), "The user greets me. I greet back."


def _about(rng: random.Random) -> Turn:
    if rng.random() < 0.5:
        return rng.choice(known.WHO), known.ABOUT, "The user asks what I am."
    return rng.choice(known.ABILITIES), known.ABLE, "The user asks what I can do."


def _unknown(rng: random.Random) -> Turn:
    request = fill(
        rng,
        known.UNKNOWABLE,
        c=rng.choice(CITIES),
        d=rng.choice(CITIES),
        t=rng.choice(TOPICS),
        y=rng.randint(1900, 2026),
    )
    return request, known.UNKNOWN, "I do not know this. I say so."


def _fact(rng: random.Random) -> Turn:
    questions, answer = rng.choice(known.FACTS)
    return casual(rng, rng.choice(questions)), answer, "This is a fact that I know."


def _unit(rng: random.Random) -> Turn:
    parts, whole, number = rng.choice(known.UNITS)
    request = fill(
        rng,
        ("How many {p} are in {w}?", "How many {p} does {w} have?", "{w}: how many {p}?"),
        p=parts,
        w=whole,
    )
    verb = "has"
    return request, f"{whole.capitalize()} {verb} {number} {parts}.", f"{number} {parts}."


def _order(rng: random.Random) -> Turn:
    """Days, months and letters in their order."""
    kind = rng.randrange(4)
    if kind == 0:
        request, names = rng.choice(
            (
                ("Name the days of the week.", DAYS),
                ("List the weekdays.", DAYS),
                ("What are the days of the week?", DAYS),
                ("What are the months of the year?", MONTHS),
                ("List the months.", MONTHS),
                ("Name all months.", MONTHS),
                ("Write the alphabet.", list(_ALPHABET)),
                ("What is the alphabet?", list(_ALPHABET)),
                ("Say the alphabet.", list(_ALPHABET)),
            )
        )
        return casual(rng, request), ", ".join(names), "I list them in their order."
    what, names = rng.choice((("day", DAYS), ("month", MONTHS), ("letter", list(_ALPHABET))))
    at = rng.randrange(len(names))
    after = rng.random() < 0.5
    other = names[(at + (1 if after else -1)) % len(names)]
    side = "after" if after else "before"
    request = fill(
        rng,
        ("Which {w} comes {s} {n}?", "What {w} is {s} {n}?", "Name the {w} {s} {n}."),
        w=what,
        s=side,
        n=names[at],
    )
    order = f"{names[at]}, {other}" if after else f"{other}, {names[at]}"
    return request, f"{other} comes {side} {names[at]}.", f"The order is {order}."


def _opposite(rng: random.Random) -> Turn:
    if rng.random() < 0.6:
        word = rng.choice(list(known.OPPOSITES))
        request = fill(
            rng,
            ("What is the opposite of {w}?", "Give me the opposite of {w}.", "opposite of {w}"),
            w=word,
        )
        return request, f"The opposite of {word} is {known.OPPOSITES[word]}.", "I know this pair."
    word = rng.choice(list(known.PLURALS) + ANIMALS + FRUITS + OBJECTS)
    many = known.PLURALS.get(word, word if word.endswith("s") else plural(word))
    request = fill(rng, ("What is the plural of {w}?", "plural of {w}", "Plural of {w}?"), w=word)
    return request, f"The plural of {word} is {many}.", f"One {word}, two {many}."


def _kind_of(rng: random.Random) -> Turn:
    groups = (
        ("a colour", COLOURS), ("an animal", ANIMALS), ("a fruit", FRUITS), ("a thing", OBJECTS),
        ("a city", CITIES), ("a day", DAYS), ("a month", MONTHS), ("a language", LANGUAGES),
    )  # fmt: skip
    (name, words), (other, _) = rng.sample(groups, 2)
    word = rng.choice([w for w in words if w not in ("orange", "May")])
    if rng.random() < 0.4:
        request = fill(rng, ("Is {w} {n} or {o}?", "Is {w} {o} or {n}?"), w=word, n=name, o=other)
        return request, f"{_first_upper(word)} is {name}.", f"{word} is {name}."
    right = rng.random() < 0.5
    request = f"Is {word} {name if right else other}?"
    answer = f"Yes, {word} is {name}." if right else f"No, {word} is {name}."
    return request, answer, f"{word} is {name}."


def _first_upper(word: str) -> str:
    return word[0].upper() + word[1:]


def _on_words(rng: random.Random) -> Turn:
    """Sorting, reversing, counting, joining and capitals."""
    words = rng.sample(PLAIN_WORDS + FRUITS + ANIMALS, rng.randint(3, 6))
    given = ", ".join(words)
    kind = rng.randrange(6)
    if kind == 0:
        request = pick(rng, f"Sort these words: {given}", f"Put in alphabetical order: {given}")
        return request, ", ".join(sorted(words)), "I order them by their first letters."
    if kind == 1:
        request = pick(rng, f"Reverse this list: {given}", f"Reverse the order of: {given}")
        return request, ", ".join(reversed(words)), "I go from the last to the first."
    if kind == 2:
        request = pick(
            rng, f"How many words are in this list? {given}", f"Count the words: {given}"
        )
        numbered = ", ".join(f"{i + 1} {word}" for i, word in enumerate(words))
        return request, f"There are {len(words)} words.", numbered
    word = rng.choice(words)
    if kind == 3:
        request = pick(rng, f"Write {word} in capital letters.", f"Uppercase: {word}")
        return request, word.upper(), f"{' '.join(word.upper())}"
    if kind == 4:
        request = pick(rng, f"Spell the word {word}.", f"How do you spell {word}?", f"Spell {word}")
        return request, "-".join(word), f"The letters of {word}."
    request = pick(rng, f"What is the first letter of {word}?", f"First letter of {word}?")
    return request, f"The first letter of {word} is {word[0]}.", f"{'-'.join(word)}"


def _compare(rng: random.Random) -> Turn:
    """Comparing, sorting and classifying numbers."""
    a, b = rng.sample(range(1000 if rng.random() < 0.6 else 50), 2)
    kind = rng.randrange(4)
    if kind == 0:
        request = pick(
            rng, f"Which is larger, {a} or {b}?", f"What is greater: {a} or {b}?",
            f"Which number is bigger, {a} or {b}?",
        )  # fmt: skip
        return request, f"{max(a, b)} is larger than {min(a, b)}.", f"{max(a, b)} > {min(a, b)}"
    if kind == 1:
        request = pick(rng, f"Is {a} greater than {b}?", f"Is {a} larger than {b}?")
        answer = f"Yes, {a} > {b}." if a > b else f"No, {a} < {b}."
        return request, answer, answer
    if kind == 2:
        request = pick(rng, f"Is {a} even or odd?", f"Is {a} an even number?", f"Is {a} odd?")
        word = "odd" if a % 2 else "even"
        return request, f"{a} is {word}.", f"The last digit is {a % 10}, so {a} is {word}."
    numbers = rng.sample(range(100), rng.randint(3, 6))
    given = ", ".join(map(str, numbers))
    request = pick(rng, f"Sort these numbers: {given}", f"Order from small to large: {given}")
    return (
        request,
        ", ".join(map(str, sorted(numbers))),
        "I take the smallest first, then the next.",
    )


_TURNS: tuple[Callable[[random.Random], Turn], ...] = (
    _greeting, _about, _unknown, _fact, _unit, _order, _opposite, _kind_of, _on_words, _compare,
)  # fmt: skip
_WEIGHTS = (11, 10, 8, 12, 7, 11, 10, 6, 14, 11)
