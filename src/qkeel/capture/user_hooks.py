"""Hooks and stores of the user's in passes that qkeel makes: hooks that return nothing are held back, and what other
hooks and the forward itself store outside the model is put back."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch import nn

from qkeel.capture.contents import ObjectContents
from qkeel.patching.guards import idle
from qkeel.patching.module_tables import (
    global_hooks,
    gradient_hooks,
    hook_tables,
    hooks_after,
    hooks_before,
)

# Packages whose hooks the model may need: they move weights, gather them, or compute them.
_WITH_NEEDED_HOOKS = {
    *("torch", "qkeel", "accelerate", "peft", "deepspeed", "fairscale"),
    *("bitsandbytes", "torchao"),
}
_LIBRARIES = _WITH_NEEDED_HOOKS | {
    *("transformers", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("diffusers", "timm"),
}
# Where transformers keeps the collector of the pass that is running. If a version has none, its hooks are held back.
_RECORDER = "transformers.utils.output_capturing"
# Methods that change their object and return None.
_RETURN_NOTHING = {
    *("append", "appendleft", "extend", "add", "update", "insert", "clear", "remove"),
    *("discard", "__setitem__", "put", "put_nowait", "info", "debug", "log"),
}
_IS_GENERATOR = 0x20


Hooks = dict[int, Callable[..., Any]]


def hold_hooks_back(
    modules: Sequence[nn.Module],
    undo: ExitStack,
    *,
    runs_gradient_hooks: bool,
) -> list[Callable[..., Any]]:
    """Replaces forward hooks of modules that return nothing until `undo` is closed, and all hooks on gradients: those of
    a search say which rows make which head, and are none of the program's. `runs_gradient_hooks` lets these run, where
    a step's own gradients are computed again.

    The hooks by which transformers records hidden states run, as a model may compute from them (LLaVA does). What they
    see is recorded for the models of this pass alone, and not for one whose pass is running around it.

    Returns: the functions of the user's that still run, whose stores are to be put back: hooks that return a value, since
        these change what the model computes, and the modules' forward.
    """
    functions: list[Callable[..., Any]] = []
    held: list[tuple[Hooks, int]] = []
    needed = _WITH_NEEDED_HOOKS
    collector = getattr(sys.modules.get(_RECORDER), "_active_collector", None)
    if collector is not None:
        needed = needed | {"transformers"}
        undo.callback(collector.reset, collector.set(None))
    tables = [global_hooks()]
    for module in modules:
        if not is_of_library(type(module)):
            functions.append(type(module).forward)
        tables.append((hooks_before(module), hooks_after(module)))
    for before, after in tables:
        quiet = True
        for key, hook in _own_hooks(after, needed):
            if returns_nothing(hook):
                held.append((after, key))
            else:
                functions.append(hook)
                quiet = False
        for key, hook in _own_hooks(before, needed):
            # A hook after forward that changes the output may use what one before it has kept.
            if quiet and returns_nothing(hook) and not _writes_state(hook):
                held.append((before, key))
            else:
                functions.append(hook)
    for table, key in held:
        undo.callback(_put_back, table, key, table[key])
        table[key] = idle
    if not runs_gradient_hooks:
        with_gradients = [(table, dict(table)) for table in gradient_hooks(modules)]
        undo.callback(_put_all_back, with_gradients)
        for table, _ in with_gradients:
            table.clear()
    return functions


def _put_all_back(hooks_of_tables: list[tuple[Hooks, Hooks]]) -> None:
    for table, hooks in hooks_of_tables:
        # The pass may have added some.
        hooks |= table
        table.clear()
        table.update(hooks)


def _put_back(table: Hooks, key: int, hook: Callable[..., Any]) -> None:
    # The pass may have removed the hook.
    if key in table:
        table[key] = hook


def recording_code(modules: Iterable[nn.Module]) -> frozenset[types.CodeType]:
    """The code of the program's forward hooks of modules that return nothing, or an argument of theirs: attention that
    they compute from what they see, as probes that log weights do, is none of the model's."""
    codes = set()
    for table in (*global_hooks(), *hook_tables(modules)):
        for _, hook in _own_hooks(table, _WITH_NEEDED_HOOKS):
            function = _function_of(hook)
            if isinstance(function, types.FunctionType) and returns_nothing(
                hook, or_argument=True
            ):
                codes.add(function.__code__)
    return frozenset(codes)


def _own_hooks(table: Hooks, needed: Collection[str]) -> list[tuple[int, Any]]:
    """The hooks of a table that a program has put there, with their keys. needed: packages whose hooks are not among
    them."""
    return [
        (key, hook)
        for key, hook in table.items()
        # Torch numbers its hooks; those that a step puts by `put_hooks` have other keys.
        if type(key) is int and not _is_of(needed, hook)
    ]


