"""The tables in which nn.Module keeps parameters, submodules, buffers and hooks, and the tree of modules."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.patching.guards import _Uncopied
from qkeel.patching.torch_state import compiler_loaded

# The tables in which nn.Module keeps parameters, submodules, buffers and hooks.
#
# nn.Module's public methods list the entries or set one entry at a time. They neither preserve the order of restored
# entries nor identify hooks.

# Attribute names of the wrapped module in activation checkpointing, torch.compile and FSDP1.
WRAPPED_AS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
TABLES = ("_parameters", "_modules", "_buffers")
# What torch keeps in every module, such as hooks and parameters.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own table of parameters. Writing to it changes the module."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the module's own table of submodules. Writing to it changes the module."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's own table of buffers. Writing to it changes the module."""
    return module._buffers


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every module once, keyed by name, in the order of `named_modules`, whose recursion takes each name through
    all levels above it."""
    modules: dict[str, nn.Module] = {}
    visited: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        modules[name] = module
        prefix = f"{name}." if name else ""
        # The stack gives the last one back first. The table of a scripted module cannot be reversed itself.
        for key, child in reversed([*module._modules.items()]):
            if child is not None:
                waiting.append((f"{prefix}{key}", child))
    return modules


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of these modules without those of their submodules, each once."""
    held = [
        p for module in modules for p in module._parameters.values() if p is not None
    ]
    return [*{id(p): p for p in held}.values()]


def is_made(module: nn.Module) -> bool:
    """True if nn.Module.__init__ has run, so that the tables exist."""
    return TABLES[1] in vars(module)


def names_in_use(module: nn.Module) -> set[str]:
    """Returns the names of all attributes, parameters, submodules and buffers of the module."""
    return {*vars(module), *module._parameters, *module._modules, *module._buffers}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a copy of the module's attributes, except the three tables."""
    return {name: value for name, value in vars(module).items() if name not in TABLES}


def hooks_before(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns the module's forward pre-hooks in order."""
    return module._forward_pre_hooks


def hooks_after(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns the module's forward hooks in order."""
    return module._forward_hooks


_BEFORE = operator.attrgetter("_forward_pre_hooks")
_AFTER = operator.attrgetter("_forward_hooks")


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Callable[..., Any]]]:
    """Returns the tables of these modules' forward hooks that hold some, without a Python call per module."""
    modules = [*modules]
    return [*filter(None, (*map(_BEFORE, modules), *map(_AFTER, modules)))]


def global_hooks() -> tuple[
    dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]
]:
    """Returns the hooks before and after the forward of every module of the process, in order."""
    of_torch = nn.modules.module
    return of_torch._global_forward_pre_hooks, of_torch._global_forward_hooks


def gradient_hooks(modules: Iterable[nn.Module]) -> list[dict[int, Callable[..., Any]]]:
    """Returns the tables of hooks that are called with gradients: those of every module of the process, of these
    modules and of their parameters."""
    of_torch = nn.modules.module
    tables = [of_torch._global_backward_pre_hooks, of_torch._global_backward_hooks]
    for module in modules:
        tables += [module._backward_pre_hooks, module._backward_hooks]
        held = [p._backward_hooks for p in module._parameters.values() if p is not None]
        tables += [table for table in held if table]
    return tables


# a table of hooks, and the key of a hook in it.
Hook = tuple[dict[Any, Any], object]


# A module, and what is called before and after its forward.
Around = tuple[nn.Module, Callable[..., None] | None, Callable[..., None]]


def put_hooks(around: Iterable[Around]) -> list[Hook]:
    """Installs hooks before and after the forward of modules, and returns them for `remove_hooks`.

    This is meant for many modules in every step, where torch's own registration takes ten times as long.
    before(module, args, kwargs) runs before all other hooks. If it is given, after(module, args, output) also runs
    after an exception.
    """
    hooks: list[Hook] = []
    for module, before, after in around:
        # torch's keys are numbers, none of which may be used twice.
        key = object()
        hooks.append((module._forward_hooks, key))
        module._forward_hooks[key] = _Uncopied(after)  # type: ignore[index]
        if before is not None:
            first, named, always = (
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks_always_called,
            )
            first[key] = _Uncopied(before)  # type: ignore[index]
            first.move_to_end(key, last=False)  # type: ignore[attr-defined]
            named[key] = always[key] = True  # type: ignore[index]
            hooks += [(first, key), (named, key), (always, key)]
    return hooks


