"""Hooks and stores of the user's in passes that qkeel makes: hooks that return nothing are held back, and what other
hooks and the forward itself store outside the model is put back."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from qkeel.capture.contents import ObjectContents
from qkeel.patching.modes import get_idle, hooks_after, hooks_before, modules_of

# Packages whose hooks the model may need: they move weights, gather them, or compute them.
_LIBRARIES = frozenset(
    {
        *(
            "torch",
            "qkeel",
            "accelerate",
            "peft",
            "deepspeed",
            "transformers",
            "lightning",
            "lightning_fabric",
        ),
        *(
            "pytorch_lightning",
            "fairscale",
            "bitsandbytes",
            "torchao",
            "diffusers",
            "timm",
        ),
    }
)
# Methods that change their object and return None.
_RETURN_NOTHING = frozenset(
    {
        *(
            "append",
            "appendleft",
            "extend",
            "add",
            "update",
            "insert",
            "clear",
            "remove",
            "discard",
            "__setitem__",
        ),
        *("put", "put_nowait", "sort", "reverse", "info", "debug", "log"),
    }
)
_LOADS_OF_METHODS = ("LOAD_METHOD", "LOAD_ATTR")


@contextmanager
def hooks_held_back(model: nn.Module) -> Iterator[None]:
    """A context in which the user's forward hooks that return nothing don't run.

    A hook that returns a value changes what the model computes, so it runs; the lists, dicts, sets, attributes and
    counters that it and the modules' forward reach through closures, globals and objects are put back afterwards.
    """
    idle = get_idle()
    functions: list[Callable[..., Any]] = []
    with ExitStack() as undo:
        for module in modules_of(model).values():
            if not _is_of_library(type(module)):
                functions.append(type(module).forward)
            for table, before in (
                (hooks_before(module), True),
                (hooks_after(module), False),
            ):
                for key, hook in [*table.items()]:
                    if _is_of_library(hook):
                        continue
                    if returns_nothing(hook) and not (before and _writes_state(hook)):
                        table[key] = idle
                        undo.callback(_put_back, table, key, hook)
                    else:
                        functions.append(hook)
        stores = OutsideStores(functions)
        undo.callback(stores.restore)
        yield


def _put_back(
    table: dict[int, Callable[..., Any]], key: int, hook: Callable[..., Any]
) -> None:
    if key in table:  # the pass may have removed the hook
        table[key] = hook


def returns_nothing(hook: Callable[..., Any]) -> bool:
    """True if no way through the code of a hook returns anything but None, or the result of a method such as append.

    >>> features = []
    >>> returns_nothing(lambda module, args, output: features.append(output))
    True
    >>> returns_nothing(lambda module, args, output: 2 * output)
    False
    """
    code = _code_of(hook)
    if code is None or code.co_flags & 0x20:  # a generator's
        return False
    depth, outer, before = 0, "", None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_VALUE":
            constant = (
                before is not None
                and before.opname == "LOAD_CONST"
                and before.argval is None
            )
            called = (
                before is not None
                and before.opname.startswith("CALL")
                and outer in _RETURN_NOTHING
            )
            if not (constant or called):
                return False
        if instruction.opname in _LOADS_OF_METHODS and depth == 1:
            outer = instruction.argval  # the object of the call that is evaluated last lies at the bottom of the stack
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        if (
            instruction.opname.startswith("JUMP")
            or instruction.opname == "RETURN_VALUE"
        ):
            depth = 0
        else:
            depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if depth <= 0:
            outer = ""
        before = instruction
    return True


def _writes_state(hook: Callable[..., Any]) -> bool:
    """True if a pre-hook may write what the forward needs: attributes, or tensors in place."""
    code = _code_of(hook)
    if code is None:
        return True
    writes = any(
        instruction.opname == "STORE_ATTR" for instruction in dis.get_instructions(code)
    )
    return writes or any(
        name == "setattr" or (name.endswith("_") and name[0] != "_")
        for name in code.co_names
    )


def _function_of(hook: object) -> object:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    if not isinstance(hook, types.FunctionType) and not isinstance(hook, type):
        hook = type(hook).__call__ if callable(hook) else hook
    return hook


def _code_of(hook: object) -> types.CodeType | None:
    return getattr(_function_of(hook), "__code__", None)


def _is_of_library(hook: object) -> bool:
    if not isinstance(
        hook, (types.FunctionType, types.MethodType, functools.partial, type)
    ):
        hook = type(hook)  # an object that can be called
    home = getattr(_function_of(hook), "__module__", None) or ""
    package = home.partition(".")[0]
    return package in _LIBRARIES or (
        package in sys.stdlib_module_names and package != "__main__"
    )


class OutsideStores:
    """What functions can reach and fill besides their arguments: variables of closures, globals that they name, and the
    objects to which they are bound or with which they were made."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        reached: list[object] = []
        self._cells: list[tuple[types.CellType, object]] = []
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        known: set[int] = set()
        for function in functions:
            while isinstance(function, functools.partial):
                reached += [function.args, function.keywords]
                function = function.func
            owner = getattr(function, "__self__", None)
            if owner is None and not isinstance(function, types.FunctionType):
                owner = function
            if owner is not None and not isinstance(owner, nn.Module):
                reached.append(owner)
            plain = _function_of(function)
            if not isinstance(plain, types.FunctionType) or id(plain) in known:
                continue
            known.add(id(plain))
            reached += plain.__defaults__ or ()
            for cell in plain.__closure__ or ():
                try:
                    self._cells.append((cell, cell.cell_contents))
                except ValueError:  # an empty cell
                    continue
            for name in plain.__code__.co_names:
                if name in plain.__globals__:
                    self._globals.append(
                        (plain.__globals__, name, plain.__globals__[name])
                    )
        reached += [value for _, value in self._cells]
        reached += [value for *_, value in self._globals]
        self._contents = ObjectContents(
            reached, tensors=True, owns=lambda x: not _is_of_library(type(x))
        )

    def restore(self) -> None:
        """Puts everything back."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for names, name, value in self._globals:
            if names.get(name) is not value:
                names[name] = value
        self._contents.restore()
