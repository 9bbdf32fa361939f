"""Reductions over processes, in which nobody waits for one that has failed."""

from __future__ import annotations

import time
from typing import Literal

from torch import Tensor
from torch import distributed as torch_distributed
from torch.distributed import ProcessGroup, Work

from qkeel.dist.unanimity import ApartError
from qkeel.dist.world import collective_device, on, rank
from qkeel.patching.parallel_training import process_store

_FAILED = "qkeel/failed"
_USUAL = 0.5  # seconds of waiting after which the store is asked whether there is anybody to wait for


def reduced(vector: Tensor, by: Literal["sum", "max"], group: ProcessGroup | None = None) -> Tensor:
    """[n] on every process of a group (all of them: None) -> their sums or maxima [n] on each, by one collective.

    Raises: ApartError if a process that it waits for on the host has said that it failed.
    """
    found = vector.to(collective_device())
    how = torch_distributed.ReduceOp.MAX if by == "max" else torch_distributed.ReduceOp.SUM
    work = torch_distributed.all_reduce(found, how, group=group, async_op=True)
    assert work is not None
    if found.is_cpu:
        _watch(work)
    assert work is not None
    work.wait()  # on a GPU that is its stream's business, not the host's
    return found.to(vector.device)


def say_failed(why: str) -> None:
    """Tell the processes that wait for this one in a reduction that it does not come."""
    if on():
        process_store().set(_FAILED, f"process {rank()}: {why}")


def _watch(work: Work) -> None:
    """Wait until a reduction is over, or some process has failed."""
    asked = time.monotonic() + _USUAL
    pause = 0.0
    while not work.is_completed():
        time.sleep(pause)
        if time.monotonic() > asked:
            pause, asked = 0.01, time.monotonic() + _USUAL
            if process_store().check([_FAILED]):
                raise ApartError(f"this process waited for one that has failed, {process_store().get(_FAILED).decode()}")
