"""Which JSON schemas are taken, and which of them exactly.

Every schema is bounded and well formed before the grammar library sees it. A strict one must also
lie in the subset that the grammar enforces exactly, so that no output has to be refused afterwards.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 4096
MAX_PATTERN_LENGTH = 4096
# Optional or repeated groups multiply the ways to read a text: ten in a row cost half a second for
# every token, forty cost minutes.
MAX_REPEATED_GROUPS = 4
MAX_UNBOUNDED = 16

FORMATS = frozenset("date time date-time duration email hostname ipv4 ipv6 uri uuid".split())
_ANNOTATIONS = frozenset(
    "title description default examples $comment $schema $id deprecated readOnly writeOnly".split()
)
_DEFINITIONS = ("$defs", "definitions")
_NUMBER = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_KEYWORDS = {
    "string": frozenset(("pattern", "minLength", "maxLength", "format")),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "null": (type(None),),
}


class ConstraintError(ValueError):
    """A constraint that cannot be compiled. The message is short and safe to show to a client."""


def parse_json(text: str, what: str, limit: int = MAX_SCHEMA_BYTES) -> Any:
    """The value of bounded JSON text; raises `ConstraintError`."""
    size = len(text.encode("utf-8", errors="surrogatepass"))
    if size > limit:
        raise ConstraintError(f"{what} has {size} bytes; the limit is {limit}")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"{what} is not valid JSON: {str(error)[:100]}") from error


def check_schema(schema: Any, *, strict: bool, root_refs: bool = True) -> list[tuple[str, str]]:
    """Checks a schema; returns its patterns as (JSON path, regular expression).

    Args:
      strict: the root is an object schema, every object lists all of its properties as required and
        allows no others, and only keywords occur that the grammar enforces exactly.
      root_refs: whether `{"$ref": "#"}` is allowed.

    Raises:
      ConstraintError: naming the JSON path of the offending schema.
    """
    if strict and not (isinstance(schema, dict) and schema.get("type") == "object"):
        raise ConstraintError('$: a strict schema must have "type": "object" at its root')
    patterns: list[tuple[str, str]] = []
    todo = [("$", schema, 1)]
    seen = 0
    while todo:
        path, node, depth = todo.pop()
        seen += 1
        if seen > MAX_SCHEMA_NODES:
            raise ConstraintError(f"the schema has more than {MAX_SCHEMA_NODES} subschemas")
        if depth > MAX_SCHEMA_DEPTH:
            raise ConstraintError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
        if isinstance(node, bool):
            _need(node or not strict, path, "false allows no value")
            continue
        _need(isinstance(node, dict), path, "a schema must be an object or a boolean")
        _check_node(path, node)
        if "$ref" in node:
            _check_ref(path, node["$ref"], schema, root_refs)
        if strict:
            _check_strict(path, node)
        if "pattern" in node:
            patterns.append((path, node["pattern"]))
        todo += [(p, child, depth + 1) for p, child in _children(path, node)]
    return patterns


def check_pattern(path: str, pattern: str) -> None:
    """Bounds a regular expression; raises `ConstraintError`."""
    _need(len(pattern) <= MAX_PATTERN_LENGTH, path, f"pattern is over {MAX_PATTERN_LENGTH} long")
    groups = repeated_groups(pattern)
    _need(groups <= MAX_REPEATED_GROUPS, path, f"over {MAX_REPEATED_GROUPS} repeated groups")
    unbounded = len(re.findall(r"[*+]|\{\d+,\}", re.sub(r"\\.", "", pattern)))
    _need(unbounded <= MAX_UNBOUNDED, path, f"over {MAX_UNBOUNDED} unbounded repetitions")


def repeated_groups(pattern: str) -> int:
    """How many groups of a regular expression are optional or repeated."""
    return len(re.findall(r"\)[*+?{]", re.sub(r"\\.", "", pattern)))


def disjoint(branches: list[Any]) -> bool:
    """Whether no value can match two of these schemas, told by their types or a tag property."""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    kinds = [branch.get("type") for branch in branches]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return not {"integer", "number"} <= set(kinds)
    if any(kind != "object" for kind in kinds):
        return False
    return any(_tells_apart(branches, name) for name in branches[0].get("properties", {}))


def _tells_apart(branches: list[dict[str, Any]], name: str) -> bool:
    tags = []
    for branch in branches:
        schema = branch.get("properties", {}).get(name)
        if name not in branch.get("required", []) or not isinstance(schema, dict):
            return False
        if "const" in schema:
            tags.append(json.dumps(schema["const"], sort_keys=True))
        elif isinstance(schema.get("enum"), list) and len(schema["enum"]) == 1:
            tags.append(json.dumps(schema["enum"][0], sort_keys=True))
        else:
            return False
    return len(set(tags)) == len(tags)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _need(condition: bool, path: str, message: str) -> None:
    if not condition:
        shown = path if len(path) <= 200 else path[:197] + "..."
        raise ConstraintError(f"{shown}: {message}")


def _children(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _ONE:
        # `false` here forbids what is not listed; elsewhere it would allow no value at all.
        if not isinstance(node.get(key, False), bool):
            yield f"{path}.{key}", node[key]
    for key in _LISTS:
        for n, child in enumerate(node.get(key, ())):
            yield f"{path}.{key}[{n}]", child
    for key in _MAPS:
        for name, child in node.get(key, {}).items():
            yield f"{path}.{key}.{name}", child


def _types(node: dict[str, Any]) -> list[str]:
    kind = node.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def _check_node(path: str, node: dict[str, Any]) -> None:
    """What is malformed in any mode."""
    for kind in _types(node):
        _need(isinstance(kind, str) and kind in _KEYWORDS, path, f"unknown type {kind!r:.40}")
    for key in _LISTS:
        _need(
            isinstance(node.get(key, [0]), list) and node.get(key) != [], path, f"{key} must list"
        )
    for key in (*_MAPS,):
        _need(isinstance(node.get(key, {}), dict), path, f"{key} must be an object")
    values = node.get("enum", [0])
    _need(isinstance(values, list) and values != [], path, "enum must list at least one value")
    required = node.get("required", [])
    _need(
        isinstance(required, list) and all(isinstance(name, str) for name in required),
        path,
        "required must be a list of names",
    )
    pattern = node.get("pattern", "")
    _need(isinstance(pattern, str), path, "pattern must be a string")
    check_pattern(path, pattern)


def _check_ref(path: str, ref: Any, root: Any, root_refs: bool) -> None:
    if ref == "#":
        _need(root_refs, path, "a reference to the root cannot be enforced here")
        return
    _need(isinstance(ref, str), path, "$ref must be a string")
    parts = ref.split("/")
    _need(
        len(parts) == 3 and parts[0] == "#" and parts[1] in _DEFINITIONS,
        path,
        'only references to "#", "#/$defs/NAME" and "#/definitions/NAME" are supported',
    )
    _need(parts[2] in root.get(parts[1], {}), path, f"there is no {ref[:80]}")


def _check_strict(path: str, node: dict[str, Any]) -> None:
    """What the grammar would not enforce exactly."""
    keys = set(node) - _ANNOTATIONS - set(_DEFINITIONS)
    for single in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
        if single in keys:
            allowed = {"type"} if single in ("const", "enum") else set()
            extra = sorted(keys - {single} - allowed)
            _need(not extra, path, f"{single} cannot be combined with {extra[:1]}")
            _check_combination(path, node, single)
            return
    known = frozenset[str]().union(*(_KEYWORDS[kind] for kind in _types(node)))
    unknown = sorted(keys - {"type"} - known)
    if unknown:
        _need(
            False, path, f"the keyword {unknown[0]!r:.40} is not supported by strict schemas here"
        )
    if "object" in _types(node):
        _check_object(path, node)
    lengths = {"minLength", "maxLength", "format"} & keys
    _need("pattern" not in keys or not lengths, path, "pattern excludes other string keywords")
    _need("format" not in keys or len(lengths) == 1, path, "format excludes minLength, maxLength")
    if "format" in keys:
        _need(
            node["format"] in FORMATS, path, f"the format {node['format']!r:.40} is not supported"
        )


def _check_combination(path: str, node: dict[str, Any], keyword: str) -> None:
    if keyword == "allOf":
        _need(len(node["allOf"]) == 1, path, "allOf of several schemas is not supported")
    if keyword == "oneOf":
        _need(disjoint(node["oneOf"]), path, "oneOf branches may overlap; use anyOf")
    if keyword in ("const", "enum") and "type" in node:
        values = node["enum"] if keyword == "enum" else [node["const"]]
        fits = all(any(_is_type(value, kind) for kind in _types(node)) for value in values)
        _need(fits, path, f"{keyword} has a value of another type")


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES[kind])


def _check_object(path: str, node: dict[str, Any]) -> None:
    _need("properties" in node, path, "a strict object must have properties")
    _need(
        node.get("additionalProperties") is False,
        path,
        'a strict object must have "additionalProperties": false',
    )
    required = node.get("required", [])
    _need(
        sorted(required) == sorted(node["properties"]),
        path,
        "required must list every property once",
    )
