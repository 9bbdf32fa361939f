"""Which functions of qkeel run while a step is watched, and a fault planted in one of them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

# What is watched with: whatever of it fails must stop nobody.
ROOMS = ("qkeel.monitor.", "qkeel.records.", "qkeel.sites.tap")


def boom(*args: object, **kwargs: object) -> Any:
    raise ValueError("boom")


class Seen:
    """A profiler that collects the functions of ROOMS that are called while it is on, by module and name."""

    def __init__(self) -> None:
        self.codes: dict[str, CodeType] = {}

    def __call__(self, frame: FrameType, event: str, given: object) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        # Written-out functions only: neither comprehensions, which are parts of one, nor what a dataclass has made.
        written = not code.co_filename.startswith("<") and "<" not in code.co_name
        if event == "call" and written and module.startswith(ROOMS):
            self.codes[f"{module.removeprefix('qkeel.')}:{code.co_qualname}"] = code


@contextmanager
def planted(code: CodeType) -> Iterator[None]:
    """While it lasts every call of the function with this code raises, whoever holds the function."""
    bad = boom.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name)
    undo: list[tuple[FunctionType, CodeType]] = []
    for function in _functions():
        before = function.__code__
        if before is code:
            after = bad
        elif any(part is code for part in before.co_consts):  # a function that is made anew in each call of another
            after = before.replace(co_consts=tuple(bad if part is code else part for part in before.co_consts))
        else:
            continue
        undo.append((function, before))
        function.__code__ = after
    assert undo, f"nothing holds {code.co_qualname}"
    try:
        yield
    finally:
        for function, before in undo:
            function.__code__ = before


@functools.cache
def _functions() -> list[FunctionType]:
    # By type: a dead weak proxy, of which there may be some in a process, answers no isinstance.
    return [f for f in gc.get_objects() if type(f) is FunctionType and str(f.__module__).startswith(ROOMS)]
