"""The tap: accumulates the LogitStats of every site from the calls that pass."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from qkeel.functional.stats import LogitStats, merge
from qkeel.handle import Handle
from qkeel.kernels.statistics import logit_stats
from qkeel.nn.core import SpecModule
from qkeel.sites.find import find_sites
from qkeel.spec import AttentionCall


class Tap(Handle):
    """Watches every attention call of a model; `read()` gives the statistics since the last read.

    Statistics are computed under no_grad, from tensors the forward pass makes anyway; nothing is changed.
    With `when_training` only calls of modules in training mode count.
    """

    def __init__(self, model: nn.Module, *, when_training: bool = False) -> None:
        super().__init__(self._detach)
        self._stats: dict[str, LogitStats] = {}
        self._attached: list[tuple[SpecModule, _Observer]] = []
        for site in find_sites(model):
            module = site.module
            assert isinstance(module, SpecModule)
            observer = _Observer(self, site.name, module, when_training)
            module.observers.append(observer)  # type: ignore[arg-type]
            self._attached.append((module, observer))

    def read(self) -> dict[str, LogitStats]:
        """Per site name, the statistics since the last read; sites that saw no call are absent."""
        stats, self._stats = self._stats, {}
        return stats

    def add(self, name: str, call: AttentionCall) -> None:
        """Take one call into account."""
        new = logit_stats(call)
        old = self._stats.get(name)
        self._stats[name] = new if old is None else merge(old, new)

    def _detach(self) -> None:
        for module, observer in self._attached:
            if observer in module.observers:
                module.observers.remove(observer)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self


class _Observer:
    """One site's end of a tap."""

    def __init__(self, tap: Tap, name: str, module: SpecModule, when_training: bool) -> None:
        self.tap, self.name, self.module, self.when_training = tap, name, module, when_training
        # Made here, not by a decorator: torch loads its compiler for it, which would double the time of an import.
        self.outside_graph: Any = torch.compiler.disable(_take)

    def __call__(self, call: AttentionCall) -> None:
        self.outside_graph(self, call)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "outside_graph"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, outside_graph=torch.compiler.disable(_take))


def _take(observer: _Observer, call: AttentionCall) -> None:
    if observer.module.training or not observer.when_training:
        observer.tap.add(observer.name, call)
