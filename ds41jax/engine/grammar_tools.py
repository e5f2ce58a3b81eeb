"""The grammar of tool calls in DeepSeek-V4.1's markup, as a structural tag for xgrammar.

xgrammar's own tag for this model spells the marker of the markup out, so that ordinary tokens which
spell it would do as well; the parser takes only the real token. Here `MARKER`, a control character
that the compiler's vocabulary gives to that token alone, stands for it. Values can therefore not
contain the marker, white space between tags is what the model was trained on, and arguments that
are given as plain text are held to their schema too.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from ds41jax.engine.constraints import MARKER, Constraint
from ds41jax.engine.grammar_schema import ConstraintError, check_schema, disjoint, parse_json
from ds41jax.engine.grammar_text import TEXT, string_text, without_marker

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 4 << 20
# Some hosts prefix a namespace: "namespace::name".
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(::[A-Za-z0-9_-]{1,64})?")
_NOT_TEXT = ["number", "boolean", "null", "array", "object"]
_BLOCK_BEGIN, _BLOCK_END = f"<{MARKER} calls>\n", f"</{MARKER} calls>"
_PARAMETER, _PARAMETER_END = f'<{MARKER} parameter name="', f"</{MARKER} parameter>\n"
_AS_TEXT, _AS_JSON = '" string="true">', '" string="false">'

Format = dict[str, Any]


def tool_constraint(
    tools: Sequence[dict[str, Any]],
    tool_choice: str | dict[str, Any] = "auto",
    *,
    parallel: bool = True,
    thinking: bool = False,
    block_open: bool = False,
    response: Constraint | None = None,
) -> Constraint | None:
    """What an answer may look like when tools are offered.

    Args:
      tools: functions in the shape of Chat Completions. The arguments of a function with
        `"strict": true` follow its schema exactly; of the others only the markup is held.
      tool_choice: "none", "auto" (text, or text and a block of calls), "required" (a block), or
        {"type": "function", "function": {"name": ...}} (a block that calls this one).
      parallel: allow several calls in the block.
      thinking: the grammar begins after the thinking block, in which no call may stand.
      block_open: the prompt ends with the opening line of the block, as it does for "required" and
        named functions without thinking.
      response: what the answer must look like if it does not call a tool.

    Returns:
      The constraint; None if nothing is constrained.

    Raises:
      ConstraintError: naming the tool and the JSON path of what cannot be enforced.
    """
    choice, offered = _chosen(tools, tool_choice)
    if choice == "none":
        return response
    calls = _calls([_invoke(tool) for tool in offered], parallel)
    end = _const(_BLOCK_END)
    if block_open:
        if choice != "required":
            raise ConstraintError("only a required block of calls can be opened by the prompt")
        root = _sequence(calls, end)
    elif choice == "required":
        root = _sequence(_const("\n\n" + _BLOCK_BEGIN), calls, end)
    elif response is not None:
        block = _sequence(_const("\n\n" + _BLOCK_BEGIN), calls, end)
        root = {"type": "or", "elements": [_response(response), block]}
    else:
        tag = {"type": "tag", "begin": _BLOCK_BEGIN, "content": calls, "end": _BLOCK_END}
        # Any other markup after "<" and the marker would reach the parser as a call, so the trigger
        # is no longer than that. After the block the answer is over.
        root = {
            "type": "triggered_tags",
            "triggers": [f"<{MARKER}"],
            "tags": [tag],
            "stop_after_first": True,
        }
    source = json.dumps({"type": "structural_tag", "format": root}, ensure_ascii=False)
    return Constraint("structural_tag", source, after_thinking=thinking)


def _chosen(
    tools: Sequence[dict[str, Any]], tool_choice: str | dict[str, Any]
) -> tuple[str, list[dict[str, Any]]]:
    """("none", "auto" or "required", the functions that may be called)."""
    if tool_choice == "none" or (tool_choice == "auto" and not tools):
        return "none", []
    if len(tools) > MAX_TOOLS:
        raise ConstraintError(f"{len(tools)} tools are offered; the limit is {MAX_TOOLS}")
    if len(json.dumps(list(tools))) > MAX_TOOLS_BYTES:
        raise ConstraintError(f"the tools are larger than {MAX_TOOLS_BYTES} bytes together")
    functions = [_function(n, tool) for n, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) != len(names):
        raise ConstraintError("two tools have the same name")
    if isinstance(tool_choice, dict):
        wanted = tool_choice.get("function")
        name = wanted.get("name") if isinstance(wanted, dict) else None
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise ConstraintError("tool_choice names a function that is not offered")
        return "required", functions
    if tool_choice not in ("auto", "required"):
        raise ConstraintError('tool_choice must be "none", "auto", "required" or a function')
    if not functions:
        raise ConstraintError(f'tool_choice "{tool_choice}" needs tools')
    return tool_choice, functions


def _function(n: int, tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise ConstraintError(f"tools[{n}]: only functions are supported")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConstraintError(f"tools[{n}]: the name must match [A-Za-z0-9_-]{{1,64}}")
    return function


def _invoke(function: dict[str, Any]) -> Format:
    name, schema = function["name"], function.get("parameters")
    try:
        if function.get("strict") is True and schema is not None:
            parameters = _strict_parameters(schema)
        else:
            parameters = _any_parameters()
    except ConstraintError as error:
        raise ConstraintError(f"tool {name}: {error}") from error
    begin = f'<{MARKER} invoke name="{name}">\n'
    return {"type": "tag", "begin": begin, "content": parameters, "end": f"</{MARKER} invoke>\n"}


def _calls(invokes: list[Format], parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": invokes,
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _any_parameters() -> Format:
    name = {"type": "regex", "pattern": rf'[^"\n{MARKER}]+'}
    value = _or(
        _sequence(_const(_AS_TEXT), TEXT),
        _sequence(_const(_AS_JSON), _json({"type": _NOT_TEXT})),
    )
    one = _sequence(_const(_PARAMETER), name, value, _const(_PARAMETER_END))
    return _or(_const("\n"), {"type": "plus", "content": one})


def _strict_parameters(schema: Any) -> Format:
    text = json.dumps(schema, ensure_ascii=False)
    check_schema(parse_json(text, "parameters"), strict=True, root_refs=False)
    lines = []
    for key, value in schema["properties"].items():
        if re.search(r'["\n\x00-\x1f]', key) or key == "":
            raise ConstraintError(
                "$.properties: a name is empty or has quotes or control characters"
            )
        texts: list[Format] = []
        others: list[Any] = []
        _split(f"$.properties.{key}", value, schema, texts, others, set())
        forms = [_sequence(_const(_AS_TEXT), _or(*texts))] if texts else []
        if others:
            forms.append(_sequence(_const(_AS_JSON), _json(_union(others, schema))))
        lines += [_const(_PARAMETER + key), _or(*forms), _const(_PARAMETER_END)]
    return _sequence(*lines) if lines else _const("\n")


def _split(
    path: str, schema: Any, root: Any, texts: list[Format], others: list[Any], seen: set[str]
) -> None:
    """Sorts what a schema allows into strings, as formats of raw text, and schemas of the rest."""
    if isinstance(schema, bool) or not set(schema) & {"$ref", "const", "enum", "type"}:
        branches = [] if isinstance(schema, bool) else _branches(schema)
        for n, branch in enumerate(branches):
            _split(f"{path}[{n}]", branch, root, texts, others, seen)
        if not branches:
            texts.append(TEXT)
            others.append({"type": _NOT_TEXT})
    elif "$ref" in schema:
        if schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            _, key, name = schema["$ref"].split("/")
            _split(path, root[key][name], root, texts, others, seen)
    elif "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        words = [value for value in values if isinstance(value, str)]
        if any(MARKER in word for word in words):
            raise ConstraintError(f"{path}: a string has a control character")
        texts += [_const(word) if word else {"type": "regex", "pattern": ""} for word in words]
        rest = [value for value in values if not isinstance(value, str)]
        others += [{"enum": rest}] if rest else []
    else:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if "string" in kinds:
            texts.append(string_text(path, schema))
        rest = [kind for kind in kinds if kind != "string"]
        others += [{**schema, "type": rest}] if rest else []


def _branches(schema: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for keyword in ("anyOf", "oneOf", "allOf"):
        found += schema.get(keyword, [])
    return found


def _union(schemas: list[Any], root: dict[str, Any]) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        key: root[key] for key in ("$defs", "definitions") if key in root
    }
    if len(schemas) == 1:
        return {**schemas[0], **definitions}
    return {("oneOf" if disjoint(schemas) else "anyOf"): schemas, **definitions}


def _response(constraint: Constraint) -> Format:
    if constraint.kind == "json_object":
        return _json({"type": "object"})
    if constraint.kind == "json_schema":
        schema = parse_json(constraint.source, "the schema")
        check_schema(schema, strict=constraint.strict)
        return _json(schema)
    if constraint.kind == "regex":
        return {"type": "regex", "pattern": without_marker(constraint.source)}
    raise ConstraintError(f"a response of kind {constraint.kind!r} cannot be combined with tools")


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}
