"""Generated sentences: filler between planted facts, and text that can only be copied."""

import random

from ds41jax.training.tasks.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    MONTHS,
    OBJECTS,
    PLACES,
    PLAIN_WORDS,
    TOPICS,
    invented_word,
)

_SENTENCES = (
    "The {c} {o} stands beside the {a} {p}.",
    "A {a} {n} crossed the {w} before {d}.",
    "In {m} the {w} near {city} is often {a}.",
    "Nobody moved the {o} after the {w} had turned {c}.",
    "The {p} in {city} closes early on {d}.",
    "There are {k} {c} tiles on the floor of the {p}.",
    "Every {d} the {o} is checked and the {p} is swept.",
    "The {n} sleeps under the {o} while the {w} is {a}.",
    "A note about {t} was left on the {o}.",
    "The road from {city} to {city2} follows the {w}.",
    "It takes {k} minutes to walk from the {p} to the {w}.",
    "The book about {t} has {k} pages and a {c} cover.",
    "The {n} prefers the {a} side of the {w}.",
    "The {o} was repaired in {m} and painted {c}.",
    "On {d} the {p} smelled of {w} and {t} was discussed.",
    "If the {o} is {a}, the {n} waits by the {p}.",
    "The word {x} was written on the {o} in {c} letters.",
    "Rain fell on the {p}, and the {w} grew {a}.",
)


def sentence(rng: random.Random) -> str:
    """One sentence that means little."""
    return rng.choice(_SENTENCES).format(
        c=rng.choice(COLOURS),
        o=rng.choice(OBJECTS),
        a=rng.choice(ADJECTIVES),
        p=rng.choice(PLACES),
        n=rng.choice(ANIMALS),
        w=rng.choice(PLAIN_WORDS),
        d=rng.choice(DAYS),
        m=rng.choice(MONTHS),
        t=rng.choice(TOPICS),
        k=rng.randint(2, 400),
        city=rng.choice(CITIES),
        city2=rng.choice(CITIES),
        x=invented_word(rng),
    )


def paragraph(rng: random.Random) -> str:
    """Three to seven sentences."""
    return " ".join(sentence(rng) for _ in range(rng.randint(3, 7)))
