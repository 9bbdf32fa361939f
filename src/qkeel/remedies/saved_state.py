"""States in the optimizer's parameter groups, so that every checkpoint of the optimizer contains them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.distributed.layout import local
from qkeel.errors import InvalidValueError, QkeelError, caution
from qkeel.handle import Handle, State, check_taken
from qkeel.patching.optimizers import in_real_steps, steps_taken

#: The entry in the first parameter group: the states of remedies and of an autopilot by name.
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
class GroupEntry:
    """A state that the optimizer saves and loads with its own, as an entry of its first parameter group.

    A parameter group may hold any entries besides the options. Plain saving, trainers and torch.distributed.checkpoint
    keep them, and an optimizer without qkeel ignores them. (A new key at the top of the state is lost by
    torch.distributed.checkpoint, and it expects a parameter's own state only after the first step.) A state that the
    optimizer has loaded before is taken over. If a later one lacks this state, or if the optimizer has taken steps and
    has none, this is said in the next step.

    Args:
        optimizers: the optimizer that saves the state, and all others that may be asked for it.
        name: the name of the state, which that of another model in the same optimizer gets a stroke behind.
        pack: returns what a checkpoint holds: a string, or a tuple of numbers. To torch.distributed.checkpoint it is
            one object, which it reads into an empty one too; tensors it reads only by their names, and in such an object
            it would put them on the device that they were saved from.
        take: continues from what a checkpoint held; False if that is no state that fits.
        live: what stands in the group between checkpoints.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        name: str,
        pack: Callable[[], object],
        take: Callable[[Any], bool],
        live: object = (),
    ) -> None:
        optimizer, self._kind = optimizers[0], name
        self._optimizer = weakref.ref(optimizer)
        self._optimizers = weakref.WeakSet[Optimizer]()
        self._pack, self._take, self._live = pack, take, live
        names = _LIVE.setdefault(optimizer, set())
        # Two models that share an optimizer may have the same names of weights; the order of application tells them
        # apart.
        while name in names:
            name += "'"
        names.add(name)
        self._name = name
        #: Why there is no state from before, until this is said.
        self._missing = ""
        self._look(
            optimizer,
            f"{self._kind} was applied to an optimizer that has taken steps and contains no state of {self._kind}, so "
            f"{self._kind} starts from the weights as they were then; if these steps were taken with {self._kind} and "
            "loaded by torch.distributed.checkpoint, put the line that applies it before the line that loads, or "
            "load what handle.state() returned then, with handle.load(state)"
            if has_stepped(optimizer)
            else "",
        )
        # A remedy that waits for a pass cannot tell which of its optimizers will save the state.
        for other in optimizers:
            self.add(other)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._write),
            optimizer.register_load_state_dict_post_hook(self._note_load),
            optimizer.register_step_pre_hook(in_real_steps(self._tell)),
        ]

    def add(self, optimizer: Optimizer) -> None:
        """Adds another optimizer that may be asked for the state."""
        self._optimizers.add(optimizer)
        reserve(optimizer, self._name)

    def remove(self) -> None:
        """Takes the state out of the parameter groups."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            _LIVE[optimizer].discard(self._name)
        for member in self._optimizers:
            release(member, self._name)

    def is_known(self) -> None:
        """Notes that the state came by another way, so that none is missing."""
        self._missing = ""

    def _write(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Puts the packed state into the state that the optimizer returns."""
        packed = self._pack()
        for group in state["param_groups"]:
            if self._name in group.get(GROUP_KEY, {}):
                group[GROUP_KEY] = {**group[GROUP_KEY], self._name: packed}

    def _note_load(self, optimizer: Optimizer) -> None:
        self._look(
            optimizer,
            f"the checkpoint that this optimizer has loaded contains no state of {self._kind} for these weights, "
            f"so {self._kind} goes on from its own. If the checkpoint was written with {self._kind}, load what "
            "handle.state() returned then, with handle.load(state)",
        )

    def _look(self, optimizer: Optimizer, missing: str) -> None:
        """Takes over what is packed in the parameter groups, and puts what lives there; if nothing is there that fits,
        `missing` is said in the next step."""
        packed: Any = ()
        for group in optimizer.param_groups:
            packed = group.get(GROUP_KEY, {}).pop(self._name, packed)
        try:
            if self._take(packed):
                missing = ""
        except QkeelError as error:
            missing = f"the state of {self._kind} in the optimizer's checkpoint does not fit, so {self._kind} goes on from "
            missing += f"its own: {error}"
        self._missing = missing
        optimizer.param_groups[0].setdefault(GROUP_KEY, {})[self._name] = self._live

    def _tell(self, *_: object) -> None:
        missing, self._missing = self._missing, ""
        if missing:
            caution(missing)


@final
class SavedState(Handle):
    """The tensors of a remedy, which the optimizer saves and loads with its own state; see `GroupEntry`.

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
        self._remedy = remedy
        self._values, self._after_load = dict(values), after_load
        self._entry = GroupEntry(
            optimizers, remedy, self._pack, self._take, self._values
        )
        super().__init__(self._entry.remove)

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
        self._entry.is_known()

    def _copy(self, state: Mapping[str, Tensor]) -> None:
        for name, x in self._values.items():
            x.copy_(state[name])
        self._after_load()

    def _pack(self) -> object:
        return tuple((name, x.tolist()) for name, x in self._values.items())

    def _take(self, packed: Any) -> bool:
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
        return fits


def has_stepped(optimizer: Optimizer) -> bool:
    """True if the optimizer's state is that of an optimizer that has taken steps, not one that is only initialised."""
    # SGD and Muon keep no count of steps, but momenta, which are zero before the first.
    return steps_taken(optimizer) > 0 or any(
        "step" not in state and isinstance(x, Tensor) and bool(local(x).any())
        for state in optimizer.state.values()
        for x in state.values()
    )
