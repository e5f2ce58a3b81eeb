"""The answer's format: read from a request, made a constraint, and checked again at the end."""

import json
from typing import Any

import jsonschema_rs

from ds41jax.engine.constraints import Constraint
from ds41jax.engine.grammar_schema import MAX_SCHEMA_BYTES, ConstraintError, check_schema
from ds41jax.engine.grammar_tools import tool_constraint
from ds41jax.serving.conversation import AnswerFormat, Prompt, ToolChoice
from ds41jax.serving.errors import invalid

MAX_PATTERN = 4096
_UNGUIDED = "this server runs without the grammar library xgrammar, which that needs."
_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "regex": {"type", "regex"},
}


def read_response_format(value: dict[str, Any] | None, param: str) -> AnswerFormat:
    """Chat Completions' `response_format`; raises `ApiError`."""
    if value is None:
        return AnswerFormat()
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise invalid(f"{param}.type", f"{param}.type must be one of {', '.join(_KEYS)}.")
    unknown = sorted(set(value) - _KEYS[kind])
    if unknown:
        name = f"{param}.{unknown[0]}"
        raise invalid(name, f"{name}: unknown field.", "unknown_field")
    if kind == "json_schema":
        return read_schema(value.get("json_schema"), f"{param}.json_schema")
    if kind == "regex":
        return _pattern(value.get("regex"), f"{param}.regex")
    return AnswerFormat(kind, param=param)


def read_schema(value: Any, param: str) -> AnswerFormat:
    """An object with `name`, `schema` and `strict`, as Chat Completions has it."""
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object.")
    unknown = sorted(set(value) - {"name", "description", "schema", "strict"})
    if unknown:
        name = f"{param}.{unknown[0]}"
        raise invalid(name, f"{name}: unknown field.", "unknown_field")
    schema, strict = value.get("schema"), value.get("strict")
    if not isinstance(schema, dict):
        raise invalid(f"{param}.schema", f"{param}.schema must be an object.")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{param}.strict", f"{param}.strict must be a boolean.")
    check(schema, bool(strict), f"{param}.schema")
    return AnswerFormat("json_schema", schema, strict=bool(strict), param=f"{param}.schema")


def _pattern(value: Any, param: str) -> AnswerFormat:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_PATTERN:
        raise invalid(param, f"{param} must be a string of 1 to {MAX_PATTERN} characters.")
    return AnswerFormat("regex", pattern=value, param=param)


def check(schema: Any, strict: bool, param: str) -> None:
    """Refuses a schema that is too large, malformed, or strict and outside the strict subset."""
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise invalid(param, f"{param} is larger than {MAX_SCHEMA_BYTES} bytes.", "too_large")
    try:
        check_schema(schema, strict=strict)
        _validator(schema)
    except (ConstraintError, jsonschema_rs.ValidationError, ValueError) as error:
        raise invalid(
            param, f"{param}: {str(error).splitlines()[0][:300]}", "invalid_schema"
        ) from error


def constraint_of(
    prompt: Prompt, choice: ToolChoice, answer: AnswerFormat, guided: bool
) -> Constraint | None:
    """What the engine is to enforce for a conversation; raises `ApiError`.

    Args:
      guided: whether it can; without, tools that are merely offered go without a grammar.
    """
    response = response_constraint(answer, prompt.thinking, guided)
    if not prompt.tools:
        return response
    strict = any(tool["function"]["strict"] for tool in prompt.tools)
    needed = choice.mode == "required" or response is not None or not choice.parallel or strict
    if not needed and not (choice.assisted and guided):
        return None
    if not guided:
        raise invalid("tools", f"strict, required or single calls: {_UNGUIDED}", "unguided")
    wanted: Any = choice.mode
    try:
        return tool_constraint(
            prompt.tools,
            wanted,
            parallel=choice.parallel,
            thinking=prompt.thinking,
            block_open=prompt.start == "tool_block",
            response=response,
        )
    except ConstraintError as error:
        raise invalid("tools", str(error), "invalid_schema") from error


def response_constraint(answer: AnswerFormat, thinking: bool, guided: bool) -> Constraint | None:
    """The constraint of an answer that calls no tool; None for free text. Raises `ApiError`."""
    if answer.kind == "text":
        return None
    if not guided:
        raise invalid(answer.param, f"{answer.param}: {_UNGUIDED}", "unguided")
    source = {"json_schema": json.dumps(answer.schema), "regex": answer.pattern}.get(
        answer.kind, ""
    )
    strict = answer.kind != "json_schema" or answer.strict
    return Constraint(answer.kind, source, strict=strict, after_thinking=thinking)


def complaint(answer: AnswerFormat, content: str) -> str | None:
    """Why finished content does not have the format asked for; None if it does.

    The grammar does not enforce every keyword of a schema that is not strict.
    """
    if answer.kind not in ("json_object", "json_schema"):
        return None
    try:
        value = json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "The model's answer is not the JSON that was asked for."
    if answer.kind == "json_object":
        return None if isinstance(value, dict) else "The model's answer is not a JSON object."
    if _validator(answer.schema).is_valid(value):
        return None
    return "The model's answer does not match the schema."


def _validator(schema: Any) -> Any:
    """Regular expressions in it run in linear time, and references reach nothing outside it."""
    return jsonschema_rs.validator_for(
        schema,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=1 << 20),
        retriever=_no_retrieval,
    )


def _no_retrieval(uri: str) -> Any:
    raise ValueError("references to other documents are not supported")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
