"""The objects that some values hold: in containers, dataclasses and attributes."""

from __future__ import annotations

import collections
import enum
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Arguments may hold a whole data set.
MOST_OBJECTS = 10_000
_LISTS = (list, set, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
CONTAINERS = (*_LISTS, *_DICTS)
# What holds nothing that a pass can change; to look its type up is several times as fast as `isinstance`.
CONSTANTS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_WITHOUT_CONTENTS = (nn.Module, type, FunctionType, ModuleType, str, int, float)
_NUMPYS_STREAMS = (np.random.Generator, np.random.RandomState)
_LEAVES = (
    *(Tensor, np.ndarray, torch.Generator, random.Random),
    *_NUMPYS_STREAMS,
)


class Kind(enum.Enum):
    """What objects of a class hold."""

    NOTHING = enum.auto()
    LEAF = enum.auto()
    COLLECTION = enum.auto()
    ATTRIBUTES = enum.auto()


@functools.lru_cache(maxsize=4096)
def kind_of(kind: type) -> Kind:
    """What objects of a class hold, asked once for each class: a search meets thousands of objects."""
    if kind in CONSTANTS or issubclass(kind, _WITHOUT_CONTENTS):
        return Kind.NOTHING
    if issubclass(kind, _LEAVES):
        return Kind.LEAF
    is_collection = issubclass(kind, (tuple, frozenset, Mapping, *_LISTS))
    return Kind.COLLECTION if is_collection else Kind.ATTRIBUTES


def reachable(
    values: object, owns: Callable[[object], bool] = lambda _: True
) -> Iterator[Any]:
    """Yields the objects among some values: those in lists, dicts, sets and tuples, and in the attributes of objects
    for which `owns` is true. Modules, classes, functions and containers of many objects are left out."""
    visited: dict[int, Any] = {}
    waiting: list[Any] = [values]
    while waiting and len(visited) < MOST_OBJECTS:
        x = waiting.pop()
        kind = kind_of(type(x))
        if kind is Kind.NOTHING or id(x) in visited:
            continue
        # Kept, since a view of a mapping's values may be made anew under the same id.
        visited[id(x)] = x
        if kind is Kind.COLLECTION and len(x) > MOST_OBJECTS:
            continue
        yield x
        contents: Iterable[Any] = ()
        if kind is Kind.COLLECTION:
            contents = x.values() if isinstance(x, Mapping) else x
        elif kind is Kind.ATTRIBUTES and owns(x):
            attributes = getattr(x, "__dict__", None)
            if isinstance(attributes, dict):
                contents = attributes.values()
            else:
                slots = getattr(type(x), "__dataclass_fields__", ())
                contents = [getattr(x, name, None) for name in slots]
        # Most are numbers and names.
        waiting += [value for value in contents if type(value) not in CONSTANTS]


def tensors_within(values: object) -> list[Tensor]:
    """Returns the tensors among some values, each once; see `reachable`."""
    return [x for x in reachable(values) if isinstance(x, Tensor)]
