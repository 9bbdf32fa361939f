"""The kinds of options that several commands share, as types that cyclopts reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter

T = TypeVar("T")
SEVERAL = Parameter(consume_multiple=True, negative_iterable=())

Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
JsonSwitch = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
# Several words after one option.
Several = Annotated[list[T], SEVERAL]
# None if it is not given; its help says what that means.
Unset = Annotated[T | None, Parameter(show_default=False)]


def is_function(path: Path) -> bool:
    """True if what was typed is module:function and not a file or folder."""
    named = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(path))
    return named is not None and not path.exists()
