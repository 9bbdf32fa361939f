"""How weights and batches lie over processes: wrappers, device meshes, shards, and which rows of a head are where."""

from __future__ import annotations

import sys
from torch import Tensor, nn
from qkeel.dist.agreement import on
import gc
from torch import distributed as torch_distributed
from torch import nn
from qkeel.dist.agreement import on, rank, world
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, final
from qkeel.dist.agreement import rank
from qkeel.errors import RefusedError, unknown
import math
from collections.abc import Iterator, Sequence
from typing import final
from torch import Tensor
from torch.distributed import ProcessGroup
from qkeel.dist.agreement import reduced
from qkeel.dist.agreement import world
from qkeel.errors import RefusedError
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Parameters that are split over processes, and how.

def splits_heads(model: nn.Module) -> bool:
    """Returns whether weights are split over processes for good, as tensor parallelism does.

    Sharded data parallelism (fully_shard) splits them too, once, and gathers them for each pass.
    """
    if not on():
        return False
    once = {id(p) for m in model.modules() if _is(m, _FSDP) for p in m.parameters()}
    return any(
        _is(p, _DTENSOR) and sum(not x.is_replicate() for x in p.placements) > (id(p) in once)  # type: ignore[attr-defined]
        for p in model.parameters()
    )


def sharded(model: nn.Module) -> bool:
    """Returns whether fully_shard was applied to it or a part of it."""
    return any(_is(m, _FSDP) for m in model.modules())


def is_split(x: Tensor) -> bool:
    """Returns whether a tensor is one of which each process holds a part, or a replica of it (a DTensor)."""
    return _is(x, _DTENSOR)


def fully_sharded(model: nn.Module) -> dict[int, int]:
    """The ids of the parameters that fully_shard gathers for each pass -> how many axes of their mesh are its own."""
    found = {}
    for module in model.modules():
        for p in module.parameters() if _is(module, _FSDP) else ():
            # Its own come first: one that replicates and one that splits (HSDP), or one that splits.
            found[id(p)] = 2 if is_split(p) and p.placements[0].is_replicate() else 1  # type: ignore[attr-defined]
    return found


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor that is split over processes; any other as it is."""
    return x.full_tensor() if _is(x, _DTENSOR) else x  # type: ignore[attr-defined]


# Both take half as long to import as all of torch, and where nobody has imported them nothing is of their kind.
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_DTENSOR = ("torch.distributed.tensor", "DTensor")


def _is(value: object, kind: tuple[str, str]) -> bool:
    module = sys.modules.get(kind[0])
    return module is not None and isinstance(value, vars(module)[kind[1]])


# Signs that the modules of several processes are one model: wrappers around them, and meshes of their parameters.

_PIPELINE = "torch.distributed.pipelining"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def wrappers(model: nn.Module) -> list[nn.Module]:
    """DistributedDataParallel and FullyShardedDataParallel modules that a model is part of, or that are part of it.

    A wrapper does not show in what it wraps, and trainers hand out the module inside: all objects are gone through.
    """
    if world() == 1:
        return []
    found = _living(*_kinds())
    inside = {id(m) for m in model.modules()}
    return [w for w in found if id(w) in inside or any(m is model for m in w.modules())]


def is_flat(wrapper: nn.Module) -> bool:
    """Returns whether a wrapper is FullyShardedDataParallel, which flattens parameters."""
    return issubclass(type(wrapper), _kinds()[1:])


def wrapped_by(model: nn.Module) -> str:
    """Names what has spread a model over several processes; "" where nothing has, as far as can be seen."""
    around = wrappers(model)
    if around:
        return type(around[0]).__name__
    if sharded(model):
        return "fully_shard"
    return "tensor parallel" if any(map(is_split, model.parameters())) else ""


def mates(model: nn.Module) -> tuple[int, ...]:
    """The processes that are known to run the same layers as this one: of its wrapper, or its parameters' mesh."""
    found = {rank()}
    for wrapper in wrappers(model):
        found |= {*torch_distributed.get_process_group_ranks(wrapper.process_group)}  # type: ignore[arg-type]
    for p in model.parameters():
        if is_split(p):
            found |= {*p.device_mesh.mesh.flatten().tolist()}  # type: ignore[attr-defined]
    return tuple(sorted(found))


def stage_of(model: nn.Module) -> tuple[int, bool] | None:
    """The number of the stage of a pipeline that a model is, and whether it is the last; None where none was made."""
    if (home := sys.modules.get(_PIPELINE)) is None or not on():  # without processes all objects are not gone through
        return None
    base = home.PipelineStage.__mro__[1]  # of a stage that a tracer made too
    stages = _living(base)
    return next(((x.stage_index, x.is_last) for x in stages if any(m is model for m in x.submod.modules())), None)


def _living(*kinds: type) -> list[Any]:
    """All objects of these kinds. Each type is asked once: there are a few thousand of them, and far more objects."""
    objects = gc.get_objects()
    types = {id(kind): kind for kind in map(type, objects)}  # by identity: a metaclass may forbid hashes
    wanted = {number for number, kind in types.items() if issubclass(kind, kinds)}
    return [x for x in objects if id(type(x)) in wanted] if wanted else []


def _kinds() -> tuple[type[nn.Module], ...]:
    flat = sys.modules.get(_FSDP1)
    return (nn.parallel.DistributedDataParallel, *([] if flat is None else [flat.FullyShardedDataParallel]))


# The place of a process among those that run one model: which data, heads, layers and parts of weights it has.

