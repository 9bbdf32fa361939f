"""The part of a split parameter that this process holds, and sums over the processes that hold its parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor
from torch import distributed as torch_distributed
from torch.distributed import ProcessGroup

from qkeel.dist.reductions import reduced
from qkeel.dist.sharding import is_split
from qkeel.dist.world import world
from qkeel.errors import RefusedError

Span = tuple[int, int]  # the first index, and the one behind the last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The block of a parameter's entries that this process holds: along each dimension a span of the whole.

    Args:
        spans: of each dimension.
        in_pass: those of the part that this process computes with in a forward pass. Sharded data parallelism gathers
            its parts for that, tensor parallelism does not.
        groups: the processes of each axis of its mesh, this one among them.
        over: for each axis whether the parameter is split over it, and not replicated.
    """

    spans: tuple[Span, ...]
    in_pass: tuple[Span, ...]
    groups: tuple[ProcessGroup, ...]
    over: tuple[bool, ...]


def shard(name: str, p: Tensor) -> Shard | None:
    """The part of a parameter that this process holds; None if it holds the whole of it.

    Raises: RefusedError if the part is no block of entries.
    """
    if not is_split(p):
        return None
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    at = mesh.get_coordinate()
    plain = [axis for axis, how in enumerate(placements) if how.is_shard()]
    # A strided one splits, from the right to the left, what the plain ones have left: fully_shard over tensor parallel.
    strided = [a for a, how in enumerate(placements) if not (how.is_shard() or how.is_replicate() or how.is_partial())]
    if at is None or any(how.is_partial() for how in placements):
        raise RefusedError(f"{name} is spread over processes as {tuple(placements)}, of which no process holds a block")

    def spans(axes: Sequence[int]) -> list[Span]:
        found = [(0, n) for n in p.shape]
        for axis in axes:
            dim = placements[axis].dim
            found[dim] = _chunk(found[dim], mesh.size(axis), at[axis])
        return found

    own = spans([*plain, *reversed(strided)])
    if [last - first for first, last in own] != list(local(p).shape):
        raise RefusedError(f"{name} is split over processes in a way that is not known: {tuple(placements)}")
    groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    return Shard(
        spans=tuple(own),
        in_pass=tuple(spans(plain)),
        groups=groups,
        over=tuple(axis in {*plain, *strided} for axis in range(mesh.ndim)),
    )


def _chunk(span: Span, n: int, i: int) -> Span:
    """The i-th of n chunks as torch.chunk makes them, the last ones shorter or empty."""
    first, last = span
    size = -(-(last - first) // n)
    return min(first + i * size, last), min(first + (i + 1) * size, last)


def local(p: Tensor) -> Tensor:
    """This process's part of a parameter as a plain tensor that shares its memory; a plain one as it is."""
    return p.detach().to_local() if is_split(p) else p  # type: ignore[attr-defined]


@final
class PartialSums:
    """Adds up numbers of several parameters of which each process knows its part, by one collective for all of them.

    That is one over all processes where the meshes of the parameters cover these, and else one per axis of a mesh.
    What several processes hold alike is counted once.
    """

    def __init__(self, shards: Sequence[Shard | None]) -> None:
        found = {id(group): group for s in shards if s is not None for group in s.groups}
        self._groups = list(found.values())
        self.counted = [all(self._counts(s, group) for group in self._groups) for s in shards]
        if math.prod(map(torch_distributed.get_world_size, self._groups)) == world():
            self._groups = [torch_distributed.group.WORLD] if self._groups else []

    @staticmethod
    def _counts(s: Shard | None, group: ProcessGroup) -> bool:
        """Returns whether this process's numbers count in a group: those of a part do, of replicas those of the first."""
        split = s is not None and any(own is group for own, over in zip(s.groups, s.over) if over)
        return split or torch_distributed.get_rank(group) == 0

    def add_up(self, row: Tensor) -> Tensor:
        """The sums over all processes, in place."""
        for group in self._groups:
            row = reduced(row, "sum", group)
        return row


def shards_of(named: Sequence[tuple[str, Tensor]]) -> Iterator[Shard | None]:
    """The parts of several parameters, each of which is looked at once."""
    seen: dict[int, Shard | None] = {}
    for name, p in named:
        if id(p) not in seen:
            seen[id(p)] = shard(name, p)
        yield seen[id(p)]
