"""What an example is, how its answer is scored, and small helpers of the generators."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Check:
    """How a reply is scored.

    Attributes:
      kind: "equals" (the text, blanks around it dropped), "contains", "numbers" (all numbers of the
        text, in order), "last_number", "json" (the shape: keys and types), "calls" (tools and
        arguments, in any order), or "open" for talk that has no one right answer.
      value: the text, the numbers as strings, the JSON value, or the calls as
        `[{"name": str, "arguments": dict}]`.
    """

    kind: str
    value: Any = None


@dataclass(frozen=True)
class Example:
    """One conversation.

    Attributes:
      messages: in the words of Chat Completions; the last one is the assistant's answer, with
        `reasoning_content` when thinking and `tool_calls` when it calls.
      tools: functions offered, in the words of Chat Completions.
      response_format: as in Chat Completions.
      check: how an answer to `prompt` is scored.
    """

    task: str
    messages: list[dict[str, Any]]
    thinking: bool
    check: Check
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages up to the answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> dict[str, Any]:
        """The assistant's last message."""
        return self.messages[-1]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The answer's calls as `Check("calls")` has them."""
        return calls_of(self.answer)


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Calls of an assistant's message as `Check("calls")` has them."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]


def score(example: Example, reply: str, calls: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether a reply is right.

    Args:
      reply: the content, without the reasoning.
      calls: tool calls, each with `name` and `arguments` (a parsed object).

    Raises:
      ValueError: for an example whose answer is open.
    """
    kind, value = example.check.kind, example.check.value
    if kind == "open":
        raise ValueError(f"an example of the task {example.task} has no one right answer")
    if kind == "calls":
        return _sorted(calls) == _sorted(value)
    if calls:
        return False
    if kind == "json":
        return same_shape(_parsed(reply), value)
    if kind == "numbers":
        return _NUMBER.findall(reply) == value
    if kind == "last_number":
        return _NUMBER.findall(reply)[-1:] == [value]
    if kind == "contains":
        return value.lower() in reply.lower()
    return bool(reply.strip() == value)


def same_values(example: Example, reply: str) -> bool:
    """The stricter score of a JSON example: every value as asked, not the shape alone."""
    value = _parsed(reply)
    return type(value) is type(example.check.value) and bool(value == example.check.value)


def same_shape(value: Any, wanted: Any) -> bool:
    """Whether a value has the keys and the types of another; lists may differ in length."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            return False
        return all(same_shape(value[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and all(same_shape(v, w) for v in value for w in wanted[:1])
    if isinstance(wanted, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(wanted)


def _parsed(reply: str) -> Any:
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return ...  # equal to nothing that JSON can spell


def _sorted(calls: Sequence[dict[str, Any]]) -> list[str]:
    named = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return sorted(json.dumps(call, sort_keys=True) for call in named)


def pick(rng: random.Random, *options: T) -> T:
    """One of the arguments."""
    return options[rng.randrange(len(options))]


def fill(rng: random.Random, templates: Sequence[str], **values: Any) -> str:
    """One of the templates with its fields filled in."""
    return rng.choice(templates).format(**values)


def casual(rng: random.Random, text: str) -> str:
    """A request as people type it: now and then without a capital, with "please", with no stop."""
    roll = rng.random()
    if roll < 0.2:
        text = text[0].lower() + text[1:]
    elif roll < 0.3:
        text = f"Please {text[0].lower()}{text[1:]}"
    elif roll < 0.36:
        text = f"Can you {text[0].lower()}{text[1:].rstrip('.')}?"
    if rng.random() < 0.25 and text.endswith("."):
        text = text[:-1]
    return text


def build(
    task: str,
    rng: random.Random,
    request: str | list[dict[str, Any]],
    answer: str,
    reasoning: str,
    check: Check,
    thinking: float | bool = 0.5,
    response_format: dict[str, Any] | None = None,
) -> Example:
    """An example without tools.

    Args:
      request: the user's text, or all messages before the answer.
      thinking: the probability of it.
    """
    history = [user(request)] if isinstance(request, str) else request
    thinks = rng.random() < thinking
    final = assistant(answer, reasoning if thinks else None)
    return Example(task, [*history, final], thinks, check, None, response_format)


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(
    text: str, reasoning: str | None = None, calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
