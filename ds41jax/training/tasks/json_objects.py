"""JSON of an asked shape, its values taken from the request."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds41jax.training.tasks.example import Check, Example, build, fill
from ds41jax.training.tasks.words import (
    ADJECTIVES,
    CITIES,
    COLOURS,
    DAYS,
    FRUITS,
    LANGUAGES,
    OBJECTS,
    PLAIN_WORDS,
    TOPICS,
    identifier,
    title,
)


@dataclass(frozen=True)
class Field:
    """A field of an object: its name, JSON type, and how a value is drawn."""

    name: str
    type: str
    draw: Callable[[random.Random], Any]

    @property
    def label(self) -> str:
        """The name in words."""
        return self.name.replace("_", " ")

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values."""
        if self.type == "array":
            return {"type": "array", "items": {"type": "string"}}
        return {"type": self.type}


def _text(name: str, draw: Callable[[random.Random], str]) -> Field:
    return Field(name, "string", draw)


def _whole(name: str, low: int, high: int) -> Field:
    return Field(name, "integer", lambda rng: rng.randint(low, high))


def _decimal(name: str, high: int) -> Field:
    return Field(name, "number", lambda rng: rng.randint(1, high * 20) / 20)


def _flag(name: str) -> Field:
    return Field(name, "boolean", lambda rng: rng.random() < 0.5)


def _several(name: str, words: list[str]) -> Field:
    return Field(name, "array", lambda rng: rng.sample(words, rng.randint(1, 4)))


def _date(rng: random.Random) -> str:
    return f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


_DOMAINS: dict[str, list[Field]] = {
    "product": [
        _text("name", title), _decimal("price", 500), _flag("in_stock"), _whole("quantity", 0, 500),
        _text("colour", lambda r: r.choice(COLOURS)), _several("tags", ADJECTIVES),
        _text("sku", identifier), _decimal("weight", 50),
    ],
    "book": [
        _text("title", title), _whole("pages", 40, 900), _whole("year", 1950, 2026),
        _text("language", lambda r: r.choice(LANGUAGES)), _flag("available"),
        _several("topics", TOPICS), _decimal("rating", 5),
    ],
    "city": [
        _text("name", lambda r: r.choice(CITIES)), _whole("population", 1000, 9000000),
        _decimal("area", 900), _flag("capital"), _text("language", lambda r: r.choice(LANGUAGES)),
    ],
    "meeting": [
        _text("title", title), _text("date", _date), _text("city", lambda r: r.choice(CITIES)),
        _whole("seats", 10, 900), _flag("public"), _text("day", lambda r: r.choice(DAYS)),
    ],
    "purchase": [
        _text("id", identifier), _several("items", FRUITS + OBJECTS), _decimal("total", 900),
        _flag("paid"), _text("date", _date), _whole("quantity", 1, 60),
    ],
    "sensor": [
        _text("id", identifier), _decimal("temperature", 60), _whole("humidity", 0, 100),
        _flag("active"), _text("room", lambda r: r.choice(("kitchen", "attic", "office", "hall"))),
        _text("unit", lambda r: r.choice(("celsius", "fahrenheit"))),
    ],
    "task": [
        _text("title", title), _flag("done"), _whole("priority", 1, 9), _text("due", _date),
        _several("tags", TOPICS), _text("status", lambda r: r.choice(("open", "closed", "late"))),
    ],
    "server": [
        _text("host", identifier), _whole("port", 1, 65535), _flag("secure"),
        _text("region", lambda r: r.choice(CITIES)), _whole("cores", 1, 128),
        _decimal("load", 20), _several("services", PLAIN_WORDS),
    ],
    "car": [
        _text("model", title), _text("color", lambda r: r.choice(COLOURS)), _whole("doors", 2, 5),
        _whole("year", 1980, 2026), _flag("electric"), _decimal("price", 900),
    ],
    "recipe": [
        _text("name", title), _several("ingredients", FRUITS), _whole("minutes", 5, 240),
        _flag("vegetarian"), _whole("servings", 1, 12),
    ],
}  # fmt: skip
_IN_WORDS = (
    "Write a JSON object with the fields {f}. {v}",
    "Write a JSON object for a {d} with the fields {f}. {v}",
    "Create a JSON object with {f}. {v}",
    "Return a JSON object with these keys: {f}. {v}",
    "Give me JSON with the keys {f}. {v}",
    "Make a JSON object describing a {d}: {f}. {v}",
    "I need a {d} as JSON with {f}. {v}",
    "{v} Write this as JSON with the fields {f}.",
    "Extract {f} as JSON from this text: {v}",
    "Convert to JSON with the keys {f}: {v}",
)
_BARE = (
    "Turn this into JSON: {v}",
    "Write this {d} as a JSON object: {v}",
    "Convert this to JSON. {v}",
    "As JSON, please: {v}",
    "JSON for a {d}: {v}",
)
_SCHEMA = (
    "Return JSON that matches this schema:\n{s}\n{v}",
    "Schema: {s}\n\nWrite a {d} as JSON. {v}",
    "{v}\n\nAnswer with a JSON object of this schema:\n{s}",
    "Fill in this JSON schema: {s}\n{v}",
)
_FREE = (
    "Make up a JSON object for a {d} with the fields {f}.",
    "Write an example of a {d} as JSON with the fields {f}.",
    "Give me a sample JSON object with {f}.",
    "Write a JSON object with the keys {f}.",
    "Invent a {d}. Reply in JSON with {f}.",
)
_FORMATTED = ("Describe this {d} as JSON. {v}", "{v} Reply in JSON.", "A {d}: {v} Give it as JSON.")


