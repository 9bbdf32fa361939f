"""The record of the remedies that are active on each module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from qkeel.remedies.base import Remedy, active_on
from qkeel.sites.site import APPLIED


class _Active(dict[str, Remedy]):
    """The active remedies of a module by name. Copies keep only the remedies that changed the module itself."""

    def __deepcopy__(self, memo: object) -> _Active:
        return _Active(self._in_module())

    def __reduce__(self) -> tuple[type, tuple[dict[str, Remedy], ...]]:
        kept = self._in_module()
        # A model with step remedies only loads without qkeel.
        return (_Active, (kept,)) if kept else (dict, ())

    def _in_module(self) -> dict[str, Remedy]:
        return {name: x for name, x in self.items() if not x.on_steps}


def record(modules: Iterable[nn.Module], remedy: Remedy) -> None:
    """Records an active remedy on modules."""
    for module in modules:
        if not isinstance(active_on(module), _Active):
            vars(module)[APPLIED] = _Active(active_on(module))
        active_on(module)[remedy.name] = remedy


def drop(module: nn.Module, ends: Callable[[Remedy], bool]) -> None:
    """Drops the records of a module's remedies that have ended."""
    active = active_on(module)
    for name in [name for name, remedy in active.items() if ends(remedy)]:
        del active[name]
        if not active:
            del vars(module)[APPLIED]


def active_remedies(model: nn.Module) -> set[str]:
    """Returns the names of the remedies that are active on this model."""
    return {name for module in model.modules() for name in active_on(module)}


def forget(model: nn.Module, folded: Callable[[Remedy], bool]) -> None:
    """Drops the records of remedies that are now folded into the weights. Their handles then undo nothing."""
    for module in model.modules():
        drop(module, folded)
