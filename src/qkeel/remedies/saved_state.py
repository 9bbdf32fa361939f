"""A remedy's state in the optimizer's parameter groups, so that every checkpoint of the optimizer contains it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.distributed.layout import local
from qkeel.errors import InvalidValueError, caution
from qkeel.handle import State, check_taken
from qkeel.patching.optimizers import in_real_steps, steps_taken

#: The entry in the first parameter group: the state of each remedy by name.
GROUP_KEY = "qkeel"
#: The names of the states in use.
_LIVE: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()


def reserve(optimizer: Optimizer, remedy: str) -> None:
    """Puts an empty state of a remedy into the parameter groups, unless there is one.

    torch.distributed.checkpoint reads only the entries that it finds there."""
    optimizer.param_groups[0].setdefault(GROUP_KEY, {}).setdefault(remedy, ())


def release(optimizer: Optimizer, remedy: str) -> None:
    """Takes a state out of the parameter groups, unless it is in use."""
    if remedy in _LIVE.get(optimizer, ()):
        return
    for group in optimizer.param_groups:
        group.get(GROUP_KEY, {}).pop(remedy, None)
        if not group.get(GROUP_KEY, True):
            del group[GROUP_KEY]


@final
class SavedState:
    """The tensors of a remedy, which the optimizer saves and loads with its own state.

    A parameter group may hold any entries besides the options. Plain saving, trainers and torch.distributed.checkpoint
    keep them, and an optimizer without the remedy ignores them. (A new key at the top of the state is lost by
    torch.distributed.checkpoint, and it expects a parameter's own state only after the first step.) A state that the
    optimizer has loaded before the remedy was applied is taken over. If a later state lacks that of the remedy, or if
    the optimizer has taken steps and has no state of the remedy, this is said in the next step.

    Args:
        optimizers: the optimizer that saves the tensors, and all others that the remedy was applied with.
        remedy: the remedy's name.
        values: the tensors by name, which the remedy changes in place.
        after_load: called when the tensors have received the values of a checkpoint.

    Example:
        >>> import torch
        >>> weight, factor = torch.nn.Parameter(torch.ones(2)), torch.tensor([0.5])
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> saved = SavedState([optimizer], "lalr", {"weight": factor})
        >>> optimizer.state_dict()["param_groups"][0]["qkeel"]
        {'lalr': (('weight', [0.5]),)}
        >>> saved.remove()
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        remedy: str,
        values: Mapping[str, Tensor],
        after_load: Callable[[], None] = lambda: None,
    ) -> None:
        optimizer, self._remedy = optimizers[0], remedy
        self._optimizer = weakref.ref(optimizer)
        self._optimizers = weakref.WeakSet(optimizers)
        self._values, self._after_load = dict(values), after_load
        live = _LIVE.setdefault(optimizer, set())
        # Two models that share an optimizer may have the same names of weights; the order of application tells them
        # apart.
        self._name = remedy
        while self._name in live:
            self._name += "'"
        live.add(self._name)
        #: Why the remedy has no state from before, until this is said.
        self._missing = ""
        if not self._take(optimizer) and has_stepped(optimizer):
            self._missing = (
                f"{remedy} was applied to an optimizer that has taken steps and contains no state of {remedy}, so "
                f"{remedy} starts from the weights as they were then; if these steps were taken with {remedy} and "
                "loaded by torch.distributed.checkpoint, put the line qkeel.apply(...) before the line that loads, or "
                "load what handle.state() returned then, with handle.load(state)"
            )
        # A remedy that waits for a pass cannot tell which of its optimizers will save the state.
        for other in optimizers:
            reserve(other, self._name)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._pack),
            optimizer.register_load_state_dict_post_hook(self._note_load),
            optimizer.register_step_pre_hook(in_real_steps(self._tell)),
        ]

    def remove(self) -> None:
        """Takes the state out of the parameter groups."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            _LIVE[optimizer].discard(self._name)
        for member in self._optimizers:
            release(member, self._name)

    def state(self) -> State:
        """Returns copies of the tensors."""
        return {name: x.clone() for name, x in self._values.items()}

    def load(self, state: State) -> None:
        """Continues from what `state` returned.

        Raises:
            InvalidValueError: the state is that of another model or remedy.
        """
        check_taken(state, self._values, self._remedy)
        for name, x in self._values.items():
            if name not in state or state[name].shape != x.shape:
                shape = tuple(state[name].shape) if name in state else "none"
                raise InvalidValueError(
                    f"expected a state of {self._remedy} with {tuple(x.shape)} values for {name}, got {shape}; load "
                    "the state of the same model and remedy"
                )
        self._copy(state)
        self._missing = ""

    def _copy(self, state: Mapping[str, Tensor]) -> None:
        for name, x in self._values.items():
            x.copy_(state[name])
        self._after_load()

    def _pack(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Makes the values one entry of numbers in the state that the optimizer returns.

        To torch.distributed.checkpoint a tuple is one object, which it reads into an empty one too; tensors it reads
        only by their names, and in such an object it would put them on the device that they were saved from."""
        values = tuple((name, x.tolist()) for name, x in self._values.items())
        for group in state["param_groups"]:
            if self._name in group.get(GROUP_KEY, {}):
                group[GROUP_KEY] = {**group[GROUP_KEY], self._name: values}

    def _note_load(self, optimizer: Optimizer) -> None:
        self._missing = ""
        if not self._take(optimizer):
            self._missing = (
                f"the checkpoint that this optimizer has loaded contains no state of {self._remedy} for these weights, "
                f"so {self._remedy} goes on from its own. If the checkpoint was written with {self._remedy}, load what "
                "handle.state() returned then, with handle.load(state)"
            )

    def _take(self, optimizer: Optimizer) -> bool:
        """Takes over the values in the parameter groups and puts the live tensors there. Returns whether there were
        any that fit."""
        packed: Any = ()
        for group in optimizer.param_groups:
            packed = group.get(GROUP_KEY, {}).pop(self._name, packed)
        saved = {
            name: value
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in dict(packed).items()
        }
        shapes = {name: value.shape for name, value in self._values.items()}
        fits = shapes == {name: value.shape for name, value in saved.items()}
        if fits:
            self._copy(saved)
        optimizer.param_groups[0].setdefault(GROUP_KEY, {})[self._name] = self._values
        return fits

    def _tell(self, *_: object) -> None:
        missing, self._missing = self._missing, ""
        if missing:
            caution(missing)


def has_stepped(optimizer: Optimizer) -> bool:
    """True if the optimizer's state is that of an optimizer that has taken steps, not one that is only initialised."""
    # SGD and Muon keep no count of steps, but momenta, which are zero before the first.
    return steps_taken(optimizer) > 0 or any(
        "step" not in state and isinstance(x, Tensor) and bool(local(x).any())
        for state in optimizer.state.values()
        for x in state.values()
    )