def json_object(rng: random.Random) -> Example:
    """Scored on the shape of the reply; `same_values` scores the values too."""
    if rng.random() < 0.12:
        return _list(rng)
    domain = rng.choice(list(_DOMAINS))
    fields = rng.sample(_DOMAINS[domain], rng.randint(2, 5))
    if rng.random() < 0.25:
        fields[rng.randrange(len(fields))] = _odd_field(rng)
    value: dict[str, Any] = {field.name: field.draw(rng) for field in fields}
    text = _stated(rng, fields, value)
    kind = rng.choices(("words", "bare", "schema", "free", "formatted"), (42, 13, 15, 15, 15))[0]
    response_format: dict[str, Any] | None = None
    if kind == "words" and rng.random() < 0.2:
        value, names, text = _nested(rng, domain, fields, value, text)
        request = fill(rng, _IN_WORDS[:5], d=domain, f=names, v=text)
    elif kind == "words":
        request = fill(rng, _IN_WORDS, d=domain, f=_names(rng, fields), v=text)
    elif kind == "bare":
        request = fill(rng, _BARE, d=domain, v=text)
    elif kind == "schema":
        request = fill(rng, _SCHEMA, d=domain, s=json.dumps(_schema(fields)), v=text)
    elif kind == "free":
        request = fill(rng, _FREE, d=domain, f=_names(rng, fields, typed=0.8))
    else:
        request = fill(rng, _FORMATTED, d=domain, v=text)
        response_format = {"type": "json_object"}
        if rng.random() < 0.75:
            shape = {"name": domain, "schema": _schema(fields)}
            response_format |= {"type": "json_schema", "json_schema": shape}
    return _finished(rng, request, value, response_format, "made up" if kind == "free" else "given")


def _finished(
    rng: random.Random,
    request: str,
    value: Any,
    response_format: dict[str, Any] | None = None,
    origin: str = "given",
) -> Example:
    indent = 2 if rng.random() < 0.1 else None
    if indent:
        request += rng.choice((" Indent it.", " Pretty-print it.", " Use indentation."))
    elif rng.random() < 0.2:
        request += rng.choice((" Only the JSON.", " No other text.", " Reply with JSON only."))
    keys = ", ".join(value) if isinstance(value, dict) else "a list"
    source = "I copy the values from the request." if origin == "given" else "I make up the values."
    reasoning = f"The answer is JSON with {keys}. {source}"
    answer = json.dumps(value, indent=indent)
    check = Check("json", value)
    return build("json", rng, request, answer, reasoning, check, 0.4, response_format)


