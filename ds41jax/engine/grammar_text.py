"""Strings that a tool call gives as plain text: their schema as a regular expression.

The text has no quotes and no escapes, and ends where the closing tag begins. So that this end is
never in doubt, no expression here matches `MARKER`, which stands for the marker token.
"""

import re
from typing import Any

from ds41jax.engine.constraints import MARKER
from ds41jax.engine.grammar_schema import ConstraintError

TEXT: dict[str, Any] = {"type": "regex", "pattern": f"[^{MARKER}]*"}

_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9\-]+(\.[A-Za-z0-9\-]+)+",
    "ipv4": rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
# One escape, one character class, or one other character.
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_OPEN = {".": f"[^\\n\\r{MARKER}]", r"\D": f"[^0-9{MARKER}]", r"\W": f"[^A-Za-z0-9_{MARKER}]"}
_OPEN[r"\S"] = f"[^ \\t\\n\\r\\f\\v\\u00a0\\u2028\\u2029\\ufeff{MARKER}]"


def string_text(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The structural format of a string given as plain text."""
    if "pattern" in schema:
        return {"type": "regex", "pattern": without_marker(schema["pattern"])}
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ConstraintError(
                f"{path}: the format {schema['format']!r:.40} is not supported for plain text"
            )
        return {"type": "regex", "pattern": _FORMATS[schema["format"]]}
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least == 0 and most is None:
        return TEXT
    count = f"{{{least},{'' if most is None else most}}}"
    return {"type": "regex", "pattern": f"[^{MARKER}]{count}"}


def without_marker(pattern: str) -> str:
    """The same regular expression, made not to match the marker."""
    if MARKER in pattern:
        raise ConstraintError("a pattern has a control character")
    return "".join(_piece_without_marker(piece) for piece in _PIECE.findall(pattern))


def _piece_without_marker(piece: str) -> str:
    if piece.startswith("[") and len(piece) > 1:
        if re.search(r"(?<!\\)(?:\\\\)*\\[DWS]", piece):
            raise ConstraintError(r"\D, \W and \S inside brackets are not supported in tool calls")
        return f"[^{MARKER}{piece[2:]}" if piece.startswith("[^") else piece
    return _OPEN.get(piece, piece)
