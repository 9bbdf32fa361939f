"""Weights whose rows no process can read or scale as they are, or of which none holds the whole."""

from __future__ import annotations

from torch import Tensor

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.patching.graph_nodes import is_wrapper


def has_plain_rows(weight: Tensor) -> bool:
    """True if the rows of a weight, or of this process's part of it, can be read and scaled as they are."""
    return weight.is_floating_point() and not is_wrapper(dist.local(weight))


def check_plain_rows(name: str, weight: Tensor, remedy: str) -> None:
    """Raise RefusedError for a quantised weight, and for one that is split over processes in a way that is not known.

    FSDP2 and tensor parallelism keep a weight as a DTensor, of which each process has a block. The flat copies of ZeRO
    and FSDP1 are not recognised as copies.
    """
    if not has_plain_rows(weight):
        raise RefusedError(
            f"{name} is quantised ({type(weight).__name__} of {weight.dtype}), so the rows of its heads cannot be read "
            f"or scaled; apply {remedy} to plain floating point weights"
        )
    dist.shard(name, weight)


def check_whole(name: str, weight: Tensor, remedy: str) -> None:
    """Raise RefusedError for a weight that is split over processes, where a remedy needs the whole of each head."""
    if dist.is_split(weight):
        raise RefusedError(
            f"{name} is split over processes, and {remedy} needs all rows and columns of a head at once; use lalr or "
            "qk_clip, which make do with parts, or DistributedDataParallel, which keeps weights whole"
        )
