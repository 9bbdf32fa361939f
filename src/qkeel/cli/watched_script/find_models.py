"""Finds the models that a program trains, from the optimizers that appear in it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import final

from torch import nn
from torch.optim import Optimizer

from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.monitor.monitor import Monitor, watched
from qkeel.patching.forward_passes import unwrapped
from qkeel.patching.module_tables import is_made, submodules_of
from qkeel.patching.optimizer_hooks import StepHooks, when_made

LEAST_SHARE = 0.1  # of an optimizer's parameters that a model must hold to be watched besides a larger one

LOOKS = 3  # steps of an optimizer after which its model is looked for, if there was none to be found before


@final
class ModelFinder(Handle):
    """Calls `start(model, optimizer)` for each model that an optimizer trains, when the optimizer is made.

    The models are those that hold its parameters, found among all living objects; so a copy that averages weights is
    not among them. Where none does yet, they are looked for again after the optimizer's first step. A module whose
    passes are not seen until the first step, such as a container whose forward nobody calls, gives way to the part of
    it that holds the same parameters. Two optimizers of one model make one Monitor, whose steps the first one counts;
    one made after that has stepped is a new phase of training, with a Monitor of its own.

    Optimizers and models are held weakly. In processes that the program starts nothing is looked for.
    """

    def __init__(
        self,
        start: Callable[[nn.Module, Optimizer], Monitor],
        of_script: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
    ) -> None:
        """Takes what starts a watch, and what is called once for a model that the script watches itself."""
        self.optimizers = 0  # made so far
        self._start, self._of_script = start, of_script
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that the script watches itself
        self._pid = os.getpid()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._watches: list[_Watch] = []
        made = when_made(lambda optimizer: self._safely(self._made, optimizer))
        before, after = self._before_step, self._after_step
        steps = StepHooks(lambda o: self._safely(before, o), lambda o: self._safely(after, o))
        super().__init__(compose([made, steps]).remove)

    def _made(self, optimizer: Optimizer) -> None:
        self.optimizers += 1
        self._steps[optimizer] = 0
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        self._watches = [watch for watch in self._watches if watch.monitor() is not None]
        for chain in chains(optimizer):
            old = next((w for w in self._watches if any(w.model() is module for module in chain)), None)
            if old is None:
                own = next(filter(watched, chain), None)
                if own is None:
                    self._begin(chain, optimizer)
                elif own not in self._seen:
                    self._seen.add(own)
                    self._of_script(own, optimizer)
            elif not self._steps[optimizer] and self._over(old):
                old.end()
                self._watches.remove(old)
                self._begin(chain, optimizer)

    def _over(self, watch: _Watch) -> bool:
        """Returns whether an optimizer made now begins a new phase."""
        first = watch.optimizer()
        return first is None or self._steps[first] > 0

    def _begin(self, chain: list[nn.Module], optimizer: Optimizer) -> None:
        monitor = self._start(chain[0], optimizer)
        monitor.steps = self._steps[optimizer]
        self._watches.append(_Watch(chain, optimizer, monitor))

    def _before_step(self, optimizer: Optimizer) -> None:
        for watch in self._watches:
            if watch.optimizer() is optimizer and watch.mistaken:
                watch.end()  # before it warns that it sees nothing; the part begins with the next step

    def _after_step(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        mine = [watch for watch in self._watches if watch.optimizer() is optimizer]
        for watch in mine:
            if watch.mistaken:
                self._watches.remove(watch)
                self._begin(watch.inwards(), optimizer)
        if not mine and steps <= LOOKS:
            self._look(optimizer)

    def _safely(self, act: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if os.getpid() != self._pid or not self.active:
            return
        try:
            act(optimizer)
        except Exception as error:
            self.remove()
            caution(f"qkeel looks for no more models to watch: {type(error).__name__}: {error}. The script runs on")


class _Watch:
    """A model under watch, from outside inwards the modules that may be meant by it, and whose steps count."""

    def __init__(self, chain: list[nn.Module], optimizer: Optimizer, monitor: Monitor) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.monitor = weakref.ref(monitor)
        self._chain = [weakref.ref(module) for module in chain]

    def model(self) -> nn.Module | None:
        """The module that is watched, if it still lives."""
        return self._chain[0]()

    @property
    def mistaken(self) -> bool:
        """Returns whether its passes are not seen, and there is a part of it that may be called instead."""
        monitor = self.monitor()
        return monitor is not None and not monitor.passes and len(self._chain) > 1

    def inwards(self) -> list[nn.Module]:
        """The modules that are left when the outermost is not the one."""
        return [module for ref in self._chain[1:] if (module := ref()) is not None]

    def end(self) -> None:
        """Stop watching it."""
        monitor = self.monitor()
        if monitor is not None:
            monitor.close()


def chains(optimizer: Optimizer) -> list[list[nn.Module]]:
    """The models that hold an optimizer's parameters, the one with most of them first.

    Each is a list of modules that hold the same of them: the outermost one, then its part that holds them all, and so
    on. Wrappers that hand their call on to a module are left out: to see that module's passes is to see theirs.
    """
    left = {id(p) for group in optimizer.param_groups for p in group["params"]}
    least = LEAST_SHARE * len(left)
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and is_made(thing)]
    parts = {id(part) for module in modules for part in _parts(module)}
    roots = {id(root): root for root in (_model(m) for m in modules if id(m) not in parts)}
    sizes = {key: sum(1 for _ in root.parameters()) for key, root in roots.items()}
    held = {key: left & {id(p) for p in root.parameters()} for key, root in roots.items()}
    found = []
    for key in sorted(roots, key=lambda key: (-len(held[key]), sizes[key], type(roots[key]).__qualname__)):
        own = held[key] & left
        if not own or len(own) < least:
            continue
        left -= own
        found.append(_inwards(roots[key], own))
    return found


def _inwards(module: nn.Module, own: set[int]) -> list[nn.Module]:
    chain = []
    part: nn.Module | None = module
    while part is not None:
        if type(part).forward is not nn.Module.forward:  # ModuleList and the like can't be called
            chain.append(part)
        part = next((unwrapped(p) for p in _parts(part) if own <= {id(x) for x in p.parameters()}), None)
    return chain or [module]


def _model(module: nn.Module) -> nn.Module:
    try:
        return unwrapped(module)
    except AttributeError:  # a wrapper that is still being made
        return module


def _parts(module: nn.Module) -> list[nn.Module]:
    return [part for part in submodules_of(module).values() if part is not None]
