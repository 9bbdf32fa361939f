"""Options by name: tables of classes, spec strings such as "qk_clip:threshold=15", and the check of their values.

`remedies.table` makes remedies of what `parse` reads, `spec.presets` specs of attention.
"""

from __future__ import annotations  # pyright: ignore[reportAssignmentType]

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from qkeel.errors import InvalidTypeError, InvalidValueError, check, check_known

# From names to objects: literal tables, spec strings, and errors that name the nearest entry.

T = TypeVar("T")


def lookup(kind: str, table: Mapping[str, T], name: str) -> T:
    """Returns `table[name]`, or raises UnknownNameError with the nearest names."""
    check_known(kind, name, table)
    return table[name]


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe(Generic[T]):
    """A row of a table: a one-line description, its source, and the function that builds the object from its
    options."""

    line: str
    source: str
    build: Callable[..., T]


def described(table: Mapping[str, Recipe[T]]) -> dict[str, str]:
    """Returns the names of a table, each with a one-line description and its source."""
    return {name: f"{row.line} [{row.source}]" for name, row in table.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One term `name:key=value,key=value` of a spec string."""

    name: str
    options: dict[str, bool | int | float | str]

    def __str__(self) -> str:
        pairs = []
        for key, value in sorted(self.options.items()):
            text = repr(value) if isinstance(value, float) else str(value)
            pairs.append(f"{key}={text.lower() if isinstance(value, bool) else text}")
        return ":".join(filter(None, (self.name, ",".join(pairs))))


def parse(text: str) -> tuple[Term, ...]:
    """Parses a spec string: terms joined by `+`, each of the form `name` or `name:key=value,key=value`.

    >>> [str(t) for t in parse("lalr:tau=0.1+qk_clip")]
    ['lalr:tau=0.1', 'qk_clip']
    """
    if not isinstance(text, str):
        raise InvalidTypeError(
            f"expected a spec string like 'lalr:tau=0.1', got {type(text).__name__}"
        )
    # '+' joins terms, but '1e+2' is a number, so a plus between a digit with 'e' and a digit belongs to the number.
    parts = re.split(r"(?<!\d[eE])\+|\+(?!\d)", text)
    return tuple(_term(part, text) for part in parts)


def _term(part: str, text: str) -> Term:
    name, colon, tail = (word.strip() for word in part.partition(":"))
    options: dict[str, bool | int | float | str] = {}
    is_read = bool(name) and bool(tail) == bool(colon)
    for pair in filter(None, (s.strip() for s in tail.split(","))):
        key, equals, value = (word.strip() for word in pair.partition("="))
        is_read &= bool(equals and key and value) and key not in options
        options[key] = _value(value)
    if not is_read:
        raise InvalidValueError(
            f"cannot read {part!r} in {text!r}; expected 'name' or 'name:key=value,key=value' with each key once, and '+' "
            "between several"
        )
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


# Options are values that users give by name; they are checked against the annotations of the class or function.
#
# The same mechanism is used for the fields of configurations, remedies, policies and executors, and for the options of
# presets, positions and sinks. Every error says what was expected for which name, and what was given; for an unknown
# name, the error suggests the nearest name.

OptionsT = TypeVar("OptionsT")
# An object as in JSON and TOML: plain values by name, possibly nested.
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """For annotations: a finite number above `least`, or equal to it if it is `included`, and at most `most`."""

    least: float = 0.0
    included: bool = False
    most: float = math.inf


Positive = Annotated[float, Bound()]
NotNegative = Annotated[float, Bound(included=True)]
Share = Annotated[float, Bound(included=True, most=1.0)]
Natural = Annotated[int, Bound(included=True)]
Count = Annotated[int, Bound(1, included=True)]
_MOST = 1 << 53
_SPOKEN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@functools.cache
def annotations(of: Callable[..., object]) -> Json:
    """Returns the resolved annotations of the fields of a dataclass, or of the parameters of a function or another
    class."""
    plain_class = isinstance(of, type) and not dataclasses.is_dataclass(of)
    return typing.get_type_hints(
        of.__init__ if plain_class else of, include_extras=True
    )


def checked(value: Any, kind: Any, name: str) -> Any:
    """Returns a value converted to its annotation: a whole number becomes a float if that is expected.

    >>> checked(3, float, "lr")
    3.0
    >>> checked(0, Positive, "tau of lalr")
    Traceback (most recent call last):
    qkeel.errors.InvalidValueError: expected a finite number above 0 for tau of lalr, got 0.0

    Args:
        value: the given value.
        kind: a type, a union with None, a Literal, or Annotated with bounds; anything else is not checked.
        name: how error messages refer to the value.

    Raises:
        InvalidTypeError: the value has the wrong type. UnknownNameError: the string is not in the Literal.
        InvalidValueError: the number is out of bounds, or the text is not Unicode.
    """
    kind, *bounds = (
        typing.get_args(kind) if typing.get_origin(kind) is Annotated else (kind,)
    )
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        check_known(name, value, typing.get_args(kind))
        return value
    if kind not in _SPOKEN:
        return value
    # TOML and the command line write 3 for 3.0.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InvalidTypeError(f"expected {_SPOKEN[kind]} for {name}, got {value!r}")
    if kind is int and not -_MOST < value < _MOST:
        raise InvalidValueError(
            f"expected {name} between -2^53 and 2^53, which JSON holds exactly, got {value}"
        )
    # The name of a file may hold bytes that are no UTF-8; they arrive as lone surrogates, which no file in UTF-8 can hold.
    if (
        isinstance(value, str)
        and value.encode("utf-8", "replace").decode("utf-8") != value
    ):
        raise InvalidValueError(
            f"expected Unicode text for {name}, got {value!r}; rename the file that it names"
        )
    for bound in bounds:
        check_bound(value, bound, name)  # pyright: ignore[reportArgumentType]
    return value


def check_bound(value: float, bound: Bound, name: str) -> None:
    """Raises InvalidValueError unless a number is finite and within a bound."""
    sound = math.isfinite(value) and (
        value > bound.least or (bound.included and value == bound.least)
    )
    least = f"{'of at least' if bound.included else 'above'} {bound.least:g}"
    most = "" if math.isinf(bound.most) else f" and at most {bound.most:g}"
    check(
        sound and value <= bound.most,
        f"a finite number {least}{most} for {name}",
        value,
    )


def settle(config: object, of: str = "") -> None:
    """Checks the plain fields of a frozen dataclass against their annotations, and converts them accordingly.

    Args:
        config: the dataclass, from its `__post_init__`.
        of: the owner of the fields, for errors.
    """
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, kind = getattr(config, field.name), annotations(type(config))[field.name]
        # The dataclass is frozen; this is its own __post_init__.
        object.__setattr__(
            config,
            field.name,
            checked(value, kind, f"{field.name} of {of}" if of else field.name),
        )


def build(
    of: str, make: Callable[..., OptionsT], options: Mapping[str, Any], *given: object
) -> OptionsT:
    """Calls a function, a dataclass or another class with options by name.

    The options of a function are checked here; a class checks its own options. If text is expected, a number is
    converted to text: in `slurm:partition=3`, the partition is called "3".

    Args:
        of: the owner of the options, for errors.
        make: the function or class to call; its positional-only parameters are not options.
        options: the options, by name.
        *given: the leading arguments, for parameters that are positional-only.

    Raises:
        UnknownNameError: an option does not exist; the error names the nearest option. InvalidTypeError: a value has
            the wrong type.
    """
    parameters = inspect.signature(make).parameters.values()
    accepted = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    values = {}
    for name, value in options.items():
        check_known(f"option of {of}", name, accepted)
        kind = annotations(make).get(name)
        values[name] = (
            str(value) if kind is str and isinstance(value, (int, float)) else value
        )
        if not isinstance(make, type):
            checked(value, kind, f"option {name!r} of {of}")
    return make(*given, **values)


def read_fields(cls: type[OptionsT], values: Mapping[str, Any], table: str) -> OptionsT:
    """Builds the dataclass `cls` from nested plain values; `table` names them in errors."""
    if not isinstance(values, Mapping):
        raise InvalidTypeError(
            f"expected a table of {table or 'settings'}, got {values!r}"
        )
    kinds, arguments = annotations(cls), {}
    for key, value in values.items():
        check_known(f"key in [{table}]" if table else "key", key, kinds)
        nested = dataclasses.is_dataclass(kinds[key])
        arguments[key] = (
            read_fields(kinds[key], value, f"{table}.{key}" if table else key)
            if nested
            else value
        )
    return cls(**arguments)
