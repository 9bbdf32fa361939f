"""Keeps what Python objects and tensors hold, so that it can be put back."""

from __future__ import annotations

import collections
import copy
import functools
import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.errors import caution
from qkeel.patching.autograd import version_of
from qkeel.patching.held_objects import CONTAINERS, Kind, kind_of, reachable

# A long cache of keys: 16 MB of float32 are copied at most.
_MOST_NUMBERS = 1 << 22
# A gigabyte of float32: less than the gradients and the optimizer's state of the same weights take later on.
_MOST_WEIGHTS = 1 << 28


class ObjectContents:
    """The contents of the Python objects among some values: lists, dicts, sets, arrays, random generators and the
    attributes of plain objects, such as a cache of keys that a pass fills.

    Modules, classes and functions are left out. Tensors and NumPy's arrays are kept as they are, or copied if `tensors`
    is True and they are small. The attributes of an object are kept if `owns` is true for it.
    """

    def __init__(
        self,
        values: object,
        *,
        tensors: bool = False,
        owns: Callable[[object], bool] = lambda _: True,
    ) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._restores: list[Callable[[], object]] = []
        small: list[Tensor] = []
        room = _MOST_NUMBERS
        for x in reachable(values, owns):
            kind = kind_of(type(x))
            if type(x) in CONTAINERS:
                self._contents.append((x, copy.copy(x)))
            elif kind is Kind.ATTRIBUTES:
                attributes = getattr(x, "__dict__", None)
                if isinstance(attributes, dict) and owns(x):
                    self._contents.append((attributes, dict(attributes)))
            elif isinstance(x, Tensor):
                if tensors and _is_plain(x) and x.numel() <= room:
                    small.append(x)
                    room -= x.numel()
            elif isinstance(x, np.ndarray):
                if tensors and x.dtype != object and x.size <= room:
                    self._restores.append(functools.partial(np.copyto, x, x.copy()))
                    room -= x.size
            elif kind is Kind.LEAF:
                self._restores.append(_stream(x))
        self._restore_values = keep_values(small)

    def is_unchanged(self) -> bool:
        """True if containers and attributes hold what they held; what tensors hold is not compared."""
        return not self._restores and all(is_same(*held) for held in self._contents)

    def restore(self) -> None:
        """Gives the objects the contents that they had."""
        self._restore_values()
        for restore in self._restores:
            restore()
        for x, contents in self._contents:
            # In place, since the model and its caller refer to the container itself.
            if not is_same(x, contents):
                x.clear()
                x.extend(contents) if isinstance(
                    x, (list, collections.deque)
                ) else x.update(contents)


def _stream(generator: Any) -> Callable[[], object]:
    """Returns a function that puts a random generator back to where it is now."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    # Those of torch and NumPy's older ones.
    return functools.partial(generator.set_state, generator.get_state())


def keep_parameters(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Returns a function that restores the values and gradients of parameters, which some models write in their
    forward: momentum encoders, weights that are kept normalised.

    Values of models that are too large to be copied are not restored, but a warning says that they were written.
    """
    # Weights computed for torch.func.functional_call have no gradients of their own.
    own = [p for p in parameters if _is_plain(p) and p.is_leaf]
    kept = [(p, p.detach(), p.grad, version_of(p)) for p in own]
    is_small = sum(p.numel() for p, *_ in kept) <= _MOST_WEIGHTS
    restore_values = keep_values(data for _, data, *_ in kept) if is_small else None

    def restore() -> None:
        # Weights that were freed in the meantime, as sharded models do, have no values to compare.
        if not all(_has_memory(data) for _, data, *_ in kept):
            return
        for p, data, gradient, _ in kept:
            # Some replace the data, others write into it.
            if p.data_ptr() != data.data_ptr():
                p.data = data
            if p.grad is not gradient:
                p.grad = gradient
        if restore_values is not None:
            restore_values()
        elif any(version_of(p) != version for p, *_, version in kept):
            caution(
                "the model writes its own weights in forward, and did so in the passes of the search for attention too; "
                "it is too large for a copy. Search in a process of its own, and give sites= what find_sites found"
            )

    return restore


def _has_memory(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() >= x.numel() * x.element_size()


def is_same(x: Any, contents: Any) -> bool:
    """True if two containers hold the same objects in the same order."""
    if len(x) != len(contents) or not all(map(operator.is_, x, contents)):
        return False
    return not isinstance(x, dict) or all(
        map(operator.is_, x.values(), contents.values())
    )


def keep_values(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Returns a function that restores the values of tensors. Tensors on the meta device have none, and inference
    tensors cannot change."""
    kept = [
        (x, x.detach().clone(), version_of(x))
        for x in tensors
        if not (x.is_inference() or x.is_meta)
    ]

    def restore() -> None:
        for x, values, version in kept:
            # Batch norm's kernels write their averages without raising versions, so plain tensors are compared. Sparse,
            # nested and other kinds can't be, but a write to them raises their version.
            is_changed = version_of(x) != version
            if is_changed or (_is_plain(x) and not torch.equal(x, values)):
                with torch.no_grad():
                    x.copy_(values)

    return restore


def _is_plain(x: Tensor) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_meta or x.is_inference())
    )
