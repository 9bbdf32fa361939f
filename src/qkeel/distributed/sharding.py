"""The block of a split parameter that this process holds, and sums over the processes that hold its blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch import distributed as torch_distributed
from torch.distributed import ProcessGroup

from qkeel.distributed.agree import reduced, world
from qkeel.distributed.layout import is_split, local
from qkeel.errors import RefusedError

# The first index, and the index after the last.
Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBlock:
    """The block of a parameter's entries that this process holds.

    Args:
        spans: the block's range along each dimension.
        in_pass: the range along each dimension that this process uses in a forward pass. Sharded data parallelism
            gathers its parts for a pass, but tensor parallelism does not.
        groups: the process group of each axis of the mesh.
        over: for each axis, True if the parameter is split over it and False if it is replicated.
    """

    spans: tuple[Span, ...]
    in_pass: tuple[Span, ...]
    groups: tuple[ProcessGroup, ...]
    over: tuple[bool, ...]


def local_block(name: str, p: Tensor, gathered: int = 0) -> LocalBlock | None:
    """Returns the part of a parameter that this process holds, or None if the parameter is not a DTensor.

    Args:
        name: the parameter's name, for error messages.
        p: the parameter.
        gathered: the number of leading mesh axes along which fully_shard gathers the parameter for a pass (see
            `gathered_axes`).

    Raises:
        RefusedError: the part is not a block of entries.
    """
    if not is_split(p):
        return None
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placements):
        raise RefusedError(
            f"{name} is spread over processes as {tuple(placements)}, so no process holds a block of it"
        )
    contiguous, strided = [], []
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            contiguous.append(axis)
        elif not placement.is_replicate():
            strided.append(axis)

    def spans_over(axes: Sequence[int]) -> list[Span]:
        spans = [(0, n) for n in p.shape]
        for axis in axes:
            dim = placements[axis].dim
            spans[dim] = _chunk(spans[dim], mesh.size(axis), coordinate[axis])
        return spans

    # Strided shards, from right to left, split what the contiguous shards leave, as in fully_shard on top of tensor
    # parallelism.
    spans = spans_over([*contiguous, *reversed(strided)])
    # The spans follow torch's rules from outside, so the sizes show whether these rules are still the same.
    if [last - first for first, last in spans] != list(local(p).shape):
        raise RefusedError(
            f"{name} is split across processes in an unrecognised way: {tuple(placements)}"
        )
    return LocalBlock(
        spans=tuple(spans),
        in_pass=tuple(spans_over([axis for axis in contiguous if axis >= gathered])),
        groups=tuple(mesh.get_group(axis) for axis in range(mesh.ndim)),
        over=tuple(axis in contiguous or axis in strided for axis in range(mesh.ndim)),
    )


def _chunk(span: Span, n: int, index: int) -> Span:
    """Returns one of n chunks of a span, as torch.chunk makes them. The last chunks may be shorter or empty."""
    first, last = span
    size = -(-(last - first) // n)
    return min(first + index * size, last), min(first + (index + 1) * size, last)


@final
class PartialSums:
    """Sums values for several parameters over the processes that hold their parts, counting replicas once.

    All sums share one collective over all processes if the parameters' meshes cover them. Otherwise there is one
    collective for each mesh axis.
    """

    def __init__(self, blocks: Sequence[LocalBlock | None]) -> None:
        groups = {
            id(group): group
            for block in blocks
            if block is not None
            for group in block.groups
        }
        self._groups = list(groups.values())
        self.counted = [
            all(self._counts(block, group) for group in self._groups)
            for block in blocks
        ]
        if (
            self._groups
            and math.prod(map(torch_distributed.get_world_size, self._groups))
            == world()
        ):
            self._groups = [torch_distributed.group.WORLD]  # type: ignore[list-item]

    @staticmethod
    def _counts(block: LocalBlock | None, group: ProcessGroup) -> bool:
        """True if this process's values count in a group. Parts always count, but replicas only on the first rank."""
        for own_group, splits in () if block is None else zip(block.groups, block.over):
            if splits and own_group is group:
                return True
        return torch_distributed.get_rank(group) == 0

    def add_up(self, row: Tensor) -> Tensor:
        """Returns the row summed over the processes."""
        for group in self._groups:
            row = reduced(row, "sum", group)
        return row
