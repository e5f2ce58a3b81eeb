"""Calls of offered tools, answers from their results, and no call where no tool fits."""

import json
import random
from dataclasses import dataclass
from typing import Any

from ds41jax.training.tasks.chat_facts import GREETINGS, HELLO
from ds41jax.training.tasks.example import Check, Example, assistant, calls_of, fill, pick, user
from ds41jax.training.tasks.tool_specs import (
    COMPOSED,
    SPECS,
    Parameter,
    composed_words,
    odd_parameter,
)

_DONE = "Done."
_NONE = "None of my tools can do that. I can use {names}."


@dataclass(frozen=True)
class Offer:
    """A tool as offered, a request that it fits, and what comes of it."""

    function: dict[str, Any]
    request: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    reply: str

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.function["name"])


def tools(rng: random.Random) -> Example:
    """Scored on the calls, names and arguments; on the reply where the result is at hand."""
    offers = _offers(rng, rng.randint(1, 4))
    kind = rng.choices(("call", "result", "parallel", "none", "talk"), (55, 18, 9, 12, 6))[0]
    if kind == "none":
        spare = offers.pop() if len(offers) > 1 else _other(rng, offers)
        reply = _NONE.format(names=", ".join(offer.name for offer in offers))
        reasoning = f"The request needs another tool than {', '.join(o.name for o in offers)}."
        return _example(rng, offers, [user(spare.request)], assistant(reply, reasoning))
    if kind == "talk":
        request, reply = rng.choice(GREETINGS), rng.choice(HELLO)
        final = assistant(reply, "This is a greeting. No tool is needed.")
        return _example(rng, offers, [user(request)], final)
    used = offers[: 2 if kind == "parallel" and len(offers) > 1 else 1]
    text = used[0].request
    if len(used) == 2:
        joint = pick(rng, " Also: ", " And then: ", "\n", " ")
        text = f"{text}{joint}{used[1].request}"
    reasoning = " ".join(_reason(offer) for offer in used)
    calls = [_call(i, offer) for i, offer in enumerate(used)]
    history = [user(text)]
    call = assistant("", reasoning, calls)
    if kind != "result":
        return _example(rng, offers, history, call)
    return _answered(rng, offers, used[0], history, call)


def _answered(
    rng: random.Random,
    offers: list[Offer],
    used: Offer,
    history: list[dict[str, Any]],
    call: dict[str, Any],
) -> Example:
    """The turn behind the tool's result."""
    result = {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": json.dumps(used.result),
    }
    final = assistant(used.reply, f"{used.name} gave {json.dumps(used.result)}.")
    return _example(rng, offers, [*history, call, result], final, Check("equals", used.reply))


def _example(
    rng: random.Random,
    offers: list[Offer],
    history: list[dict[str, Any]],
    final: dict[str, Any],
    check: Check | None = None,
) -> Example:
    thinking = rng.random() < 0.5
    if not thinking:
        final.pop("reasoning_content", None)
    if rng.random() < 0.15:
        system = pick(rng, "You are a helpful assistant.", "Use the tools where they fit.")
        history = [{"role": "system", "content": system}, *history]
    listed = [{"type": "function", "function": offer.function} for offer in offers]
    rng.shuffle(listed)
    check = check or Check("calls", calls_of(final))
    return Example("tools", [*history, final], thinking, check, listed)


def _reason(offer: Offer) -> str:
    values = ", ".join(f"{key} = {json.dumps(v)}" for key, v in offer.arguments.items())
    return f"The tool {offer.name} fits: {values}."


def _call(index: int, offer: Offer) -> dict[str, Any]:
    arguments = json.dumps(offer.arguments, ensure_ascii=False)
    function = {"name": offer.name, "arguments": arguments}
    return {"id": f"call_{index}", "type": "function", "function": function}


def _offers(rng: random.Random, count: int) -> list[Offer]:
    """Tools whose names and purposes differ."""
    offers: list[Offer] = []
    while len(offers) < count:
        offers.append(_other(rng, offers))
    return offers


def _other(rng: random.Random, offers: list[Offer]) -> Offer:
    """A tool that is not among the offered ones."""
    while True:
        offer = _everyday(rng) if rng.random() < 0.45 else _composed(rng)
        about = offer.function["description"]
        if all(offer.name != o.name and about != o.function["description"] for o in offers):
            return offer


def _everyday(rng: random.Random) -> Offer:
    spec = rng.choice(SPECS)
    request = rng.choice(spec.requests)
    values = [parameter.draw(rng) for parameter in spec.parameters]
    said = [f"{{{i}}}" in request for i in range(len(values))]
    always = [all(f"{{{i}}}" in r for r in spec.requests) for i in range(len(values))]
    style = rng.randrange(3)  # the same for all, so that "x" goes with "y"
    names = [p.names[style % len(p.names)] for p in spec.parameters]
    arguments = {n: v for n, v, used in zip(names, values, said, strict=True) if used}
    result = {key: draw(rng) for key, draw in spec.result.items()}
    function = _function(
        rng.choice(spec.names), spec.about, list(zip(names, spec.parameters, always, strict=True))
    )
    reply = spec.reply.format(*values, **result)
    return Offer(function, request.format(*values), arguments, result, reply[0].upper() + reply[1:])


def _composed(rng: random.Random) -> Offer:
    verb, noun = composed_words(rng)
    chosen = rng.sample(COMPOSED, rng.randint(1, 3))
    if rng.random() < 0.3:
        chosen[-1] = odd_parameter(rng)
    names = [rng.choice(parameter.names) for parameter, _ in chosen]
    if len(set(names)) < len(names):
        return _composed(rng)
    values = [parameter.draw(rng) for parameter, _ in chosen]
    phrases = [rng.choice(said).format(v) for (_, said), v in zip(chosen, values, strict=True)]
    request = fill(
        rng,
        ("{v} the {n} {p}.", "{v} the {n} {p}", "Please {w} the {n} {p}.", "{v} {n} {p}.",
         "I want to {w} the {n} {p}.", "Could you {w} the {n} {p}?"),
        v=verb.capitalize(), w=verb, n=noun, p=" ".join(phrases),
    )  # fmt: skip
    name = pick(rng, f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}-{noun}")
    spelled = [(n, parameter, True) for n, (parameter, _) in zip(names, chosen, strict=True)]
    function = _function(name, f"{verb.capitalize()} the {noun}.", spelled)
    arguments = dict(zip(names, values, strict=True))
    return Offer(function, request, arguments, {"ok": True}, _DONE)


def _function(
    name: str, about: str, parameters: list[tuple[str, Parameter, bool]]
) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for spelled, parameter, _ in parameters:
        properties[spelled] = {"type": parameter.type, "description": parameter.about}
        if parameter.choices:
            properties[spelled]["enum"] = list(parameter.choices)
    required = [spelled for spelled, _, always in parameters if always]
    shape = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": about, "parameters": shape}
