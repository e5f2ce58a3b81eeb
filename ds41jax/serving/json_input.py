"""JSON from outside: bounded in size, depth and number of values before anything reads it."""

from typing import Any

import msgspec

from ds41jax.serving.errors import ApiError, invalid

MAX_BODY_BYTES = 96 << 20
MAX_DEPTH = 100
MAX_VALUES = 1_000_000


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body.

    Raises:
      ApiError: 400 if it is not JSON, not an object, nested too deeply or holds too many values.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"The request body is not valid JSON: {error}"
        raise invalid(None, message, "invalid_json") from error
    except RecursionError as error:
        raise too_deep("The request body") from error
    if not isinstance(value, dict):
        raise invalid(None, "The request body must be a JSON object.", "invalid_json")
    check_bounds(value, "The request body", MAX_DEPTH, MAX_VALUES)
    return value


def too_deep(what: str) -> ApiError:
    """The refusal of JSON that is nested beyond the limit."""
    return invalid(None, f"{what} is nested more than {MAX_DEPTH} levels deep.", "too_deep")


def check_bounds(root: Any, what: str, max_depth: int, max_values: int) -> int:
    """Counts the values of a decoded document, level by level, so that depth costs no stack.

    Raises:
      ApiError: 400 beyond a limit.
    """
    count, level = 0, [root]
    for depth in range(max_depth + 2):
        count += len(level)
        if not level:
            return count
        if depth > max_depth:
            raise invalid(None, f"{what} is nested more than {max_depth} levels deep.", "too_deep")
        if count > max_values:
            raise invalid(None, f"{what} holds more than {max_values} values.", "too_large")
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                children.extend(value.values())
            elif isinstance(value, list):
                children.extend(value)
        level = children
    return count