# By the ranks of the processes along an axis of a mesh, this one among them: its number there.
Axes = dict[tuple[int, ...], int]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The place of one process among those that run a model.

    >>> Layout(data=1, head_part=0, head_parts=2).head_parts
    2

    Args:
        data: processes of the same number work on the same sequences, with all of their keys.
        head_part, head_parts: which part of the heads it computes, of how many (tensor parallel).
        stage: which stage of a pipeline it is; None where there is none.
        context: which part of the queries it has (context parallel with gathered keys).
        shard: processes of the same text hold the same part of every weight.
    """

    data: int = 0
    head_part: int = 0
    head_parts: int = 1
    stage: int | None = None
    context: int = 0
    shard: str = ""

    @classmethod
    def of_mesh(
        cls, mesh: DeviceMesh, *, heads: str | None = None, layers: str | None = None, context: str | None = None
    ) -> Self:
        """The place of this process in a mesh with named axes.

        Args:
            mesh: of all processes; axes that are not named here split the data, or weights alone.
            heads: the axis whose processes each have a part of the heads.
            layers: the axis whose processes are the stages of a pipeline.
            context: the axis whose processes each have a part of the queries and all of the keys.

        Raises: UnknownNameError if the mesh has no axis of such a name.
        """
        names, place = tuple(mesh.mesh_dim_names or ()), mesh.get_coordinate()
        for name in (heads, layers, context):
            if name is not None and name not in names:
                raise unknown("axis of the mesh", name, names)
        at = dict(zip(names, place or ()))
        data = 0
        for name, size in zip(names, mesh.shape):
            data = data if name in (heads, layers, context) else data * size + at[name]
        return cls(
            data=data,
            head_part=0 if heads is None else at[heads],
            head_parts=1 if heads is None else mesh.shape[names.index(heads)],
            stage=None if layers is None else at[layers],
            context=0 if context is None else at[context],
        )

    @classmethod
    def of_model(cls, model: nn.Module, attentions: Iterable[nn.Module], stage: int | None) -> Self:
        """The place that the weights of a model show, of which `attentions` are the modules with heads.

        Raises: RefusedError if the weights of its attentions are split over two axes.
        """
        heads: Axes = {}
        for module in attentions:
            heads |= head_axes(model, module.parameters())
        if len(heads) > 1:
            raise RefusedError(
                "the weights of this model's attentions are split over more than one axis of its mesh, so which heads "
                "this process has is unknown. State it: qkeel.watch(..., layout=Layout.of_mesh(mesh, heads=...)), Layout "
                "from qkeel.monitor"
            )
        axis, part = next(iter(heads.items()), ((rank(),), 0))
        return cls(data=min(axis), head_part=part, head_parts=len(axis), stage=stage, shard=_shard(model))


def head_axes(model: nn.Module, weights: Iterable[Tensor]) -> Axes:
    """The axes over which some weights of a model stay split in a forward pass, as in tensor parallel."""
    gathered = fully_sharded(model)
    return _axes(weights, lambda p: gathered.get(id(p), 0))


def _axes(parameters: Iterable[Tensor], first: Callable[[Tensor], int]) -> Axes:
    """The axes over which any of these parameters is split, of each those from its `first` on."""
    found: Axes = {}
    for p in parameters:
        if is_split(p):
            mesh, at = p.device_mesh, p.device_mesh.get_coordinate()  # type: ignore[attr-defined]
            for i, how in enumerate(p.placements):  # type: ignore[attr-defined]
                if i >= first(p) and at is not None and not (how.is_replicate() or how.is_partial()):
                    along = mesh.mesh[tuple(slice(None) if j == i else c for j, c in enumerate(at))]
                    found[tuple(along.tolist())] = at[i]
    return found


def _shard(model: nn.Module) -> str:
    """The numbers of this process along the axes over which weights are split; replicas have the same."""
    found = set()
    for p in model.parameters():
        if is_split(p):
            mesh, at = p.device_mesh, p.device_mesh.get_coordinate()  # type: ignore[attr-defined]
            names = mesh.mesh_dim_names or range(mesh.ndim)
            for i, how in enumerate(p.placements):  # type: ignore[attr-defined]
                if at is not None and not (how.is_replicate() or how.is_partial()):
                    found.add(f"{names[i]} of {mesh.shape[i]}: {at[i]}")
    return ", ".join(sorted(found))


def counted(model: nn.Module) -> Callable[[Tensor], bool]:
    """Returns what tells of a parameter whether what this process holds of it counts: of replicas the first."""
    split = _axes(model.parameters(), lambda _: 0)
    return lambda p: not any(at for axis, at in split.items() if axis not in _axes([p], lambda _: 0))


# The part of a split parameter that this process holds, and sums over the processes that hold its parts.

Span = tuple[int, int]  # the first index, and the one behind the last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The block of a parameter's entries that this process holds: along each dimension a span of the whole.

    Args:
        spans: of each dimension.
        in_pass: those of the part that this process computes with in a forward pass. Sharded data parallelism gathers
            its parts for that (`gathered` axes), tensor parallelism does not.
        groups: the processes of each axis of its mesh, this one among them.
        over: for each axis whether the parameter is split over it, and not replicated.
    """

    spans: tuple[Span, ...]
    in_pass: tuple[Span, ...]
    groups: tuple[ProcessGroup, ...]
    over: tuple[bool, ...]


def shard(name: str, p: Tensor, gathered: int = 0) -> Shard | None:
    """The part of a parameter that this process holds; None if it holds the whole of it.

    gathered: along how many axes of its mesh, the first ones, fully_shard gathers it for a pass (`fully_sharded`).

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
        in_pass=tuple(spans([axis for axis in plain if axis >= gathered])),
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
