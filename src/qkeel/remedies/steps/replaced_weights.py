"""Weights that leave the model after a remedy was applied to them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import nn

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.patching.module_tables import parameters_of, submodules_of

Table = dict[str, Any]


@final
class ReplacementCheck:
    """Notices, at almost no cost per step, that a weight was replaced; one that only got another name is followed."""

    def __init__(self, model: nn.Module, remedy: str, names: Iterable[str]) -> None:
        self._model, self._remedy = model, remedy
        self._weights = {name: model.get_parameter(name) for name in dict.fromkeys(names)}
        self._links = _links(model, self._weights)

    def check(self) -> None:
        """Raise RefusedError if one of the weights is no longer in the model."""
        tables, keys, objects = self._links
        if all(map(operator.is_, map(dict.get, tables, keys), objects)):  # no loop in Python: some hundred per step
            return
        names = {id(p): name for name, p in self._model.named_parameters(remove_duplicate=False)}
        gone = [name for name, p in self._weights.items() if id(p) not in names]
        if gone:
            more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
            dist.say_failed(f"{gone[0]} has been replaced")
            raise RefusedError(
                f"{self._remedy} was applied to {gone[0]}{more}, which "
                "has been replaced since: the step was not taken. remove() the remedy's handle and apply it again "
                "to the model as it is now"
            )
        self._weights = {names[id(p)]: p for p in self._weights.values()}
        self._links = _links(self._model, self._weights)


def _links(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> tuple[list[Table], list[str], list[object]]:
    """Every entry of a module's tables between the model and the weights, once: tables, keys, the objects there."""
    found: dict[tuple[int, str], tuple[Table, str, object]] = {}
    for name, parameter in weights.items():
        *path, leaf = name.split(".")
        module = model
        for key in path:
            table, module = submodules_of(module), module.get_submodule(key)
            found[id(table), key] = (table, key, module)
        found[id(parameters_of(module)), leaf] = (parameters_of(module), leaf, parameter)
    entries = found.values()
    return [table for table, _, _ in entries], [key for _, key, _ in entries], [held for _, _, held in entries]