def returns_nothing(hook: Callable[..., Any], *, or_argument: bool = False) -> bool:
    """True if no way through the code of a hook returns anything but None, or the result of a method such as append or
    of a function that returns nothing. With `or_argument`, a hook may return an argument that it has not replaced.

    >>> features = []
    >>> returns_nothing(lambda module, args, output: features.append(output))
    True
    >>> returns_nothing(lambda module, args, output: 2 * output)
    False
    """
    function = _function_of(hook)
    if not isinstance(function, types.FunctionType):
        return False
    result = _result(function.__code__, or_argument)
    if not isinstance(result, str):
        return result
    try:
        called = inspect.getclosurevars(function)
    except ValueError:
        return False
    other = {**called.builtins, **called.globals, **called.nonlocals}.get(result)
    if isinstance(other, types.FunctionType):
        return _result(other.__code__, or_argument) is True
    return any(other is function for function in (print, setattr, delattr))


@functools.lru_cache(maxsize=256)
def _result(code: types.CodeType, or_argument: bool) -> bool | str:
    """Whether a function returns nothing (or an argument), or the name of the function whose result it returns."""
    if code.co_flags & _IS_GENERATOR:
        return False
    result: bool | str = True
    kept = {*code.co_varnames[: code.co_argcount]} if or_argument else set()
    kept -= {x.argval for x in dis.get_instructions(code) if x.opname == "STORE_FAST"}
    # The object of the call that is evaluated last lies at the bottom of the stack, and so does its method.
    depth, method, function, before = 0, "", "", None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "RETURN_CONST" and instruction.argval is not None:
            return False
        if name == "RETURN_VALUE" and before is not None:
            is_none = before.opname == "LOAD_CONST" and before.argval is None
            is_none |= before.opname == "LOAD_FAST" and before.argval in kept
            is_call = before.opname.startswith("CALL")
            if is_call and function and not method and result in (True, function):
                result = function
            elif not (is_none or (is_call and method in _RETURN_NOTHING)):
                return False
        if name in ("LOAD_METHOD", "LOAD_ATTR") and depth == 1:
            method = instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_DEREF") and depth <= 1:
            function = instruction.argval
        if name == "RETURN_VALUE" or name.startswith("JUMP"):
            depth = 0
        else:
            depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if depth <= 0:
            method = function = ""
        before = instruction
    return result


def _writes_state(hook: Callable[..., Any]) -> bool:
    """True if a pre-hook may write what the forward needs: attributes, or tensors in place."""
    code = getattr(_function_of(hook), "__code__", None)
    if code is None or "setattr" in code.co_names:
        return True
    return any(x.opname == "STORE_ATTR" for x in dis.get_instructions(code)) or any(
        name.endswith("_") and name[0] != "_" for name in code.co_names
    )


def _function_of(hook: object) -> object:
    """The function, or else the class, behind partials, methods and objects that can be called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    if isinstance(hook, (types.FunctionType, type)) or not callable(hook):
        return hook
    return type(hook).__call__


def is_of_library(hook: object) -> bool:
    """True if a function, a class or an object that can be called is torch's, Python's or that of a training library."""
    if isinstance(hook, type):
        return _is_library_class(hook)
    return _is_of(_LIBRARIES, hook)


# A search asks this of thousands of objects, which are of few classes.
@functools.lru_cache(maxsize=4096)
def _is_library_class(kind: type) -> bool:
    return _is_of(_LIBRARIES, kind)


def _is_of(packages: Collection[str], hook: object) -> bool:
    """True if a function, a class or an object that can be called is of one of these packages or Python's own."""
    if not isinstance(
        hook, (types.FunctionType, types.MethodType, functools.partial, type)
    ):
        # An instance with __call__: where its class was defined tells whose it is.
        hook = type(hook)
    home = getattr(_function_of(hook), "__module__", None) or ""
    package = home.partition(".")[0]
    is_standard = package in sys.stdlib_module_names and package != "__main__"
    return package in packages or is_standard


class OutsideStores:
    """What functions can reach and fill besides their arguments: variables of closures, globals that they name, and the
    objects to which they are bound or with which they were made.

    functions: the functions. others: objects that are kept as those are."""

    def __init__(
        self, functions: list[Callable[..., Any]], others: Iterable[object] = ()
    ) -> None:
        reached = [*others]
        self._cells: list[tuple[types.CellType, object]] = []
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        for function in functions:
            while isinstance(function, functools.partial):
                reached += [function.args, function.keywords]
                function = function.func
            reached.append(getattr(function, "__self__", function))
            plain = _function_of(function)
            if not isinstance(plain, types.FunctionType):
                continue
            reached += plain.__defaults__ or ()
            for cell in plain.__closure__ or ():
                # An empty cell.
                with suppress(ValueError):
                    self._cells.append((cell, cell.cell_contents))
            names = plain.__globals__
            for name in set(plain.__code__.co_names) & names.keys():
                self._globals.append((names, name, names[name]))
        reached += [value for *_, value in (*self._cells, *self._globals)]
        self._contents = ObjectContents(
            reached, tensors=True, owns=lambda x: not is_of_library(type(x))
        )

    def restore(self) -> None:
        """Puts everything back."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for names, name, value in self._globals:
            if names.get(name) is not value:
                names[name] = value
        self._contents.restore()
