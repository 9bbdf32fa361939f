"""A remedy's state in the optimizer's parameter groups, so that every checkpoint of the optimizer contains it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from qkeel.errors import InvalidValueError, caution
from qkeel.handle import State, check_taken
from qkeel.patching.optimizers import in_real_steps

#: The entry in the first parameter group: the state of each remedy by name.
GROUP_KEY = "qkeel"
#: The names of the states in use.
_LIVE: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()


@final
class SavedState:
    """The tensors of a remedy, which the optimizer saves and loads with its own state.

    A parameter group may hold any entries besides the options. Plain saving, trainers and torch.distributed.checkpoint
    keep them, and an optimizer without the remedy ignores them. (A new key at the top of the state is lost by
    torch.distributed.checkpoint, and it expects a parameter's own state only after the first step.) A state that the
    optimizer has loaded before the remedy was applied is taken over. If a later state lacks that of the remedy, this is
    said in the next step.

    Args:
        optimizer: the optimizer.
        remedy: the remedy's name.
        values: the tensors by name, which the remedy changes in place.
        after_load: called when the tensors have received the values of a checkpoint.

    Example:
        >>> import torch
        >>> weight, factor = torch.nn.Parameter(torch.ones(2)), torch.tensor([0.5])
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> saved = SavedState(optimizer, "lalr", {"weight": factor})
        >>> optimizer.state_dict()["param_groups"][0]["qkeel"]
        {'lalr': {'weight': tensor([0.5000])}}
        >>> saved.remove()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        remedy: str,
        values: Mapping[str, Tensor],
        after_load: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer, self._remedy = weakref.ref(optimizer), remedy
        self._values, self._after_load = dict(values), after_load
        live = _LIVE.setdefault(optimizer, set())
        # Two models that share an optimizer may have the same names of weights; the order of application tells them
        # apart.
        self._name = remedy
        while self._name in live:
            self._name += "'"
        live.add(self._name)
        self._is_missing = False
        self._take(optimizer)
        self._hooks = [
            optimizer.register_load_state_dict_post_hook(self._note_load),
            optimizer.register_step_pre_hook(in_real_steps(self._tell)),
        ]

    def remove(self) -> None:
        """Takes the state out of the parameter groups."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        _LIVE[optimizer].discard(self._name)
        for group in optimizer.param_groups:
            group.get(GROUP_KEY, {}).pop(self._name, None)
            if not group.get(GROUP_KEY, True):
                del group[GROUP_KEY]

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
        self._is_missing = False

    def _copy(self, state: Mapping[str, Tensor]) -> None:
        for name, x in self._values.items():
            x.copy_(state[name])
        self._after_load()

    def _note_load(self, optimizer: Optimizer) -> None:
        self._is_missing = not self._take(optimizer)

    def _take(self, optimizer: Optimizer) -> bool:
        """Takes over the values in the parameter groups and puts the live tensors there. Returns whether there were
        any that fit."""
        saved: Mapping[str, Tensor] = {}
        for group in optimizer.param_groups:
            saved = group.get(GROUP_KEY, {}).pop(self._name, saved)
        shapes = {name: value.shape for name, value in self._values.items()}
        fits = shapes == {name: value.shape for name, value in saved.items()}
        if fits:
            self._copy(saved)
        optimizer.param_groups[0].setdefault(GROUP_KEY, {})[self._name] = self._values
        return fits

    def _tell(self, *_: object) -> None:
        if self._is_missing:
            self._is_missing = False
            caution(
                f"the checkpoint that this optimizer has loaded contains no state of {self._remedy} for these weights, "
                f"so {self._remedy} goes on from its own. If the checkpoint was written with {self._remedy}, load what "
                "handle.state() returned then, with handle.load(state)"
            )
