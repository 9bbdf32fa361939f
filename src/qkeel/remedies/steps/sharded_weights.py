"""Sharded and quantised weights under per-head rates: refused, because no process holds the rows of a whole head."""

from __future__ import annotations

from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.patching.graph_nodes import is_wrapper


def has_plain_rows(weight: Tensor) -> bool:
    """True if the rows of a weight can be read and scaled as they are."""
    return weight.is_floating_point() and not is_wrapper(weight)


def check_plain_rows(name: str, weight: Tensor, remedy: str) -> None:
    """Raise RefusedError for a weight that is sharded or quantised, of whose heads no process may hold all rows.

    FSDP2 and tensor parallelism keep a weight as a DTensor, of which each process has a part; its rows cannot be
    measured or scaled head by head. The flat copies of ZeRO and FSDP1 are not recognised as copies either.
    """
    if not has_plain_rows(weight):
        raise RefusedError(
            f"{name} is quantised or sharded ({type(weight).__name__} of {weight.dtype}), so the rows of its heads "
            f"cannot be read or scaled; apply {remedy} to plain floating point weights"
        )
