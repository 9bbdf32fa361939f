"""The module that is running, known by forward hooks while a probe or a sampled forward runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every

from qkeel.patching.guard import Guarded, in_this_thread, unguarded
from qkeel.patching.modes import Args, Kwargs


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """One running call of a module. `inputs` are its tensor arguments, kept only where they are asked for.

    `batch` is the first size of its first tensor argument, `calls` how many attentions it has made so far, `since` the
    number of operators that had run when it began.
    """

    name: str
    module: nn.Module
    parent: Frame | None
    batch: int = 0
    inputs: tuple[Tensor, ...] = ()
    calls: int = 0
    since: int = 0

    def line(self) -> list[Frame]:
        """This frame and those that called it, innermost first."""
        frames: list[Frame] = [self]
        while (parent := frames[-1].parent) is not None:
            frames.append(parent)
        return frames

    def shared_with(self, other: Frame) -> Frame:
        """The innermost frame that holds both: that of an attention whose softmax is a module of its own."""
        mine = {id(f) for f in self.line()}
        return next((f for f in other.line() if id(f) in mine), self)


class ModuleStack:
    """The innermost running module of a model, between `__enter__` and `__exit__`.

    Module calls are seen by per-module hooks, so that nothing outside the model is touched (scripted modules take no
    hooks; where there is one, a global hook sees its calls). A module that runs inside compiled or scripted code
    is not seen.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keep_inputs: bool = False,
        guard: Guarded = unguarded,
        hooked: bool = True,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """Hooks onto the modules; `guard` calls what the hooks do, `clock` counts the operators of a recorded pass.

        Without `hooked` no module gets a hook: the caller knows which module runs.
        """
        self._names = {id(module): name for name, module in model.named_modules()} if hooked else {}
        self._modules = list(model.modules()) if hooked else []
        self.called: set[int] = set()  # the ids of modules that were called
        self.frames: list[Frame] = []  # all calls of a recorded pass
        self._keep, self._clock = keep_inputs, clock
        self._guard = guard
        self.root = Frame(name="", module=model, parent=None)
        self.top = self.root

    def attach(self, undo: ExitStack) -> None:
        """Hooks onto the modules until `undo` is closed."""
        if any(isinstance(m, torch.jit.ScriptModule) for m in self._modules):
            scripted = self._push_scripted, self._pop_scripted
            push, pop = (in_this_thread(functools.partial(self._guard, f)) for f in scripted)
            undo.callback(every.register_module_forward_pre_hook(push).remove)
            undo.callback(every.register_module_forward_hook(pop, always_call=True).remove)
        push, pop = (in_this_thread(functools.partial(self._guard, f)) for f in (self.push, self._pop))
        for module in (m for m in self._modules if not isinstance(m, torch.jit.ScriptModule)):
            undo.callback(module.register_forward_pre_hook(push, with_kwargs=True, prepend=True).remove)
            undo.callback(module.register_forward_hook(pop, always_call=True).remove)

    def begun(self, args: Args, kwargs: Kwargs) -> None:
        """Before `attach`: the model's own call has begun already, and its end is of no interest."""
        self._modules = [m for m in self._modules if m is not self.root.module]
        self.push(self.root.module, args, kwargs)

    def push(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """A call of this module begins."""
        inputs = tuple(tensors((args, kwargs)))
        batch = next((x.shape[0] for x in inputs if x.ndim > 1), 0)
        self.called.add(id(module))
        self.top = Frame(
            name=self._names[id(module)],
            module=module,
            parent=self.top,
            batch=batch,
            inputs=inputs if self._keep else (),
            since=0 if self._clock is None else self._clock(),
        )
        if self._clock is not None:
            self.frames.append(self.top)

    def _push_scripted(self, module: nn.Module, args: Args) -> None:
        if isinstance(module, torch.jit.ScriptModule) and id(module) in self._names:
            self.push(module, args, {})

    def _pop_scripted(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self._pop(module, args, output)

    def _pop(self, module: nn.Module, args: object, output: object) -> None:
        # A frame above this one was left by an exception inside a module without hooks.
        for frame in self.top.line():
            if frame.module is module and frame.parent is not None:
                self.top = frame.parent
                return


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            left.extend(reversed(item.values()))
        elif isinstance(item, (tuple, list)):
            left.extend(reversed(item))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested tuples, lists and dicts, none of a class of its own, with all else in them changed."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(x, change) for x in value])
    return {name: mapped(x, change) for name, x in value.items()} if kind is dict else change(value)
