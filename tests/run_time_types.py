"""Annotations, shapes among them, checked while tests run: each kind of call once.

Whether a call passes depends on the types, dtypes and sizes of what goes in and out and on nothing else. So a call of
the kind of one that passed is not checked again, which took as long as the arithmetic of small tensors itself.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import sys
import threading
import types
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

_DECORATOR = f"__import__({__name__!r}).checked"
# An int is a float, as static checkers have it (PEP 484).
_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))
_KNOWN: dict[tuple[str, str, types.CodeType], _Checks] = {}  # a function inside another is made again and again


def install(modules: Sequence[str]) -> None:
    """From now on the functions and dataclasses of these modules, and of those below them, are checked when called."""
    sys.meta_path.insert(0, _Finder(tuple(modules)))


def checked(made: Any) -> Any:
    """A function whose calls are checked, or a class whose fields are, where it is a dataclass."""
    if isinstance(made, type):
        if {"__dataclass_fields__", "__init__"} <= vars(made).keys():
            made.__init__ = checked(made.__init__)  # type: ignore[misc]
        return made
    name = made.__module__, made.__qualname__, made.__code__
    checks = _KNOWN.get(name) or _KNOWN.setdefault(name, _Checks(made))
    passed = checks.passed

    @functools.wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        given: object = tuple(map(_kind, args))
        if kwargs:
            given = (given, *kwargs, *map(_kind, kwargs.values()))
        outcomes = passed.get(given)
        if outcomes is None:
            if torch.compiler.is_compiling():  # a score_mod may not touch what lies outside it
                return made(*args, **kwargs)
            out = checks(made, args, kwargs)
            passed.setdefault(given, set()).add(_kind(out))
            return out
        out = made(*args, **kwargs)
        came = _kind(out)
        if came not in outcomes:
            checks(lambda *_, **__: out, args, kwargs)
            outcomes.add(came)
        return out

    return call


class _Calls(threading.local):
    def __init__(self) -> None:
        self.under_way: list[Callable[..., Any]] = []


class _Checks:
    """The checks of a function, and the kinds of calls that have passed: of arguments with those of what came."""

    def __init__(self, function: types.FunctionType) -> None:
        self.passed: dict[object, set[object]] = {}
        self._calls = calls = _Calls()

        def body(*args: Any, **kwargs: Any) -> Any:
            return calls.under_way.pop()(*args, **kwargs)

        # Annotations are read where the function is at home.
        at_home = types.FunctionType(body.__code__, function.__globals__, function.__name__, None, body.__closure__)
        self._checker = functools.cache(lambda: jaxtyped(functools.wraps(function)(at_home), typechecker=_CHECK))

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = len(self._calls.under_way)
        self._calls.under_way.append(function)
        try:
            return self._checker()(*args, **kwargs)
        finally:
            del self._calls.under_way[depth:]


_NUMBERS = {int}
_ALIKE = {int, float}  # types whose values a check does not tell apart


def _kind(x: Any) -> object:
    """What a check of x depends on. Of several things in a list or dictionary one at random is checked, so that is not
    known of different ones."""
    kind = type(x)
    if kind in _ALIKE:
        return kind
    if isinstance(x, (torch.Tensor, np.ndarray)):
        shape = x.shape
        known = {*map(type, shape)} <= _NUMBERS  # those of a compiler's graph are not
        return (kind, x.dtype, shape) if known else object()
    if x is None or kind in (bool, str) or isinstance(x, type):  # literals, and classes by name
        return kind, x
    if kind is tuple:
        return kind, *map(_kind, x)
    if kind in (list, dict):
        kinds = {_kind(y) for y in (x.items() if kind is dict else x)}
        return (kind, *kinds) if len(kinds) < 2 else object()
    if isinstance(x, Collection):
        return object()
    _ALIKE.add(kind)
    return kind


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if not any(name == module or name.startswith(f"{module}.") for module in self._modules):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module with `checked` as the first decorator of each function and the last of each class."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                decorator = ast.copy_location(ast.parse(_DECORATOR, mode="eval").body, node)
                place = 0 if isinstance(node, ast.ClassDef) else len(node.decorator_list)
                node.decorator_list.insert(place, decorator)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
