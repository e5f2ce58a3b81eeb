"""Short Python functions written on request, and lines of code explained."""

import random

from ds41jax.training.tasks.code_samples import FUNCTIONS, LINES, VALUES, WITH_NUMBER
from ds41jax.training.tasks.example import Check, Example, build, casual, fill
from ds41jax.training.tasks.words import NOUNS, PLAIN_WORDS, VERBS

_WRITE = (
    "Write a function that {d}.",
    "Write a Python function that {d}.",
    "Write Python code for a function that {d}.",
    "Show me a Python function that {d}.",
    "Give me a function that {d} in Python.",
    "I need a function that {d}.",
    "How do I write a function that {d} in Python?",
    "Define a function that {d}.",
    "python function that {d}",
)
_WRITE_NAMED = (
    "Write a function called {n} that {d}.",
    "Write a Python function {n} that {d}.",
    "Define a function {n}({p}) that {d}.",
    "Implement {n}({p}), a function that {d}.",
)
_EXPLAIN = (
    "What does this line do? {x}",
    "Explain this line of Python: {x}",
    "What does `{x}` do?",
    "Explain: {x}",
    "What is the meaning of this code? {x}",
    "Explain this code:\n```python\n{x}\n```",
)
_VALUE = (
    "What is the value of {x} in Python?",
    "What does {x} give in Python?",
    "What does print({x}) show?",
    "Evaluate {x}",
)
_NAMES = "x y total count items names values data result text line index size number words".split()


def code(rng: random.Random) -> Example:
    """Scored on the exact code, explanation or value."""
    kind = rng.choices(("write", "number", "explain", "value"), (50, 15, 25, 10))[0]
    if kind == "explain":
        return _explained(rng)
    if kind == "value":
        return _evaluated(rng)
    if kind == "write":
        name, parameters, meanings, body = rng.choice(FUNCTIONS)
        does = rng.choice(meanings)
    else:
        number = rng.randint(2, 99)
        name, parameters, does, body = (t.format(n=number) for t in rng.choice(WITH_NUMBER))
    named = rng.random() < 0.35
    if named and rng.random() < 0.5:
        name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    request = casual(
        rng, fill(rng, _WRITE_NAMED if named else _WRITE, d=does, n=name, p=parameters)
    )
    answer = f"```python\n{written(name, parameters, body)}\n```"
    arguments = f"takes {parameters}" if parameters else "takes nothing"
    reasoning = f"The function {name} {arguments} and {does}."
    return build("code", rng, request, answer, reasoning, Check("equals", answer))


def written(name: str, parameters: str, body: str) -> str:
    """Source of a function."""
    lines = [f"    {line}" for line in body.split("\n")]
    text = "\n".join([f"def {name}({parameters}):", *lines])
    return f"import json\n\n\n{text}" if "json." in body else text


def _explained(rng: random.Random) -> Example:
    line, meaning = rng.choice(LINES)
    a, b = rng.sample(_NAMES, 2)
    n, word = rng.randint(2, 100), rng.choice(PLAIN_WORDS)
    values = {"a": a, "b": b, "n": n, "m": n - 1, "w": word, "c": word.capitalize()}
    request = fill(rng, _EXPLAIN, x=line.format(**values))
    answer = meaning.format(**values)
    return build("code", rng, request, answer, "I read the line.", Check("equals", answer))


def _evaluated(rng: random.Random) -> Example:
    expression, value = rng.choice(VALUES)
    a, b, word = rng.randint(0, 20), rng.randint(0, 20), rng.choice(PLAIN_WORDS)
    request = fill(rng, _VALUE, x=expression.format(a=a, b=b, w=word))
    answer = str(value(a, b, word))
    return build("code", rng, request, answer, "I evaluate it.", Check("equals", answer))
