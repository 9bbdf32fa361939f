"""Plain values into dataclass fields and back: types checked, unknown keys named with the nearest one."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from qkeel.errors import InvalidTypeError, InvalidValueError, check_known

T = TypeVar("T")
_MOST = 1 << 53
# An object as JSON and TOML have it: plain values by name, nested.
Json = dict[str, Any]


@functools.cache
def field_types(cls: type) -> Json:
    """The types of a dataclass's fields, resolved."""
    return typing.get_type_hints(cls)


def settle(config: object) -> None:
    """Checks the plain fields of a frozen dataclass against their types; whole numbers become floats where due."""
    for name, kind in field_types(type(config)).items():
        if not dataclasses.is_dataclass(kind):
            object.__setattr__(config, name, _plain(name, getattr(config, name), kind))


def _plain(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        check_known(f"value of {name}", value, choices)
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InvalidTypeError(f"expected {kind.__name__} as {name}, got {type(value).__name__} {value!r}")
    if kind is int and not -_MOST < value < _MOST:
        raise InvalidValueError(f"expected {name} between -2^53 and 2^53, which JSON holds exactly, got {value}")
    if isinstance(value, str) and value.encode("utf-8", "replace").decode("utf-8") != value:
        raise InvalidValueError(f"expected Unicode text as {name}, got {value!r}; rename what it names")
    return value


def read_fields(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Makes the dataclass `cls` of nested plain values; `where` names the table in errors."""
    if not isinstance(values, Mapping):
        raise InvalidTypeError(f"expected a table of {where or 'settings'}, got {values!r}")
    kinds = field_types(cls)
    arguments: Json = {}
    for key, value in values.items():
        check_known(f"key in [{where}]" if where else "key", key, kinds)
        nested = dataclasses.is_dataclass(kinds[key])
        arguments[key] = read_fields(kinds[key], value, f"{where}.{key}" if where else key) if nested else value
    return cls(**arguments)
