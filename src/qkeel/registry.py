"""Names to things: literal tables, spec strings, and errors that name the nearest entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from qkeel.errors import InvalidTypeError, InvalidValueError, check_known

T = TypeVar("T")


def lookup(kind: str, table: Mapping[str, T], name: str) -> T:
    """`table[name]`, or an UnknownNameError with the nearest names."""
    check_known(kind, name, table)
    return table[name]


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe(Generic[T]):
    """A row of a table: one line of what it is, its source, and the function that makes it from its own options."""

    line: str
    source: str
    build: Callable[..., T]


def described(table: Mapping[str, Recipe[T]]) -> dict[str, str]:
    """The names of a table, each with one line and its source."""
    return {name: f"{row.line} [{row.source}]" for name, row in table.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One `name:key=value,key=value` of a spec string."""

    name: str
    options: dict[str, bool | int | float | str]

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{k}={_show(v)}" for k, v in sorted(self.options.items()))


def parse(text: str) -> tuple[Term, ...]:
    """Read a spec string: terms joined by `+`, each `name` or `name:key=value,key=value`.

    >>> [str(t) for t in parse("lalr:tau=0.1+qk_clip")]
    ['lalr:tau=0.1', 'qk_clip']
    """
    if not isinstance(text, str):
        raise InvalidTypeError(f"expected a spec string like 'lalr:tau=0.1', got {type(text).__name__}")
    return tuple(_term(part, text) for part in _split_terms(text))


def _split_terms(text: str) -> list[str]:
    # '+' composes, but '1e+2' is a number: a plus after a digit and 'e' belongs to it.
    parts, current = [], ""
    for i, c in enumerate(text):
        exponent = i >= 2 and text[i - 1] in "eE" and text[i - 2].isdigit() and text[i + 1 : i + 2].isdigit()
        if c == "+" and not exponent:
            parts.append(current)
            current = ""
        else:
            current += c
    return [*parts, current]


def _term(part: str, text: str) -> Term:
    name, colon, tail = part.partition(":")
    name = name.strip()
    if not name:
        raise InvalidValueError(f"empty name in {text!r}; expected 'name:key=value' terms joined by '+'")
    if colon and not tail.strip():
        raise InvalidValueError(f"expected an option behind the colon of {part.strip()!r}, got none; write {name!r}")
    options: dict[str, bool | int | float | str] = {}
    for item in filter(None, (s.strip() for s in tail.split(","))):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals or not key or not value:
            raise InvalidValueError(f"cannot read {item!r} in {text!r}; expected key=value")
        if key in options:
            raise InvalidValueError(f"{key!r} is given twice in {text!r}; give it once")
        options[key] = _value(value)
    return Term(name, options)


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
