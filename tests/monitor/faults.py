"""The functions of the rooms that watch: which are written, which run, and a fault planted in one of them."""

from __future__ import annotations

import ast
import dis
import functools
import gc
import inspect
import itertools
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import qkeel

# What is watched with: whatever of it fails must stop nobody.
ROOMS = ("capture", "heads", "monitor", "records", "sites")
_HOME = Path(qkeel.__file__).parent


def boom(*args: object, **kwargs: object) -> Any:
    raise ValueError("boom")


def written() -> list[str]:
    """Every function that is written in ROOMS, by module and name."""
    found = []
    for path in itertools.chain.from_iterable(sorted((_HOME / room).rglob("*.py")) for room in ROOMS):
        module = ".".join(path.relative_to(_HOME).with_suffix("").parts)
        found += [f"{module}:{name}" for name in _names(ast.parse(path.read_text()), "")]
    return list(dict.fromkeys(found))


def _names(node: ast.AST, before: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield before + child.name
            yield from _names(child, f"{before}{child.name}.<locals>.")
        else:
            yield from _names(child, f"{before}{child.name}." if isinstance(child, ast.ClassDef) else before)


class Seen:
    """A profiler that collects the functions of ROOMS that are called while it is on, and how often."""

    def __init__(self) -> None:
        self.codes: dict[str, CodeType] = {}
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, given: object) -> None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "").removeprefix("qkeel.")
        # Written functions only: neither lambdas and comprehensions, which are parts of one, nor a dataclass's own.
        inside = event == "call" and module.startswith(ROOMS) and code.co_name[0] != "<"
        if inside and not code.co_filename.startswith("<"):
            name = f"{module}:{code.co_qualname}"
            self.codes[name] = code
            self.calls[name] += 1


class Fault:
    """What every call of a function from number `first` on raises in its place; the calls before it go through."""

    def __init__(self, kind: type[BaseException], first: int = 1) -> None:
        self.kind, self.first = kind, first
        self.calls = 0
        self.original: FunctionType | None = None

    def fire(self, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        if self.calls < self.first:
            assert self.original is not None
            return self.original(*args, **kwargs)
        raise self.kind("boom")

    @property
    def fired(self) -> bool:
        return self.calls >= self.first


_PLANTED: list[Fault] = []


def fire(args: Any, kwargs: Any) -> Any:
    return _PLANTED[-1].fire(args, kwargs)


def _faulty(*args: Any, **kwargs: Any) -> Any:
    import tests.monitor.faults as faults  # it runs with the names of the function whose code it replaces

    return faults.fire(args, kwargs)


def can_wait(code: CodeType) -> bool:
    """Whether calls of this function can go through until one fails: it refers to nothing around it, and each begins
    it anew."""
    return (
        not code.co_freevars
        and not code.co_flags & inspect.CO_GENERATOR
        and any(function.__code__ is code for function in _functions())
    )


@contextmanager
def planted(code: CodeType, fault: Fault) -> Iterator[None]:
    """While it lasts calls of the function with this code raise, whoever holds the function."""
    bad = _faulty.__code__.replace(co_name=code.co_name)
    if code.co_freevars:  # it begins as such a function does, else who looks into its frame finds nothing there
        start = bytes([dis.opmap["COPY_FREE_VARS"], len(code.co_freevars)])
        bad = bad.replace(co_freevars=code.co_freevars, co_code=start + bad.co_code)
    undo: list[tuple[FunctionType, CodeType]] = []
    for function in _functions():
        before = function.__code__
        if before is code:
            if not code.co_freevars:
                fault.original = types.FunctionType(code, function.__globals__, argdefs=function.__defaults__)
                fault.original.__kwdefaults__ = function.__kwdefaults__
            after = bad
        elif (after := _with(before, code, bad)) is before:
            continue
        undo.append((function, before))
        function.__code__ = after
    assert undo, f"nothing holds {code.co_qualname}"
    _PLANTED.append(fault)
    try:
        yield
    finally:
        _PLANTED.pop()
        for function, before in undo:
            function.__code__ = before


def _with(outer: CodeType, code: CodeType, bad: CodeType) -> CodeType:
    """The code of a function in which another is made anew in each call, with this one replaced; else as it is."""
    parts = tuple(
        bad if part is code else _with(part, code, bad) if isinstance(part, CodeType) else part
        for part in outer.co_consts
    )
    changed = any(one is not other for one, other in zip(parts, outer.co_consts))
    return outer.replace(co_consts=parts) if changed else outer


@functools.cache
def _functions() -> list[FunctionType]:
    # By type: a dead weak proxy, of which there may be some in a process, answers no isinstance.
    gc.unfreeze()  # what was frozen for the suite's speed is not listed
    found = [f for f in gc.get_objects() if type(f) is FunctionType]
    gc.freeze()
    return [f for f in found if str(f.__module__).removeprefix("qkeel.").startswith(ROOMS)]
