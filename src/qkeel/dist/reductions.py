"""Collectives, in which nobody waits for a process that has failed."""

from __future__ import annotations

import time
from typing import Literal

from torch import Tensor
from torch import distributed as torch_distributed
from torch.distributed import ProcessGroup, Work

from qkeel.dist.unanimity import ApartError
from qkeel.dist.world import collective_device, on, rank, world
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
    _wait(work, found)
    return found.to(vector.device)


def gather(vector: Tensor) -> Tensor:
    """[n] on every process -> [world n] on each, in the order of ranks, by one collective.

    Raises: ApartError if a process that it waits for on the host has said that it failed.
    """
    if not on():
        return vector[None]
    out = vector.new_empty(world() * vector.numel())
    # torch 2.13 renamed it and warns of the old name.
    all_gather = getattr(torch_distributed, "all_gather_single", torch_distributed.all_gather_into_tensor)
    _wait(all_gather(out, vector.contiguous(), async_op=True), out)
    return out.view(world(), -1)


def say_failed(why: str) -> None:
    """Tell the processes that wait for this one in a reduction that it does not come."""
    if on():
        process_store().set(_FAILED, f"process {rank()}: {why}")


def _wait(work: Work | None, result: Tensor) -> None:
    """Wait until a collective is over, or some process has failed; for a GPU's its stream waits, not the host."""
    assert work is not None
    begun = asked = time.monotonic()
    while result.is_cpu and not work.is_completed():
        now = time.monotonic()
        time.sleep(min(0.1 * (now - begun), 0.01))  # a tenth longer than need be, and no processor kept busy
        if now > asked + _USUAL:
            asked = now
            if process_store().check([_FAILED]):
                raise ApartError(
                    f"this process waited for one that has failed, {process_store().get(_FAILED).decode()}"
                )
    work.wait()
