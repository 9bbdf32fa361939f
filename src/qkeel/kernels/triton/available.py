"""The entry point to the Triton kernels: whether they can be used, and their loading for the first CUDA tensor.

QKEEL_TRITON=0 leaves everything to torch. QKEEL_TRITON=write also allows the kernels that write weights: no GPU has
recorded a result of them yet.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from qkeel.errors import caution
from qkeel.kernels.native.operators import STORED, is_plain
from qkeel.patching.modes import constant_when_compiled, transformed

if TYPE_CHECKING:
    from qkeel.kernels.triton.heads import HeadTable


# The families of kernels, each with a case of `first_use`.
Family = Literal["norm and rotation", "statistics", "sampled statistics", "heads of weights", "step of AdamW"]

_LOADING = threading.Lock()
_OLDEST = (8, 0)  # compute capability with bfloat16
_WIDEST = 256  # greatest head_dim of the statistics
_LARGEST = 2**31  # numbers in a head, which are counted in 32 bits


class RowNumbers(NamedTuple):
    """The statistics of every query row, float32; of rows without a visible key: -inf, +inf, -inf, 0."""

    largest: Float[Tensor, "b h t"]
    smallest: Float[Tensor, "b h t"]
    lse: Float[Tensor, "b h t"]
    entropy: Float[Tensor, "b h t"]


class HeadNumbers(NamedTuple):
    """Statistics of heads over the rows that see a key and count: `largest` logit, mean and least entropy [h], how many
    rows that are; the numbers -inf, inf, 0 and a count of 0, which come with them; and half the width of a 95 %
    interval of the mean entropy, where it is of a sample of rows.
    """

    largest: Float[Tensor, " h"]
    entropy: Float[Tensor, " h"]
    least_entropy: Float[Tensor, " h"]
    n: Int64[Tensor, " h"]
    neutral: dict[tuple[float, bool], Tensor]
    error: Float[Tensor, " h"] | None = None

    @classmethod
    def of(cls, numbers: Tensor, counts: Tensor, error: Tensor | None = None) -> HeadNumbers:
        """Returns what a kernel wrote into numbers [6+ h]: the three, -inf, inf, 0; and counts [2 h]: the rows, 0."""
        low, high, nothing = (numbers[i, 0] for i in (3, 4, 5))
        neutral = {(-torch.inf, False): low, (torch.inf, False): high, (0.0, False): nothing, (0.0, True): counts[1, 0]}
        return cls(numbers[0], numbers[1], numbers[2], counts[0], neutral, error)


@constant_when_compiled
def usable(device: torch.device) -> bool:
    """Returns whether tensors on that device go through Triton here and now.

    Not where QKEEL_TRITON=0 says so, Triton is missing (reported once), the device is no GPU or too old for bfloat16,
    or a torch.func transform, export or trace is under way: there torch computes the same numbers.
    """
    if device.type != "cuda" or os.environ.get("QKEEL_TRITON", "1") == "0" or transformed():
        return False
    with _LOADING:
        return _modern(device) and loaded()


@constant_when_compiled
def trusted(family: Family, device: torch.device) -> bool:
    """Returns whether tensors on that device go through the kernels of a family here and now.

    At the first use on a device the kernels compute a small case, see `first_use`. Where that fails or differs from
    torch's result, one warning says so, and the answer is no from then on. A case waits for the device, so there is
    none while a CUDA graph is captured: until then the answer is no.
    """
    if not usable(device):
        return False
    with _LOADING:
        try:
            return _agrees(family, device)
        except _CapturingError:
            return False


def may_write() -> bool:
    """Returns whether kernels that write weights were asked for, by QKEEL_TRITON=write."""
    return os.environ.get("QKEEL_TRITON", "1") == "write"


class _CapturingError(Exception):
    """A CUDA graph is being captured, so nothing may wait for the device."""


@functools.cache  # not of an exception
def _agrees(family: Family, device: torch.device) -> bool:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _CapturingError
    from qkeel.kernels.triton import first_use

    try:
        off = first_use.difference(family, device)
        why = f"differ from torch's result by {off:.1e} times what rounding explains"
        if off <= 1:
            return True
    except Exception as error:  # of Triton, its compiler or the driver
        why = f"fail: {type(error).__name__}: {error}"
    caution(f"qkeel's Triton kernels ({family}) on {device} {why}. Torch is used. QKEEL_TRITON=0 silences this")
    return False


@functools.cache
def loaded() -> bool:
    """Returns whether Triton can be imported; registers the operators the first time."""
    try:
        from qkeel.kernels.triton import norm_rope
        from qkeel.kernels.triton import norm_rope as norm_rope_two
    except ImportError as error:
        caution(f"qkeel computes without its Triton kernels: {error}. QKEEL_TRITON=0 silences this.")
        return False
    norm_rope.register()
    norm_rope_two.register_two()
    return True


@functools.cache
def _modern(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _OLDEST


def takes(q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"], family: Family = "statistics") -> bool:
    """Returns whether `statistics.row_statistics`, or the passes of `sampled`, compute such q and k."""
    plain = all(is_plain(x) and x.dtype in STORED for x in (q, k))
    return plain and q.numel() > 0 and k.numel() > 0 and q.shape[-1] <= _WIDEST and trusted(family, q.device)


def takes_heads(heads: Sequence[Float[Tensor, "n r m"]], *, write: bool = False) -> bool:
    """Returns whether `head_table` takes such views of weights of one device and dtype, to write them or to read."""
    if write and not may_write():
        return False
    small = all(view[0].numel() < _LARGEST for view in heads)
    return heads[0].dtype in STORED and small and trusted("heads of weights", heads[0].device)


def head_table(heads: Sequence[Float[Tensor, "n r m"]]) -> HeadTable:
    """Loads Triton's kernels for heads and returns the table of such views of weights."""
    from qkeel.kernels.triton.heads import HeadTable

    return HeadTable(heads)
