"""The tables in which an nn.Module keeps its own parameters, submodules, buffers and hooks, to be read and changed.

nn.Module's public methods list them, or set one at a time; they neither keep the order of what is put back nor identify
hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

TABLES = ("_parameters", "_modules", "_buffers")
_STATE = "__getstate__"
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name; what is written to it is the module's."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own submodules by name; what is written to it is the module's."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name; what is written to it is the module's."""
    return module._buffers


def is_made(module: nn.Module) -> bool:
    """True if nn.Module.__init__ ran: one that is still being made, or only looks like one, has no tables."""
    return TABLES[1] in vars(module)


def names_in_use(module: nn.Module) -> set[str]:
    """The names of everything that the module itself holds."""
    return {*vars(module), *module._parameters, *module._modules, *module._buffers}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the module's attributes but for those three tables."""
    return {name: value for name, value in vars(module).items() if name not in TABLES}


def hooks_before(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks that run before the module's forward, in their order."""
    return module._forward_pre_hooks


def hooks_after(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks that run after the module's forward, in their order."""
    return module._forward_hooks


def put_hooks(
    module: nn.Module, key: object, before: Callable[..., None] | None, after: Callable[..., None]
) -> list[dict[Any, Any]]:
    """Puts a hook before and one after the module's forward, under a key of the caller's own; returns the tables that
    hold the key now, to be taken out of. For many modules a step: torch's own registration takes ten times as long.

    before(module, args, kwargs) comes before all other hooks; with it after(module, args, output) is called after an
    exception too.
    """
    tables: list[Any] = [module._forward_hooks]
    module._forward_hooks[key] = after  # type: ignore[index]
    if before is not None:
        first, named, always = (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
        )
        first[key] = before  # type: ignore[index]
        first.move_to_end(key, last=False)  # type: ignore[attr-defined]
        named[key] = always[key] = True  # type: ignore[index]
        tables += [first, named, always]
    return tables


def drop_hooks_after(module: nn.Module, kept: set[int]) -> None:
    """Removes the hooks after the module's forward but for those whose numbers are `kept`."""
    for number in [number for number in module._forward_hooks if number not in kept]:
        for table in (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called):
            table.pop(number, None)


class ModuleTree:
    """The modules of a model with their names, walked again only where something in the tree is another than before.

    To compare the tree takes no call of Python for a module, to walk it ten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named: list[tuple[str, nn.Module]] = []
        self._tables: list[dict[str, Any]] = []
        self._held: list[tuple[object, ...]] = []
        self._of_kind: dict[object, list[tuple[str, nn.Module]]] = {}

    def named(self) -> list[tuple[str, nn.Module]]:
        """Every module once, with its name, as `named_modules()` gives them."""
        if not self._held or [*map(tuple, map(dict.items, self._tables))] != self._held:
            self._named = [*self._model.named_modules()]
            tables = [module._modules for _, module in self._named]
            self._of_kind.clear()
            if all(isinstance(table, dict) for table in tables):  # those of scripted modules are not
                self._tables, self._held = tables, [*map(tuple, map(dict.items, tables))]
            else:
                self._tables, self._held = [], []
        return self._named

    def of_kind(self, *kinds: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Those that are of one of these classes."""
        named = self.named()
        if kinds not in self._of_kind:
            self._of_kind[kinds] = [(name, module) for name, module in named if isinstance(module, kinds)]
        return self._of_kind[kinds]

    def any_compiled(self) -> bool:
        """Returns whether the `compile()` of one of the modules was called."""
        return any([module._compiled_call_impl is not None for _, module in self.named()])  # noqa: C419


@final
class _StoredState:
    """A module's state without some of its hooks; it stands in the module's own `__dict__`, and leaves itself out."""

    def __init__(self, module: nn.Module, own: type) -> None:
        self.module, self.own = module, own

    def __call__(self) -> object:
        found = type(self.module).__getstate__(self.module)
        if type(found) is not dict:  # the class has a state of its own making
            return found
        left = {name: value for name, value in found.items() if value is not self}
        gone = {n for table in _HOOKS[:2] for n, hook in left.get(table, {}).items() if isinstance(hook, self.own)}
        for name in _HOOKS:
            if name in left:
                left[name] = type(left[name])((n, x) for n, x in left[name].items() if n not in gone)
        return left


def store_without(module: nn.Module, own: type) -> None:
    """Has copies and pickles of a module leave out its forward hooks of the class `own`, as if nobody had put them on.

    A module is asked for its state as an instance, so an entry in its `__dict__` answers before its class does.
    """
    if _STATE not in vars(module) and not isinstance(module, torch.jit.ScriptModule):
        vars(module)[_STATE] = _StoredState(module, own)


def store_whole(module: nn.Module) -> None:
    """Takes back `store_without`, once none of its hooks is left."""
    found = vars(module).get(_STATE)
    if isinstance(found, _StoredState) and not any(
        isinstance(hook, found.own) for table in _HOOKS[:2] for hook in vars(module)[table].values()
    ):
        del vars(module)[_STATE]


def put_first(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Makes this the first of the module's own parameters, in a table that no copy of the module shares."""
    module._parameters = {name: parameter, **module._parameters}


def state_without(module: nn.Module, submodule: str) -> dict[str, Any]:
    """A copy of all that the module holds, but for one submodule."""
    kept = {name: part for name, part in module._modules.items() if name != submodule}
    return {**vars(module), TABLES[1]: kept}


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Makes the module one of another class, such as the one that it had before torch parametrized it."""
    module.__class__ = cls


def pickle_by(module: nn.Module, reduced: Callable[[Any, object], tuple[object, ...]]) -> None:
    """Has a module that torch parametrized copied and pickled as `reduced(module, protocol)` says. The class is one
    that torch made for this module alone, and which it does not let pickle."""
    type(module).__reduce_ex__ = reduced  # type: ignore[assignment,method-assign]
