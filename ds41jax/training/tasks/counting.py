"""Counting: to 100 and elsewhere, up, down, in steps, in several layouts."""

import random

from ds41jax.training.tasks.example import Check, Example, build, casual, fill

_FROM_TO = (
    "Count from {a} to {b}{how}.",
    "Count from {a} up to {b}{how}.",
    "Count {a} to {b}{how}.",
    "Count {a}-{b}{how}.",
    "List the numbers from {a} to {b}{how}.",
    "Write the numbers from {a} to {b}{how}.",
    "Write out all numbers from {a} to {b}{how}.",
    "Give me the numbers {a} to {b}{how}.",
    "Print every integer from {a} to {b}{how}.",
    "Show all integers between {a} and {b}, both included{how}.",
    "Say the numbers from {a} to {b}{how}.",
    "Numbers from {a} to {b}{how}.",
)
_TO = (
    "Count to {b}{how}.",
    "Count up to {b}{how}.",
    "Count all the way to {b}{how}.",
    "Count for me until {b}{how}.",
    "Write the first {b} numbers{how}.",
    "List the first {b} positive integers{how}.",
)
_DOWN = (
    "Count down from {a} to {b}{how}.",
    "Count backwards from {a} to {b}{how}.",
    "Count from {a} down to {b}{how}.",
    "List the numbers from {a} down to {b}{how}.",
    "Write a countdown from {a} to {b}{how}.",
)
_STEPS = (
    "Count from {a} to {b} in steps of {s}{how}.",
    "Count from {a} to {b} by {s}{how}.",
    "Count by {s} from {a} to {b}{how}.",
    "List the numbers from {a} to {b} with step {s}{how}.",
)
_MULTIPLES = (
    "List the multiples of {s} up to {b}{how}.",
    "Count by {s}s up to {b}{how}.",
    "Write the first {n} multiples of {s}{how}.",
)
_LAYOUTS = (
    (", ", ("", "", "", "", " separated by commas", ", with commas", ", comma separated")),
    ("\n", (", one per line", ", each on its own line", " on separate lines", " one per line")),
    (" ", (" separated by spaces", ", with spaces between them", " on one line with spaces")),
)
_LAYOUT_NAMES = {", ": "with commas", "\n": "one per line", " ": "with spaces"}


_SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def _spelled(number: int) -> str:
    """The number in words, up to a hundred and twenty."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        ten = _TENS[number // 10 - 2]
        return f"{ten}-{_SMALL[number % 10]}" if number % 10 else ten
    return "one hundred" + (f" and {_spelled(number % 100)}" if number % 100 else "")


def counting(rng: random.Random) -> Example:
    """Scored on the numbers of the reply, in order; 1 to 100 is the commonest request."""
    kind = rng.choices(("hundred", "range", "down", "steps", "multiples"), (40, 34, 10, 8, 8))[0]
    templates: tuple[str, ...]
    separator, hows = rng.choices(_LAYOUTS, (65, 25, 10))[0]
    how = rng.choice(hows)
    if kind == "hundred":
        a, b, s, templates = 1, 100, 1, _FROM_TO + _TO
    elif kind == "range":
        a = 1 if rng.random() < 0.6 else rng.randint(0, 90)
        b, s = rng.randint(a + 2, 120), 1
        if a == 1 and rng.random() < 0.4:
            b = rng.choice((5, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 80, 90, 110, 120))
        templates = _FROM_TO + _TO if a == 1 else _FROM_TO
    elif kind == "down":
        b = rng.choice((0, 1, 1, rng.randint(2, 40)))
        a, s, templates = b + rng.choice((5, 9, 10, 19, 20, rng.randint(3, 60))), -1, _DOWN
    elif kind == "steps":
        s, a = rng.choice((2, 2, 3, 4, 5, 5, 10, 10)), rng.choice((0, rng.randint(0, 30)))
        b, templates = a + s * rng.randint(3, 20), _STEPS
    else:
        s, n = rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 10)), rng.randint(4, 12)
        a, b, templates = s, s * n, _MULTIPLES
    numbers = [str(i) for i in range(a, b + (1 if s > 0 else -1), s)]
    first, last = (_spelled(a), _spelled(b)) if rng.random() < 0.1 else (a, b)
    request = fill(rng, templates, a=first, b=last, s=s, n=len(numbers), how=how)
    request = casual(rng, request)
    step = {1: "up by 1", -1: "down by 1"}.get(s, f"up by {s}")
    reasoning = (
        f"The numbers start at {a} and end at {b}. Each goes {step}. "
        f"I write them {_LAYOUT_NAMES[separator]}."
    )
    return build(
        "counting", rng, request, separator.join(numbers), reasoning, Check("numbers", numbers)
    )
