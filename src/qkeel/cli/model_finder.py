"""Finds the models that a program trains, from the optimizers that appear in it."""

from __future__ import annotations

import dataclasses
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
from qkeel.patching.forward import in_extra_pass, unwrapped
from qkeel.patching.module_tables import is_made, submodules_of
from qkeel.patching.optimizers import (
    StepHooks,
    shares_groups,
    steps_taken,
    when_made,
)
from qkeel.sites.module_copy import COPY_MARK

# The share of an optimizer's parameters that a model must hold to be watched beside a
# larger model.
LEAST_SHARE = 0.1

# The number of an optimizer's first steps after which its model is searched for, if
# none was found before.
LOOKS = 3


@final
class ModelFinder(Handle):
    """Calls `start(model, optimizer)` for each model that an optimizer trains, when the optimizer is created.

    The models are those that hold its parameters, found among all live objects, so a weight-averaging copy is
    excluded. If no model holds the parameters yet, the search is repeated after each of the optimizer's first `LOOKS`
    steps. A module without an observed pass by the first step, such as a container whose forward is never called, is
    replaced by its submodule that holds the same parameters. Two optimizers of one model share a Monitor, which counts
    the steps of the first optimizer; an optimizer created after the first has stepped begins a new phase of training,
    with a new Monitor.

    Optimizers and models are held by weak references. Processes that the program starts are not searched.
    """

    def __init__(
        self,
        start: Callable[[nn.Module, Optimizer], Monitor],
        of_script: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: (
            None
        ),
        further: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
        end: Callable[[Monitor], None] = Monitor.close,
    ) -> None:
        """Registers the hooks on optimizers.

        Args:
            start: called to start watching a model.
            of_script: called once for each model that the script watches itself.
            further: called for each further optimizer of a model that is already watched.
            end: called to stop watching a model before another watch of it begins.
        """
        # Number of optimizers created so far.
        self.optimizers = 0
        # Whether looking for models ended in an error, which was told.
        self.failed = False
        self._start, self._of_script = start, of_script
        self._further, self._end = further, end
        # Models that the script watches itself.
        self._theirs: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._pid = os.getpid()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int]
        self._steps = weakref.WeakKeyDictionary()
        self._watches: list[_Watch] = []
        creation = when_made(lambda optimizer: self._safely(self._made, optimizer))
        steps = StepHooks(
            lambda optimizer: self._safely(self._before_step, optimizer),
            lambda optimizer: self._safely(self._after_step, optimizer),
        )
        super().__init__(compose([creation, steps]).remove)

    def _made(self, optimizer: Optimizer) -> None:
        self.optimizers += 1
        self._steps[optimizer] = 0
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        self._watches = [w for w in self._watches if w.monitor() is not None]
        # An optimizer may hold the weights of several models, as a loss of two networks does.
        for chain in chains(optimizer):
            watches = [w for w in self._watches if any(w.model is m for m in chain)]
            theirs = next(filter(watched, chain), None)
            if not watches:
                if theirs is None:
                    self._begin(chain, optimizer)
                elif theirs not in self._theirs:
                    self._theirs.add(theirs)
                    self._of_script(theirs, optimizer)
            elif not self._steps[optimizer] and self._replaces(optimizer, watches[0]):
                # An optimizer that is made after steps of the first one begins a new phase of training, and one that
                # another makes of its own groups, as SAM does, takes the steps.
                for watch in watches:
                    watch.end(self._end)
                    self._watches.remove(watch)
                self._begin(chain, optimizer)
            elif watches[0].optimizer() is not optimizer:
                model, monitor = watches[0].model, watches[0].monitor()
                if model is not None:
                    self._further(model, optimizer)
                if monitor is not None:
                    monitor.add_optimizer(optimizer)

    def _replaces(self, optimizer: Optimizer, watch: _Watch) -> bool:
        first = watch.optimizer()
        if first is None or self._steps[first] > 0:
            return True
        return first is not optimizer and shares_groups(first, optimizer)

    def _begin(self, chain: list[nn.Module], optimizer: Optimizer) -> None:
        monitor = self._start(chain[0], optimizer)
        # An optimizer that keeps no count of its steps would make the monitor begin at 0.
        if self._steps[optimizer] and not steps_taken(optimizer):
            monitor.steps = self._steps[optimizer]
        self._watches.append(
            _Watch(
                chain=[weakref.ref(module) for module in chain],
                optimizer=weakref.ref(optimizer),
                monitor=weakref.ref(monitor),
            )
        )

    def _before_step(self, optimizer: Optimizer) -> None:
        for watch in self._watches:
            if watch.optimizer() is optimizer and watch.mistaken:
                # Before it warns that it saw nothing; the watch of the submodule begins with the next step.
                watch.end(self._end)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        mine = [watch for watch in self._watches if watch.optimizer() is optimizer]
        for watch in mine:
            if watch.mistaken:
                self._watches.remove(watch)
                inner = [ref() for ref in watch.chain[1:]]
                self._begin([m for m in inner if m is not None], optimizer)
        if not mine and steps <= LOOKS:
            self._look(optimizer)

    def _safely(self, act: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        # Workers of a data loader are forked with these hooks and must stay silent.
        if os.getpid() != self._pid or not self.active:
            return
        # A retrofit fits its gains with an optimizer of its own.
        if in_extra_pass():
            return
        try:
            act(optimizer)
        except Exception as error:
            self.remove()
            self.failed = True
            caution(
                f"qkeel stopped looking for models to watch: {type(error).__name__}: {error}. The script continues"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """A watched model: the modules that may be the one that is called, from the outermost inwards, with the optimizer
    whose steps are counted and the monitor."""

    chain: list[weakref.ref[nn.Module]]
    optimizer: weakref.ref[Optimizer]
    monitor: weakref.ref[Monitor]

    @property
    def model(self) -> nn.Module | None:
        """The module that is watched, if it still exists."""
        return self.chain[0]()

    @property
    def mistaken(self) -> bool:
        """True if no pass of the module was seen and it has a submodule that may be the one that is called."""
        monitor = self.monitor()
        return monitor is not None and not monitor.passes and len(self.chain) > 1

    def end(self, end: Callable[[Monitor], None]) -> None:
        """Stops watching the model."""
        if (monitor := self.monitor()) is not None:
            end(monitor)


def chains(optimizer: Optimizer) -> list[list[nn.Module]]:
    """The models that hold an optimizer's parameters, the model with the most of them first.

    Each is a list of modules that hold the same parameters: the outermost one, then its submodule that holds them all,
    and so on. Wrappers that only forward their call to a module are left out, because it is enough to watch that
    module.
    """
    left = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # Something that holds a few of the parameters, such as a head with a loss, is not the model.
    least = LEAST_SHARE * len(left)
    # The program's variables are not known, so models are sought among all objects. `type`, and not `isinstance`, which
    # asks the object for its class: proxies of other libraries answer by doing things.
    modules = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), nn.Module) and is_made(candidate)
    ]
    inner = {id(child) for module in modules for child in _children(module)}
    tops = [m for m in modules if id(m) not in inner and COPY_MARK not in vars(m)]
    roots = {id(root): root for root in map(_model, tops)}
    sizes = {key: sum(1 for _ in root.parameters()) for key, root in roots.items()}
    held = {
        key: left & {id(p) for p in root.parameters()} for key, root in roots.items()
    }

    def order(key: int) -> tuple[int, int, str]:
        # Of several that hold the same parameters, the one with the fewest others.
        return -len(held[key]), sizes[key], type(roots[key]).__qualname__

    models = []
    for key in sorted(roots, key=order):
        parameters = held[key] & left
        if parameters and len(parameters) >= least:
            left -= parameters
            models.append(_inwards(roots[key], parameters))
    return models


def _inwards(root: nn.Module, parameters: set[int]) -> list[nn.Module]:
    """The module and those inside it that hold these parameters too, from the outermost inwards."""
    chain = []
    module: nn.Module | None = root
    while module is not None:
        # Containers such as ModuleList can't be called.
        if type(module).forward is not nn.Module.forward:
            chain.append(module)
        children = [unwrapped(child) for child in _children(module)]
        holding = [c for c in children if parameters <= {id(p) for p in c.parameters()}]
        module = holding[0] if holding else None
    return chain or [root]


def _model(module: nn.Module) -> nn.Module:
    try:
        return unwrapped(module)
    except AttributeError:  # a wrapper that is still being made
        return module


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in submodules_of(module).values() if child is not None]
