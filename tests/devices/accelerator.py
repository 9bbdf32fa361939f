"""An accelerator that is none: tensors "on" it hold CPU tensors, and what a real one would have to do is counted.

It takes the place of torch's backend for a device of a third party, once and for all in its process, so programs that
use it run in one of their own. Its name is NAME. While a `Counts` is entered it notes launches (operators on the device
that are no views), the bytes that they read and write, and waits: places where the host has to know a number or to hand
one over. The device refuses float64 where it is told to.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "accel"


class _Backend(_DummyBackendModule):
    """What torch asks the module of a device for."""

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
torch._C._set_only_lift_cpu_tensors(
    True
)  # torch.tensor makes its numbers on the CPU, and moves them where a mode sees
DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten

# Operators that a device answers with no work: views, new memory, and questions about a tensor's shape.
_FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "expand", "narrow", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "diagonal", "unfold", "is_pinned", "set_",
    "_to_copy", "copy_", "lift_fresh", "is_same_size", "chunk", "sym_size",
}  # fmt: skip
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "unique_dim",
    "_unique2",
    "masked_select",
    "bincount",
}


@dataclasses.dataclass
class Counts:
    """The work of the device while it is entered."""

    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    read_and_written: int = 0

    def __enter__(self):
        _COUNTING.append(self)
        return self

    def __exit__(self, *exc):
        _COUNTING.remove(self)


_COUNTING = []


class OnDevice(Tensor):
    """A tensor on the device, made of one on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held):
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def __repr__(self):
        return f"OnDevice({self.held!r})"

    def tolist(self):  # torch's own takes no subclass
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, float64=True)


class Accelerator(TorchDispatchMode):
    """While it is entered, the device can be used; `float64=False`: as one that has no such numbers."""

    def __init__(self, *, float64=True):
        super().__init__()
        self._float64 = float64

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, float64=self._float64)


def _held(x):
    return x.held if isinstance(x, OnDevice) else x


def _run(func, args, kwargs, *, float64):
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    was_on = any(isinstance(x, OnDevice) for x in given)
    asked = kwargs.get("device")
    to_device = was_on if asked is None else torch.device(asked).type == NAME
    plain = {**kwargs}
    if asked is not None:
        plain["device"] = torch.device("cpu") if to_device else asked
    if plain.get("pin_memory"):
        plain["pin_memory"] = False
    out = func(*tree_map(_held, args), **tree_map(_held, plain))
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    if (
        not float64
        and to_device
        and any(x.dtype in (torch.float64, torch.complex128) for x in made)
    ):
        raise TypeError(
            f"{func} would make float64 on a device that has none, at {_where()}"
        )
    _count(func, args, given, made, was_on=was_on, to_device=to_device)
    if not to_device:
        return out
    wrapped = tree_map(lambda x: OnDevice(x) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _where():
    """The line of qkeel's, or of the one who calls it, that a fault or a wait is at."""
    own = [
        f
        for f in traceback.extract_stack()
        if "/src/qkeel/" in f.filename and "/patching/" not in f.filename
    ]
    frames = [
        f for f in own if f.name not in ("__torch_function__", "take")
    ]  # through which the caller's functions pass
    return (
        f"{frames[-1].filename.rpartition('/src/')[2]}:{frames[-1].lineno}"
        if frames
        else "the caller"
    )


def _count(
    func,
    args,
    given,
    made,
    *,
    was_on,
    to_device,
):
    if not _COUNTING or not (was_on or to_device):
        return
    name = func.overloadpacket.__name__
    moved = name in ("_to_copy", "copy_") and (
        was_on != to_device or any(isinstance(x, OnDevice) is not was_on for x in given)
    )
    masked = name in ("index", "index_put_") and any(
        x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None
    )
    size = sum(x.numel() * x.element_size() for x in (*given, *made))
    for counts in _COUNTING:
        if name in _WAITS or moved or masked:
            counts.waits[f"{name} {_where()}"] += 1
        if name not in _FREE or (
            name in ("_to_copy", "copy_") and was_on and to_device and not moved
        ):
            counts.launches[name] += _copies(given) if name in ("cat", "stack") else 1
            counts.read_and_written += size


def _copies(parts):
    """The launches of CUDA's `cat`: one for 128 tensors of one dtype that lie whole, for 64 others of one dtype and up
    to four dimensions, and one for each tensor where dtypes differ."""
    if len({x.dtype for x in parts}) > 1 or parts[0].ndim > 4:
        return len(parts)
    return -(-len(parts) // (128 if all(x.is_contiguous() for x in parts) else 64))