def _names(rng: random.Random, fields: list[Field], typed: float = 0.6) -> str:
    form = rng.choice(("{n} ({t})", "{n} ({t})", "{n}: {t}", "{n} as {t}"))
    with_type = rng.random() < typed
    quote = rng.choice(("", "", '"'))
    spelled = [
        form.format(n=f"{quote}{field.name}{quote}", t=field.type) if with_type
        else f"{quote}{field.name}{quote}"
        for field in fields
    ]  # fmt: skip
    if len(spelled) > 1 and rng.random() < 0.6:
        return ", ".join(spelled[:-1]) + " and " + spelled[-1]
    return ", ".join(spelled)


def _stated(rng: random.Random, fields: list[Field], value: dict[str, Any]) -> str:
    """The values in words, in the order of the fields."""
    words = []
    form = rng.choice(("{l}: {v}", "{l} = {v}", "{l} is {v}", "the {l} is {v}", "{n}: {v}"))
    for field in fields:
        said = value[field.name]
        if isinstance(said, bool):
            spelled = str(said).lower()
        elif isinstance(said, list):
            spelled = " and ".join(said) if form.endswith("is {v}") else " / ".join(said)
        else:
            spelled = str(said)
        if isinstance(said, list) and form.endswith("is {v}"):
            words.append(f"the {field.label} are {spelled}")
            continue
        words.append(form.format(l=field.label, n=field.name, v=spelled))
    joined = rng.choice((", ", "; ", ", ")).join(words)
    return joined[0].upper() + joined[1:] + "." if form.startswith("the") else joined + "."


def _schema(fields: list[Field]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {field.name: field.schema for field in fields},
        "required": [field.name for field in fields],
        "additionalProperties": False,
    }


def _odd_field(rng: random.Random) -> Field:
    """A field whose name is not known beforehand, so that names are copied, not remembered."""
    name = "_".join(rng.sample(PLAIN_WORDS, rng.randint(1, 2)))
    return rng.choice((_whole(name, 0, 999), _text(name, identifier), _flag(name)))


def _nested(
    rng: random.Random, domain: str, fields: list[Field], value: dict[str, Any], text: str
) -> tuple[dict[str, Any], str, str]:
    """The same object inside another one."""
    outer = rng.choice([field for field in _DOMAINS["purchase"] if field.name in ("id", "paid")])
    number = outer.draw(rng)
    inner = ", ".join(field.name for field in fields)
    names = f"{outer.name} ({outer.type}) and {domain} (object with {inner})"
    said = str(number).lower() if isinstance(number, bool) else number
    stated = f"{outer.name}: {said}. The {domain} has {text[0].lower()}{text[1:]}"
    return {outer.name: number, domain: value}, names, stated


def _list(rng: random.Random) -> Example:
    """A bare list of strings or numbers, or an object that holds one."""
    words = rng.sample(FRUITS + OBJECTS + COLOURS, rng.randint(2, 7))
    items: list[Any] = words
    if rng.random() < 0.3:
        items = [rng.randint(0, 999) for _ in words]
    said = ", ".join(map(str, items))
    templates: tuple[str, ...]
    if rng.random() < 0.6:
        templates = (
            "Write a JSON list of these: {x}",
            "Turn this into a JSON array: {x}",
            "JSON array with the elements {x}",
            "Give me {x} as a JSON list.",
        )
        return _finished(rng, fill(rng, templates, x=said), items)
    key = rng.choice(("items", "values", "words", "names", "entries", rng.choice(PLAIN_WORDS)))
    templates = (
        'Write a JSON object with the key "{k}" holding the list {x}.',
        "JSON object with one field {k}, a list: {x}",
        "Put these under the key {k} in a JSON object: {x}",
    )
    return _finished(rng, fill(rng, templates, k=key, x=said), {key: items})
