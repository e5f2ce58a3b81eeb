"""Arithmetic: short sums by heart, longer ones by columns in the thinking block."""

import operator
import random

from ds41jax.training.tasks.example import Check, Example, build, fill
from ds41jax.training.tasks.words import FRUITS, OBJECTS, plural

_ASK = (
    "What is {x}?",
    "what is {x}",
    "{x} = ?",
    "{x}",
    "{x}=",
    "Compute {x}.",
    "Calculate {x}.",
    "How much is {x}?",
    "Work out {x}.",
    "What's {x}?",
    "Solve {x}.",
    "Please compute {x}.",
)
_WORDS = {
    "+": ("{a} plus {b}", "the sum of {a} and {b}"),
    "-": ("{a} minus {b}", "{a} take away {b}"),
    "*": ("{a} times {b}", "{a} multiplied by {b}", "the product of {a} and {b}"),
    "/": ("{a} divided by {b}",),
}
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def arithmetic(rng: random.Random) -> Example:
    """Scored on the last number of the reply."""
    kind = rng.choices(("short", "long", "story"), (30, 55, 15))[0]
    if kind == "story":
        return _story(rng)
    a, b, sign = _short(rng) if kind == "short" else _long(rng)
    result = _SIGNS[sign](a, b)
    expression = _expression(rng, a, b, sign)
    request = fill(rng, _ASK, x=expression)
    answer = f"{a} {sign} {b} = {result}"
    reasoning = steps(a, b, sign)
    thinking = rng.random() < (0.4 if kind == "short" else 0.75)
    if kind == "long" and not thinking:
        answer = reasoning  # the steps are needed somewhere
    check = Check("last_number", str(result))
    return build("arithmetic", rng, request, answer, reasoning, check, thinking)


def _short(rng: random.Random) -> tuple[int, int, str]:
    sign = rng.choice("+-*/")
    if sign in "*/":
        a, b = rng.randint(0, 12), rng.randint(1, 12)
        return (a, b, sign) if sign == "*" else (a * b, b, sign)
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.3:
        a, b = rng.randint(1, 9) * 10, rng.randint(1, 9) * rng.choice((1, 10))
    return (a, b, sign) if sign == "+" else (max(a, b), min(a, b), sign)


def _long(rng: random.Random) -> tuple[int, int, str]:
    sign = rng.choices("+-*", (40, 30, 30))[0]
    digits = (rng.randint(1, 3), rng.randint(1, 3))
    a, b = (rng.randint(10 ** (n - 1), 10**n - 1) for n in digits)
    if sign == "-" and a < b and rng.random() < 0.7:
        a, b = b, a
    return a, b, sign


def _expression(rng: random.Random, a: int, b: int, sign: str) -> str:
    roll = rng.random()
    if roll < 0.25:
        return fill(rng, _WORDS[sign], a=a, b=b)
    if sign == "*" and roll < 0.4:
        sign = rng.choice("x×")
    elif sign == "/" and roll < 0.4:
        sign = "÷"
    return f"{a}{sign}{b}" if roll > 0.8 else f"{a} {sign} {b}"


def steps(a: int, b: int, sign: str) -> str:
    """The reasoning: one line for each column, from the right."""
    if sign == "/":
        return f"{b} * {a // b} = {a}, so {a} / {b} = {a // b}."
    if sign == "*":
        return _product(a, b)
    if sign == "+":
        return "\n".join(_sum(a, b))
    if a >= b:
        return "\n".join(_difference(a, b))
    lines = [f"{a} is less than {b}, so the result is negative."]
    return "\n".join([*lines, *_difference(b, a), f"So {a} - {b} = {a - b}."])


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digits of both numbers, units first."""
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(width)]


def _sum(a: int, b: int) -> list[str]:
    carry, lines = 0, []
    for x, y in _columns(a, b):
        total = x + y + carry
        terms = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        carry = total // 10
        lines.append(f"{terms} = {total}, write {total % 10}" + (", carry 1" if carry else ""))
    if carry:
        lines.append("carry 1, write 1")
    return [*lines, f"{a} + {b} = {a + b}"]


def _difference(a: int, b: int) -> list[str]:
    borrow, lines = 0, []
    for x, y in _columns(a, b):
        terms = f"{x} - {y} - 1" if borrow else f"{x} - {y}"
        value = x - y - borrow
        borrow = int(value < 0)
        if borrow:
            lines.append(f"{terms} = {value}, borrow 10, write {value + 10}")
        else:
            lines.append(f"{terms} = {value}, write {value}")
    return [*lines, f"{a} - {b} = {a - b}"]


def _product(a: int, b: int) -> str:
    """Long multiplication: a row for each digit of b, then the sum of the rows."""
    if len(str(a)) < len(str(b)):
        lines = [f"{a} * {b} = {b} * {a}"]
        a, b = b, a
    else:
        lines = []
    total = 0
    for place, digit in enumerate(reversed(str(b))):
        row = a * int(digit)
        if len(str(a)) > 1 and int(digit) > 1:
            lines += _row(a, int(digit))
        lines.append(f"{a} * {digit} = {row}" + (f", shift {row * 10**place}" if place else ""))
        if place:
            lines += _sum(total, row * 10**place)
        total += row * 10**place
    return "\n".join([*lines, f"{a} * {b} = {total}"] if len(str(b)) > 1 else lines)


def _row(a: int, digit: int) -> list[str]:
    carry, lines = 0, []
    for x in reversed(str(a)):
        product = int(x) * digit
        total = product + carry
        terms = f"{x} * {digit} = {product}"
        if carry:
            terms += f", plus {carry} = {total}"
        carry = total // 10
        lines.append(f"{terms}, write {total % 10}" + (f", carry {carry}" if carry else ""))
    if carry:
        lines.append(f"write {carry}")
    return lines


def _story(rng: random.Random) -> Example:
    things = plural(rng.choice(FRUITS + OBJECTS))
    a, b = rng.randint(2, 60), rng.randint(1, 40)
    if rng.random() < 0.5:
        sign, result = "+", a + b
        request = fill(
            rng,
            (
                "I have {a} {t} and buy {b} more. How many {t} do I have?",
                "There are {a} {t} in a box. I add {b}. How many {t} are in the box?",
                "A shop has {a} {t} and gets {b} more. How many {t} does it have now?",
                "One shelf holds {a} {t}, another {b}. How many {t} are there in total?",
            ),
            a=a, b=b, t=things,
        )  # fmt: skip
        answer = f"{a} + {b} = {result}, so there are {result}."
    else:
        sign, a = "-", a + b
        result = a - b
        request = fill(
            rng,
            (
                "I have {a} {t} and give away {b}. How many {t} are left?",
                "There are {a} {t} in a box. I take out {b}. How many {t} remain?",
                "A shop has {a} {t} and sells {b}. How many {t} does it still have?",
                "Of {a} {t}, {b} are broken. How many {t} are not broken?",
            ),
            a=a, b=b, t=things,
        )  # fmt: skip
        answer = f"{a} - {b} = {result}, so {result} are left."
    verb = "add" if sign == "+" else "subtract"
    reasoning = f"I {verb}: {a} {sign} {b}.\n{steps(a, b, sign)}"
    return build(
        "arithmetic", rng, request, answer, reasoning, Check("last_number", str(result)), 0.7
    )
