"""Positions and tables that are made of them, kept on a GPU from layer to layer and from step to step.

There a table takes as many launches as a layer's attention; on a CPU making it costs no more than looking for it. Only
what is made of positions that were counted here is kept. Into another tensor of positions a caller may write in ways
that torch does not count (a collective, a kernel, the replay of a graph), and to read it would be to wait. Nothing is
kept, or taken from what is, where that would not be the same as making it: under torch's compiler, in a CUDA graph's
capture (its memory goes with the graph), in transforms, traces and modes that see or replace torch's calls.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from qkeel.patching.compiler_state import in_python_mode, transformed
from qkeel.patching.graph_nodes import version_of

KEPT_ON = frozenset({"cuda"})  # kinds of devices
MOST = 16  # tensors of positions and groups of tables together
MOST_BYTES = 128 * 2**20  # of all of them
Tables = TypeVar("Tables", bound=tuple[tuple[Tensor, ...], ...])


class _Kept(NamedTuple):
    """Tables, and all tensors of them and of their positions: while those are held, their ids are theirs alone."""

    made: tuple[tuple[Tensor, ...], ...]
    tensors: list[Tensor]
    size: int

    @property
    def untouched(self) -> bool:
        """False once somebody who was handed one of the tensors has written into it, and for what may not be kept."""
        return not any(version_of(x) or x.requires_grad or type(x) is not Tensor for x in self.tensors)


class _Store(OrderedDict[tuple[Hashable, Hashable], _Kept]):
    """The tables that are kept, by device, stream and setting; those that were asked for last come last."""

    def put(self, key: tuple[Hashable, Hashable], one: _Kept) -> None:
        """Keep one more, and drop what was not asked for longest where that is too much."""
        with _LOCK:
            self[key] = one
            while len(self) > MOST or sum(each.size for each in self.values()) > MOST_BYTES:
                self.popitem(last=False)


_LOCK = threading.Lock()  # of several threads, each of which drives a GPU say
_KEPT = _Store()


def kept_positions(first: int, stop: int, device: torch.device) -> Tensor:
    """The positions first … stop - 1 as [1 n]: not to be written into."""
    return _kept(lambda: ((torch.arange(first, stop, device=device)[None],),), (first, stop), device)[0][0]


def kept(make: Callable[[], Tables], setting: Hashable, *positions: Tensor) -> Tables:
    """The tables that `make` makes of these positions and of a setting that says all else: not to be written into."""
    return _kept(make, (setting, *map(id, positions)), positions[0].device, positions)


def _kept(
    make: Callable[[], Tables], what: Hashable, device: torch.device, positions: tuple[Tensor, ...] = ()
) -> Tables:
    stream = _stream(device)
    if stream is None:
        return make()
    place = device, stream
    with _LOCK:
        found, others = _KEPT.pop((place, what), None), list(_KEPT.items())
    if found is not None and found.untouched:
        _KEPT.put((place, what), found)
        return found.made  # type: ignore[return-value]
    ours = [id(one.made[0][0]) for (where, _), one in others if where == place]
    if any(id(pos) not in ours for pos in positions):
        return make()
    with torch.inference_mode(False):
        made = make()
    tensors = [*positions, *(x for group in made for x in group)]
    new = _Kept(made, tensors, sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values()))
    if new.untouched and new.size <= MOST_BYTES:
        _KEPT.put((place, what), new)
    return made


def _stream(device: torch.device) -> int | None:
    """The stream whose work sees what is kept, 0 where there are none; None where nothing may be kept."""
    if transformed() or in_python_mode():
        return None
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream
