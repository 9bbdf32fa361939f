"""How weights and data are distributed over processes: wrappers, device meshes, shards, and each process's heads."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, final

from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.distributed import ProcessGroup

from qkeel.dist.agreement import on, rank, reduced, world
from qkeel.errors import RefusedError, unknown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Parameters that are split across processes.


def splits_heads(model: nn.Module) -> bool:
    """True if weights stay split across processes in a forward pass, as in tensor parallelism.

    Sharded data parallelism (fully_shard) also splits weights, along separate mesh axes, but gathers them for each
    pass.
    """
    if not on():
        return False
    once = {id(p) for m in model.modules() if _is(m, _FSDP) for p in m.parameters()}
    return any(
        _is(p, _DTENSOR) and sum(not x.is_replicate() for x in p.placements) > (id(p) in once)  # type: ignore[attr-defined]
        for p in model.parameters()
    )


def sharded(model: nn.Module) -> bool:
    """True if fully_shard was applied to the model or a part of it."""
    return any(_is(m, _FSDP) for m in model.modules())


def is_split(x: Tensor) -> bool:
    """True if a tensor is a DTensor, so that each process holds a part or a replica of it."""
    return _is(x, _DTENSOR)


def fully_sharded(model: nn.Module) -> dict[int, int]:
    """Maps the id of each parameter that fully_shard gathers for a pass to the number of mesh axes it is gathered over.

    A parameter that fully_shard ignores, or that was added to a module later, stays an ordinary tensor and is not
    included.
    """
    found = {}
    for module in model.modules():
        for p in module.parameters() if _is(module, _FSDP) else ():
            if is_split(p):  # its axes come first: a replicating and a splitting axis (HSDP), or only a splitting axis
                found[id(p)] = 2 if p.placements[0].is_replicate() else 1  # type: ignore[attr-defined]
    return found


def whole(x: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, and any other tensor unchanged."""
    return x.full_tensor() if _is(x, _DTENSOR) else x  # type: ignore[attr-defined]


# Importing either module takes half as long as importing torch. If a module has not been imported, no object has its
# type.
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_DTENSOR = ("torch.distributed.tensor", "DTensor")


def _is(value: object, kind: tuple[str, str]) -> bool:
    module = sys.modules.get(kind[0])
    return module is not None and isinstance(value, vars(module)[kind[1]])


# Evidence that modules on several processes form one model: wrappers around them, and meshes of their parameters.

_PIPELINE = "torch.distributed.pipelining"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_DEEPSPEED = "deepspeed.runtime.engine"


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Returns the DistributedDataParallel and FullyShardedDataParallel modules around a model or inside it.

    A module has no reference to its wrapper, and trainers return the inner module, so all Python objects are searched.
    """
    if world() == 1:
        return []
    found = _living(*_kinds())
    inside = {id(m) for m in model.modules()}
    return [w for w in found if id(w) in inside or any(m is model for m in w.modules())]


def is_flat(wrapper: nn.Module) -> bool:
    """True for FullyShardedDataParallel (version 1), which flattens parameters."""
    return issubclass(type(wrapper), _kinds()[1:])


def zero_stage(model: nn.Module) -> int:
    """Returns the stage of DeepSpeed's ZeRO under which a model trains (1 to 3), or 0 if it trains without ZeRO.

    From stage 1 on, the optimizer updates flat pieces of the weights, which are copied back where the optimizer's hooks
    cannot reach them. In stage 3 a process holds no weights between two passes.
    """
    home = sys.modules.get(_DEEPSPEED)
    engines = [] if home is None else _living(home.DeepSpeedEngine)
    return max((e.zero_optimization_stage() for e in engines if any(m is model for m in e.modules())), default=0)


def wrapped_by(model: nn.Module) -> str:
    """Returns the name of the wrapper or method that distributes a model across processes, or "" if none is found."""
    around = wrappers(model)
    if around:
        return type(around[0]).__name__
    if sharded(model):
        return "fully_shard"
    return "tensor parallel" if any(map(is_split, model.parameters())) else ""


def peer_ranks(model: nn.Module) -> tuple[int, ...]:
    """Returns the ranks known to run the layers of a model, namely the ranks of its wrappers and parameters' meshes."""
    found = {rank()}
    for wrapper in wrappers(model):
        found |= {*torch_distributed.get_process_group_ranks(wrapper.process_group)}  # type: ignore[arg-type]
    for p in model.parameters():
        if is_split(p):
            found |= {*p.device_mesh.mesh.flatten().tolist()}  # type: ignore[attr-defined]
    return tuple(sorted(found))


def stage_of(model: nn.Module) -> tuple[int, bool] | None:
    """Returns the model's pipeline stage and whether it is the last one, or None if there is no pipeline."""
    if (home := sys.modules.get(_PIPELINE)) is None or not on():  # spares the search through all objects
        return None
    base = home.PipelineStage.__mro__[1]  # also the base of traced stages
    stages = _living(base)
    return next(((x.stage_index, x.is_last) for x in stages if any(m is model for m in x.submod.modules())), None)


def _living(*kinds: type) -> list[Any]:
    """Returns all objects of these kinds. It checks each type once, because there are far fewer types than objects."""
    objects = gc.get_objects()
    types = {id(kind): kind for kind in map(type, objects)}  # by identity: a metaclass may forbid hashes
    wanted = {number for number, kind in types.items() if issubclass(kind, kinds)}
    return [x for x in objects if id(type(x)) in wanted] if wanted else []


def _kinds() -> tuple[type[nn.Module], ...]:
    flat = sys.modules.get(_FSDP1)
    return (nn.parallel.DistributedDataParallel, *([] if flat is None else [flat.FullyShardedDataParallel]))


# The role of a process among those that run one model: its data, heads, layers and weight shards.

# Ranks along a mesh axis, including this process's -> this process's index on the axis.
Axes = dict[tuple[int, ...], int]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The role of one process among those that run a model.

    Args:
        data: a number that is the same on all processes that work on the same sequences and all of their keys.
        head_part: the index of the part of the heads that the process computes (tensor parallel).
        head_parts: the number of such parts.
        stage: the process's pipeline stage, or None if there is no pipeline.
        context: the index of the process's part of the queries (context parallel with gathered keys).
        shard: a string that is the same on all processes that hold the same part of every weight.

    Example:
        >>> Layout(data=1, head_part=0, head_parts=2).head_parts
        2
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
        """Returns this process's role in a mesh with named axes.

        Args:
            mesh: the mesh, which covers all processes. Axes not named here split data or weights.
            heads: the axis along which the heads are split.
            layers: the axis of the pipeline stages.
            context: the axis along which the queries are split while each process has all keys.

        Raises:
            UnknownNameError: the mesh has no axis with one of these names.
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
        """Returns the role that a model's weights imply. `attentions` are the model's modules with heads.

        Raises:
            RefusedError: the weights of the model's attention layers are split over more than one axis.
        """
        heads: Axes = {}
        for module in attentions:
            heads |= head_axes(model, module.parameters())
        if len(heads) > 1:
            raise RefusedError(
                "the weights of this model's attention layers are split over more than one axis of its mesh, so it is "
                "unknown which heads this process has. Specify the axis of the heads with qkeel.watch(..., "
                "layout=Layout.of_mesh(mesh, heads=...)), where Layout is imported from qkeel.monitor"
            )
        axis, part = next(iter(heads.items()), ((rank(),), 0))
        return cls(data=min(axis), head_part=part, head_parts=len(axis), stage=stage, shard=_shard(model))


def head_axes(model: nn.Module, weights: Iterable[Tensor]) -> Axes:
    """Returns the axes over which these weights stay split in a forward pass, as in tensor parallelism."""
    gathered = fully_sharded(model)
    return _axes(weights, lambda p: gathered.get(id(p), 0))


def _axes(parameters: Iterable[Tensor], first: Callable[[Tensor], int]) -> Axes:
    """Returns the axes over which any of these parameters p is split, ignoring the first `first(p)` axes of each."""
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
    """Describes this process's position on the axes that split weights, by a string that is the same for replicas."""
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
    """Returns a function that says whether to count this process's part of a parameter. Replicas count only once."""
    split = _axes(model.parameters(), lambda _: 0)
    return lambda p: not any(at for axis, at in split.items() if axis not in _axes([p], lambda _: 0))


# The part of a split parameter on this process, and sums over the processes that hold its parts.

Span = tuple[int, int]  # the first index, and the index after the last


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
            `fully_sharded`).

    Raises:
        RefusedError: the part is not a block of entries.
    """
    if not is_split(p):
        return None
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    at = mesh.get_coordinate()
    plain = [axis for axis, how in enumerate(placements) if how.is_shard()]
    # Strided shards, from right to left, split what the plain shards leave, as in fully_shard on top of tensor
    # parallelism.
    strided = [a for a, how in enumerate(placements) if not (how.is_shard() or how.is_replicate() or how.is_partial())]
    if at is None or any(how.is_partial() for how in placements):
        raise RefusedError(f"{name} is spread over processes as {tuple(placements)}, so no process holds a block of it")

    def spans(axes: Sequence[int]) -> list[Span]:
        found = [(0, n) for n in p.shape]
        for axis in axes:
            dim = placements[axis].dim
            found[dim] = _chunk(found[dim], mesh.size(axis), at[axis])
        return found

    own = spans([*plain, *reversed(strided)])
    if [last - first for first, last in own] != list(local(p).shape):
        raise RefusedError(f"{name} is split across processes in an unrecognised way: {tuple(placements)}")
    groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    return LocalBlock(
        spans=tuple(own),
        in_pass=tuple(spans([axis for axis in plain if axis >= gathered])),
        groups=groups,
        over=tuple(axis in {*plain, *strided} for axis in range(mesh.ndim)),
    )


def _chunk(span: Span, n: int, i: int) -> Span:
    """Returns the i-th of n chunks of a span, as torch.chunk makes them. The last chunks may be shorter or empty."""
    first, last = span
    size = -(-(last - first) // n)
    return min(first + i * size, last), min(first + (i + 1) * size, last)


def local(p: Tensor) -> Tensor:
    """Returns this process's part of a DTensor as an ordinary tensor that shares its memory; others unchanged."""
    return p.detach().to_local() if is_split(p) else p  # type: ignore[attr-defined]


@final
class PartialSums:
    """Sums values for several parameters over the processes that hold their parts, counting replicas once.

    All sums share one collective over all processes if the parameters' meshes cover them. Otherwise there is one
    collective for each mesh axis.
    """

    def __init__(self, shards: Sequence[LocalBlock | None]) -> None:
        found = {id(group): group for s in shards if s is not None for group in s.groups}
        self._groups = list(found.values())
        self.counted = [all(self._counts(s, group) for group in self._groups) for s in shards]
        if math.prod(map(torch_distributed.get_world_size, self._groups)) == world():
            self._groups = [torch_distributed.group.WORLD] if self._groups else []

    @staticmethod
    def _counts(s: LocalBlock | None, group: ProcessGroup) -> bool:
        """True if this process's values count in a group. Parts always count, but replicas only on the first rank."""
        split = s is not None and any(own is group for own, over in zip(s.groups, s.over) if over)
        return split or torch_distributed.get_rank(group) == 0

    def add_up(self, row: Tensor) -> Tensor:
        """Returns the row summed over the processes."""
        for group in self._groups:
            row = reduced(row, "sum", group)
        return row


def local_blocks(named: Sequence[tuple[str, Tensor]]) -> Iterator[LocalBlock | None]:
    """Yields the part of each parameter that this process holds. Shared parameters are inspected once."""
    seen: dict[int, LocalBlock | None] = {}
    for name, p in named:
        if id(p) not in seen:
            seen[id(p)] = local_block(name, p)
        yield seen[id(p)]
