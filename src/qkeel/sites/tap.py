"""The tap: accumulates the LogitStats of every site from the calls that pass."""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import nn

from qkeel.errors import RefusedError
from qkeel.functional.stats import LogitStats, merge
from qkeel.handle import Handle
from qkeel.kernels.statistics import logit_stats
from qkeel.nn.core import SpecModule
from qkeel.sites.intercept import Interceptor, Sighting, statistics
from qkeel.sites.scores import cat_heads
from qkeel.spec import AttentionCall


class Tap(Handle):
    """Watches every attention call of a model; `read()` gives the statistics since the last read.

    Statistics are computed under no_grad, from tensors the forward pass makes anyway; nothing is changed.
    qkeel's own modules report their calls themselves. Where a model has none, a function mode is entered around
    every forward pass of the model: eager only, for a mode around compiled code would recompile it and change its
    numbers. With `when_training` only calls of modules in training mode count. A fault in the tap warns once and
    switches it off.

    Raises:
        RefusedError: the model is compiled.
    """

    def __init__(self, model: nn.Module, *, when_training: bool = False) -> None:
        self._stats: dict[str, LogitStats] = {}
        self._headless: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self._when_training = when_training
        self._attached: list[tuple[SpecModule, _Observer]] = []
        super().__init__(self._detach)
        for name, module in model.named_modules():
            if isinstance(module, SpecModule):
                observer = _Observer(self, name, module, when_training)
                module.observers.append(observer)
                self._attached.append((module, observer))
        self._around = None if self._attached else _Around(model, self)

    def read(self) -> dict[str, LogitStats]:
        """Per site name, the statistics since the last read; sites that saw no call are absent.

        Where a module computes its heads one by one, they are those of one site.
        """
        stats, self._stats = self._stats, {}
        headless, self._headless = self._headless, {}
        for (name, _), parts in headless.items():
            merged = cat_heads([stats.pop(part) for part in parts])
            stats[name if name not in stats else parts[0]] = merged
        return stats

    def add(self, name: str, call: AttentionCall) -> None:
        """Take one call of an own module into account."""
        self._merge(name, logit_stats(call))

    def take(self, sighting: Sighting) -> None:
        """Take one call into account that was seen in passing."""
        if self._when_training and not sighting.frame.module.training:
            return
        name = sighting.name
        self._merge(name, statistics(sighting.call))
        if sighting.headless:
            parts = self._headless.setdefault((sighting.frame.name, ()), [])
            if name not in parts:
                parts.append(name)

    def _merge(self, name: str, new: LogitStats) -> None:
        old = self._stats.get(name)
        self._stats[name] = new if old is None else merge(old, new)

    def _detach(self) -> None:
        for module, observer in self._attached:
            if observer in module.observers:
                module.observers.remove(observer)
        if self._around is not None:
            self._around.close()

    def __enter__(self) -> Self:
        return self


class _Around:
    """Enters an interceptor with every forward pass of a model and leaves it after."""

    def __init__(self, model: nn.Module, tap: Tap) -> None:
        for name, module in model.named_modules():
            if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
                raise RefusedError(
                    f"{name or 'the model'} is compiled, and what it computes inside compiled code can't be seen "
                    "without changing it: give the tap the model before torch.compile and run it eagerly"
                )
        self.model, self.tap = model, tap
        self.running: Interceptor | None = None
        self.depth = 0
        before = model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        after = model.register_forward_hook(self._leave, always_call=True)
        self.hooks = [before, after]

    def close(self) -> None:
        """Take the hooks away; in the middle of a forward pass, which the mode must see the end of, after it."""
        if self.running is None:
            for hook in self.hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth += 1
        if self.depth == 1:
            self.running = Interceptor(self.model, self._take, on_fault=self._off)
            self.running.__enter__()
            # The model's own call began before its hooks were there.
            self.running.stack.push(module, args, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth -= 1
        if self.depth == 0 and self.running is not None:
            running, self.running = self.running, None
            running.__exit__(None, None, None)
            if not self.tap.active:
                self.close()

    def _take(self, sighting: Sighting) -> None:
        if self.tap.active:
            self.tap.take(sighting)

    def _off(self, error: Exception) -> None:
        if self.tap.active:
            self.tap.remove()
            warnings.warn(
                f"qkeel's tap met a fault and switched itself off: {type(error).__name__}: {error}. "
                "The model runs on unwatched",
                stacklevel=2,
            )


class _Observer:
    """One own module's end of a tap."""

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
