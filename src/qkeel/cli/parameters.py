"""The kinds of options that several commands share, as types that cyclopts reads."""

from __future__ import annotations

from typing import Annotated, TypeVar

from cyclopts import Parameter

T = TypeVar("T")
SEVERAL = Parameter(consume_multiple=True, negative_iterable=())

Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
JsonSwitch = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
Several = Annotated[list[T], SEVERAL]  # several words after one option
Unset = Annotated[
    T | None, Parameter(show_default=False)
]  # None if it is not given; its help says what that means
