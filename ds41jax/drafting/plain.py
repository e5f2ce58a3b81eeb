"""Dataclasses of plain values to JSON values and back."""

import dataclasses
import typing
from typing import Any


def to_plain(value: Any) -> Any:
    """Dataclasses become objects, tuples lists, keys strings; numbers and strings stay."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Rebuilds a value of type `kind` (dataclass, list, tuple, dict or number) from JSON values.

    Raises:
      ValueError: naming the type that `plain` does not fit.
    """
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind)]
        if not isinstance(plain, dict) or sorted(plain) != sorted(names):
            raise ValueError(f"expected the fields {names} of {kind}, got {plain!r:.200}")
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{n: from_plain(hints[n], plain[n]) for n in names})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and isinstance(plain, dict):
        return {arguments[0](key): from_plain(arguments[1], v) for key, v in plain.items()}
    if origin in (list, tuple) and isinstance(plain, list):
        return origin(from_plain(arguments[0], item) for item in plain)
    is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
    if kind in (int, float) and is_number and (kind is float or isinstance(plain, int)):
        return kind(plain)
    raise ValueError(f"expected {kind}, got {plain!r:.200}")
