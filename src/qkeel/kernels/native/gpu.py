"""Says whether the Triton kernels can be used, and loads them when a CUDA tensor first wants them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkeel.errors import caution
from qkeel.kernels.native.loader import transformed

_LOADING = threading.Lock()
_OLDEST = (8, 0)  # compute capability with bfloat16
_WIDEST = 256  # numbers in a head that the statistics take
_STORED = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 2**31  # numbers in a head that are counted in 32 bits


class Rows(NamedTuple):
    """Per query row [b h t], float32; rows that see no key: -inf, +inf, -inf, 0."""

    largest: Tensor
    smallest: Tensor
    lse: Tensor
    entropy: Tensor


def usable(device: torch.device) -> bool:
    """Whether tensors on that device go through Triton here and now.

    Not where QKEEL_TRITON=0 says so, Triton is missing (told once), the device is no GPU or too old for bfloat16, or a
    torch.func transform, export or trace is under way: there torch computes the same numbers.
    """
    if device.type != "cuda" or os.environ.get("QKEEL_TRITON", "1") == "0" or transformed():
        return False
    with _LOADING:
        return _modern(device) and loaded()


# What torch.compiler.assume_constant_result sets; that function would import torch's compiler with qkeel.
usable._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def loaded() -> bool:
    """Whether Triton is there; registers the operators the first time."""
    try:
        from qkeel.kernels import triton_norm_rope
    except ImportError as error:
        caution(f"qkeel computes without its Triton kernels: {error}. QKEEL_TRITON=0 silences this.")
        return False
    triton_norm_rope.register()
    return True


@functools.cache
def _modern(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _OLDEST


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether `row_statistics` takes such q and k [b h t d]."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.dtype in _STORED for x in (q, k))
    return plain and q.numel() > 0 and k.numel() > 0 and q.shape[-1] <= _WIDEST and usable(q.device)


def takes_heads(heads: Sequence[Tensor]) -> bool:
    """Whether `head_table` takes such views [n r m] of weights of one device and dtype."""
    small = all(view[0].numel() < _LARGEST for view in heads)
    return heads[0].dtype in _STORED and small and usable(heads[0].device)


def head_table(heads: Sequence[Tensor]) -> Any:
    """A `triton_heads.HeadTable`, which it loads."""
    from qkeel.kernels.triton_heads import HeadTable

    return HeadTable(heads)


def row_statistics(
    q: Tensor, k: Tensor, scale: float, *, causal: bool, window: int | None, cap: float | None, keys: Tensor | None
) -> Rows:
    """As `triton_statistics.row_statistics`, which it loads."""
    from qkeel.kernels import triton_statistics

    found = triton_statistics.row_statistics(q, k, scale, causal=causal, window=window, cap=cap, keys=keys)
    return Rows(*found)
