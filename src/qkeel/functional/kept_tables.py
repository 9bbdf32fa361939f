"""Positions and what is computed from them, kept from layer to layer and from step to step.

Nothing is kept, or taken from what is, where that would not be the same as computing it: under torch's compiler, in a
CUDA graph's capture (its memory goes with the graph, and its replays may see other positions), in transforms, traces
and dispatch modes, of tensors of another class, with a gradient or of inference mode.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

from qkeel.patching.compiler_state import in_dispatch_mode, transformed

MOST = 16  # tables that are kept
MOST_BYTES = 128 * 2**20  # of all of them, unless the newest alone has more
Tables = TypeVar("Tables", bound=tuple[object, ...])


class _Kept(NamedTuple):
    """Tables, the positions that they were made from while those live, and copies of those on a CPU."""

    tables: tuple[object, ...]
    positions: list[weakref.ref[Tensor]]
    copies: list[Tensor]
    size: int


_KEPT: OrderedDict[Hashable, _Kept] = OrderedDict()


def counted(first: int, stop: int, device: torch.device) -> Int64[Tensor, "1 n"]:
    """The positions first … stop - 1, one tensor for all who ask for the same ones."""
    stream = _stream(device)
    return torch.arange(first, stop, device=device)[None] if stream is None else _counted(first, stop, device, stream)


@functools.lru_cache(maxsize=8)
def _counted(first: int, stop: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(first, stop, device=device)[None]


def kept(make: Callable[[], Tables], setting: Hashable, *positions: Tensor) -> Tables:
    """What `make` makes of these positions and of a setting that says all else; the same object while it is kept.

    A change of the positions in place is noticed by their numbers on a CPU, elsewhere by torch's count of changes, as
    autograd does: without the host waiting for the device.
    """
    stream = _stream(positions[0].device)
    if stream is None or not all(map(_lasts, positions)):
        return make()
    key = setting, stream, *map(_where, positions)
    found = _KEPT.get(key)
    if found is not None and _is_still(found, positions):
        _KEPT.move_to_end(key, last=True)
        return found.tables  # type: ignore[return-value]
    with torch.inference_mode(False):
        tables = make()
    refs = [weakref.ref(_base(pos), functools.partial(_drop, key)) for pos in positions]
    copies = [pos.clone() for pos in positions if pos.is_cpu]
    _KEPT[key] = _Kept(tables, refs, copies, sum(x.numel() * x.element_size() for x in _tensors(tables)))
    while len(_KEPT) > MOST or (len(_KEPT) > 1 and sum(one.size for one in _KEPT.values()) > MOST_BYTES):
        _KEPT.popitem(last=False)
    return tables


def _stream(device: torch.device) -> int | None:
    """The stream whose work sees what is kept, 0 where there are none; None where nothing may be kept."""
    if torch.compiler.is_compiling() or transformed() or in_dispatch_mode():
        return None
    if device.type != "cuda":
        return 0 if device.type == "cpu" else None
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def _lasts(pos: Tensor) -> bool:
    return type(pos) is Tensor and not pos.requires_grad and not pos.is_inference()


def _base(pos: Tensor) -> Tensor:
    return pos if pos._base is None else pos._base  # what a view is one of


def _where(pos: Tensor) -> Hashable:
    return id(_base(pos)), pos.data_ptr(), pos.shape, pos.stride(), pos.dtype, pos.device, pos._version


def _is_still(found: _Kept, positions: tuple[Tensor, ...]) -> bool:
    alive = all(ref() is _base(pos) for ref, pos in zip(found.positions, positions))
    return alive and all(map(torch.equal, found.copies, (pos for pos in positions if pos.is_cpu)))


def _drop(key: Hashable, _: object) -> None:
    _KEPT.pop(key, None)


def _tensors(x: object) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in dict.fromkeys(map(id, x)):
            yield from _tensors(next(one for one in x if id(one) == part))