def remove_hooks(hooks: Iterable[Hook]) -> None:
    """Removes the hooks that `put_hooks` has installed."""
    for table, key in hooks:
        table.pop(key, None)


def drop_hooks_after(module: nn.Module, kept: set[int]) -> None:
    """Removes the module's forward hooks, except those whose numbers are in `kept`."""
    for number in [number for number in module._forward_hooks if number not in kept]:
        for table in (
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
        ):
            table.pop(number, None)


# What a module's own compile() has made of it, or None.
_COMPILED_CALL = operator.attrgetter("_compiled_call_impl")


class ModuleTree:
    """The modules of a model, keyed by name and listed again only if the tree has changed.

    Comparing the tree needs no Python call per module, whereas listing it needs ten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # While nothing can change the tree, it is compared once.
        self._is_settled = self._is_compared = False
        self._named: list[tuple[str, nn.Module]] = []
        self._modules: list[nn.Module] = []
        self._tables: list[dict[str, Any]] = []
        self._children: tuple[list[Any], ...] = ()
        self._of_kind: dict[object, list[tuple[str, nn.Module]]] = {}

    def settle(self) -> None:
        """Says that nothing changes the tree until `unsettle`."""
        self._is_settled, self._is_compared = True, False

    def unsettle(self) -> None:
        """Says that the tree may change again."""
        self._is_settled = False

    def named(self) -> list[tuple[str, nn.Module]]:
        """Returns every module once with its name, like `named_modules()`."""
        if self._is_settled and self._is_compared:
            return self._named
        if not self._tables or self._listed() != self._children:
            self._named = [*self._model.named_modules()]
            self._modules = [module for _, module in self._named]
            self._of_kind.clear()
            tables = [module._modules for module in self._modules]
            # Scripted modules have other tables, which cannot be compared.
            is_plain = all(isinstance(table, dict) for table in tables)
            self._tables = tables if is_plain else []
            self._children = self._listed()
        self._is_compared = True
        return self._named

    def parameters(self) -> list[nn.Parameter | None]:
        """Returns what the modules hold as parameters, without a Python call per module."""
        held = self._model.parameters()
        if self.named() and self._tables:
            tables = [module._parameters.values() for module in self._modules]
            held = itertools.chain.from_iterable(tables)
        return [*held]

    def _listed(self) -> tuple[list[Any], ...]:
        """How many submodules each module has, their names, and they themselves: lists of which none holds objects that
        Python's garbage collector would have to count."""
        values = map(dict.values, self._tables)
        return (
            [*map(len, self._tables)],
            [*itertools.chain.from_iterable(self._tables)],
            [*itertools.chain.from_iterable(values)],
        )

    def of_kind(self, *kinds: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Returns the modules that are instances of these classes."""
        named = self.named()
        if kinds not in self._of_kind:
            self._of_kind[kinds] = [
                pair for pair in named if isinstance(pair[1], kinds)
            ]
        return self._of_kind[kinds]

    def first_parameter(self) -> nn.Parameter | None:
        """Returns the first parameter of the modules as of the last query, or None if they have none."""
        for _, module in self._named or self.named():
            for parameter in module._parameters.values():
                if parameter is not None:
                    return parameter
        return None

    def any_compiled(self) -> bool:
        """True if calling any of the modules runs compiled code."""
        # Every pass asks, so no Python function is called for each module.
        if not compiler_loaded():
            return False
        wrappers = self.of_kind(torch._dynamo.OptimizedModule)
        implementations = [*map(_COMPILED_CALL, self._modules)]
        return bool(wrappers) or implementations.count(None) < len(implementations)


def put_first(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Makes a parameter the first one of the module, in a new table that no copy of the module shares."""
    module._parameters = {name: parameter, **module._parameters}


def state_without(module: nn.Module, submodule: str) -> dict[str, Any]:
    """Returns a copy of the module's `__dict__` without one submodule."""
    kept = {name: part for name, part in module._modules.items() if name != submodule}
    return {**vars(module), TABLES[1]: kept}


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Changes the class of a module, for instance back to the class it had before torch parametrized it."""
    module.__class__ = cls


def pickle_by(
    module: nn.Module, reduced: Callable[[Any, object], tuple[object, ...]]
) -> None:
    """Makes a parametrized module use `reduced(module, protocol)` when it is copied or pickled.

    torch gives each such module a class of its own and forbids pickling it."""
    type(module).__reduce_ex__ = reduced  # type: ignore[assignment,method-assign]
