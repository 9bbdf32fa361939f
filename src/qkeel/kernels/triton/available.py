"""The entry point to the Triton kernels: whether they can be used, and their loading for the first CUDA tensor."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from qkeel.errors import caution
from qkeel.kernels.native.operator import STORED, is_plain
from qkeel.patching.compiler_state import constant_when_compiled, transformed

if TYPE_CHECKING:
    from qkeel.kernels.triton.heads import HeadTable

_LOADING = threading.Lock()
_OLDEST = (8, 0)  # compute capability with bfloat16
_WIDEST = 256  # greatest head_dim of the statistics
_LARGEST = 2**31  # numbers in a head, which are counted in 32 bits


class Rows(NamedTuple):
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


@functools.cache
def loaded() -> bool:
    """Returns whether Triton can be imported; registers the operators the first time."""
    try:
        from qkeel.kernels.triton import norm_rope, norm_rope_two
    except ImportError as error:
        caution(f"qkeel computes without its Triton kernels: {error}. QKEEL_TRITON=0 silences this.")
        return False
    norm_rope.register()
    norm_rope_two.register()
    return True


@functools.cache
def _modern(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _OLDEST


def takes(q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]) -> bool:
    """Returns whether `statistics.row_statistics` computes such q and k."""
    plain = all(is_plain(x) and x.dtype in STORED for x in (q, k))
    return plain and q.numel() > 0 and k.numel() > 0 and q.shape[-1] <= _WIDEST and usable(q.device)


def takes_heads(heads: Sequence[Float[Tensor, "n r m"]]) -> bool:
    """Returns whether `head_table` takes such views of weights of one device and dtype."""
    small = all(view[0].numel() < _LARGEST for view in heads)
    return heads[0].dtype in STORED and small and usable(heads[0].device)


def head_table(heads: Sequence[Float[Tensor, "n r m"]]) -> HeadTable:
    """Loads Triton's kernels for heads and returns the table of such views of weights."""
    from qkeel.kernels.triton.heads import HeadTable

    return HeadTable(heads)


@functools.cache
def adamw_kernels(device: torch.device) -> ModuleType | None:
    """Loads Triton's step of Adam and AdamW with a rate per line: `adam_lines`, `sum_lines` as in `native.adamw`.

    It writes weights, so it is tried on small ones first. Returns None, with one warning, where it fails on the device
    or is not torch's fused step there.
    """
    from qkeel.kernels.triton import adam_lines, adam_trial

    try:
        off = adam_trial.deviation(device)
        why = f"differs from torch's by {off:.1e} where {adam_trial.ROUNDING:.0e} is rounding"
        if off <= adam_trial.ROUNDING:
            return adam_lines
    except Exception as error:  # of Triton, its compiler or the driver
        why = f"fails: {type(error).__name__}: {error}"
    caution(f"qkeel's own step of AdamW on {device} {why}. Torch's is used. QKEEL_TRITON=0 silences this")
    return None
