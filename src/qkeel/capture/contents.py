"""Keeps what Python objects hold, so that it can be put back."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.patching.autograd import version_of


class ObjectContents:
    """The contents of the Python objects among some values: lists, dicts, sets and the attributes of plain objects,
    such as a cache of keys that a pass fills.

    Modules, classes and functions are left out. Tensors are kept as they are, or copied if `tensors` is True and they
    are small. The attributes of an object are kept if `owns` is true for it.
    """

    def __init__(
        self,
        values: object,
        *,
        tensors: bool = False,
        owns: Callable[[object], bool] = lambda _: True,
    ) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        known: set[int] = set()
        waiting = [values]
        while waiting and len(known) < _MOST_OBJECTS:
            x = waiting.pop()
            if isinstance(x, _WITHOUT_CONTENTS) or id(x) in known:
                continue
            known.add(id(x))
            if isinstance(x, Tensor):
                copied = sum(value.numel() for _, value, _ in self._tensors)
                if tensors and _is_plain(x) and x.numel() + copied <= _MOST_NUMBERS:
                    self._tensors.append((x, x.detach().clone(), version_of(x)))
                continue
            if (
                isinstance(x, (list, dict, set, tuple, collections.deque))
                and len(x) > _MOST_OBJECTS
            ):
                continue
            if type(x) in CONTAINERS:
                self._contents.append((x, copy.copy(x)))
            if isinstance(x, (list, tuple, set, collections.deque)):
                waiting += x
            elif isinstance(x, Mapping):
                waiting += x.values()
            elif isinstance(attributes := getattr(x, "__dict__", None), dict) and owns(
                x
            ):
                self._contents.append((attributes, dict(attributes)))
                waiting += attributes.values()

    def restore(self) -> None:
        """Gives the objects the contents that they had."""
        with torch.no_grad():
            for x, value, version in self._tensors:
                if version_of(x) != version:
                    x.copy_(value)
        for x, contents in self._contents:
            if isinstance(x, dict):
                if [*map(id, x), *map(id, x.values())] != [
                    *map(id, contents),
                    *map(id, contents.values()),
                ]:
                    x.clear()
                    x.update(contents)
            elif [*map(id, x)] != [*map(id, contents)]:
                x.clear()
                x.update(contents) if isinstance(x, set) else x.extend(contents)


def _is_plain(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and not (x.is_meta or x.is_inference())
    )


_MOST_OBJECTS, _MOST_NUMBERS = 1000, 1 << 22
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
CONTAINERS = (list, set, collections.deque, *_DICTS)
_WITHOUT_CONTENTS = (
    nn.Module,
    type,
    FunctionType,
    ModuleType,
    str,
    int,
    float,
    torch.dtype,
    torch.device,
)
