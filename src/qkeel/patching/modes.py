"""Modes: objects that see every call of a torch function or operator in a thread while they are active."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _pop_saved_tensors_default_hooks as _pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as _push_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _pop_torch_function_stack,
    _push_mode,
    _push_on_torch_function_stack,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from qkeel.patching.sharded_models import collective_of

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

# Attributes and methods that compute nothing. They make up two thirds of all calls, and the mode passes them through.
_GETTERS = (
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_nested",
    "is_quantized",
)
_GETTERS += ("is_sparse", "layout", "ndim", "requires_grad", "shape")
_METHODS = (
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "numel",
    "size",
)
_METHODS += ("storage_offset", "stride")
ASKED = {getattr(Tensor, name).__get__ for name in _GETTERS} | {
    getattr(Tensor, name) for name in _METHODS
}


_CHECKPOINTS = "torch.utils.checkpoint"


_NOTHING = nullcontext()


def outside_checkpoints() -> AbstractContextManager[None]:
    """A context for computations that gradient checkpointing would not repeat, since they do not belong to the pass.

    A non-reentrant checkpoint counts the tensors that are saved for backward, and a selective one numbers the operators
    that run; both compare this with the recomputation. Other hooks stay, such as those that save tensors on the CPU, and
    other modes unless a selective checkpoint is among them.
    """
    # Nearly always, and every pass asks.
    if _top_hooks(True) is None and not _len_torch_dispatch_stack():
        return _NOTHING
    return _without_checkpoints()


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    hooks = []
    modes = _get_current_dispatch_mode_stack()
    if _CHECKPOINTS not in [type(mode).__module__ for mode in modes]:
        modes = []
    while (top := _top_hooks(True)) is not None and top[0].__module__ == _CHECKPOINTS:
        hooks.append(top)
        _pop_hooks()
    for _ in modes:
        _pop_dispatch_mode()
    try:
        yield
    finally:
        for mode in modes:
            _push_dispatch_mode(mode)
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)


class CollectiveMode(TorchDispatchMode):
    """A mode that calls `before` with the ranks and the name of every collective that is about to start."""

    def __init__(self, before: Callable[[tuple[int, ...], str], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(
        self,
        func: Function,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # By its name, because importing DTensor takes half as long as importing torch.
        if any(kind.__name__ == "DTensor" for kind in types):
            # a DTensor's operators on its local parts are dispatched to this mode
            # again.
            return NotImplemented
        if (ranks := collective_of(func, args)) is not None:
            self._before(ranks, str(func))
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=1024)
def function_name(function: Function) -> str:
    """Returns the name of a torch function or operator without its outer underscores and overload."""
    return getattr(function, "__name__", "").partition(".")[0].strip("_")


@contextmanager
def without_modes(kind: type[TorchFunctionMode] | None = None) -> Iterator[None]:
    """Disables all modes of this class, or else all of qkeel's, inside the context, wherever they are in the stack."""
    before = _get_current_function_mode_stack()
    others = [mode for mode in before if not isinstance(mode, kind or ())]
    if kind is None:
        others = [x for x in before if not type(x).__module__.startswith("qkeel.")]
    _enter_only(others)
    try:
        yield
    finally:
        _enter_only(before)


def _enter_only(modes: list[TorchFunctionMode]) -> None:
    while _get_current_function_mode() is not None:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


class ReadingMode(TorchFunctionMode):
    """A mode of qkeel's that makes each call as it came and reads it. Modes of others may make another call."""


def only_reading_modes() -> bool:
    """True if all modes that are active in this thread only read calls."""
    modes = _get_current_function_mode_stack()
    return all([isinstance(mode, ReadingMode) for mode in modes])


# Returns how many function modes are active in this thread.
number_of_modes: Callable[[], int] = torch._C._len_torch_function_stack


def push_mode(mode: TorchFunctionMode) -> None:
    """Enters a mode without calling its `__enter__`; `take_off` leaves it."""
    _push_on_torch_function_stack(mode)


def take_off(mode: TorchFunctionMode) -> None:
    """Removes a mode from the stack, even from below modes that other code has not left."""
    top = (
        _pop_torch_function_stack()
        if _get_current_function_mode() is not None
        else None
    )
    if top is mode or top is None:
        return
    take_off(mode)
    _push_mode(top)
