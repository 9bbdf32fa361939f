"""How a model and its data are distributed over processes: wrappers, device meshes, and each process's layout."""

from __future__ import annotations

import dataclasses
import gc
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed

from qkeel.distributed.agree import on, rank, world
from qkeel.errors import RefusedError, unknown
from qkeel.patching.sharded_models import fsdp1_kinds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Importing these modules takes half as long as importing torch. If one has not been imported, no object has its type.
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_DTENSOR = ("torch.distributed.tensor", "DTensor")
_PIPELINE = "torch.distributed.pipelining"
_DEEPSPEED = "deepspeed.runtime.engine"


def _is(value: object, kind: tuple[str, str]) -> bool:
    module = sys.modules.get(kind[0])
    return module is not None and isinstance(value, vars(module)[kind[1]])


# Parameters that are split across processes.


def is_split(x: Tensor) -> bool:
    """True if a tensor is a DTensor, so that each process holds a part or a replica of it."""
    return _is(x, _DTENSOR)


def local(p: Tensor) -> Tensor:
    """Returns this process's part of a DTensor as an ordinary tensor that shares its memory; others unchanged."""
    return p.detach().to_local() if is_split(p) else p  # type: ignore[attr-defined]


def whole(x: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, and any other tensor unchanged."""
    return x.full_tensor() if is_split(x) else x  # type: ignore[attr-defined]


def gathered_axes(model: nn.Module) -> dict[int, int]:
    """Maps the id of each parameter that fully_shard gathers for a pass to the number of mesh axes it is gathered over.

    These axes come first: a replicating and a splitting axis (HSDP), or only a splitting axis. A parameter that
    fully_shard ignores, or that was added to a module later, stays an ordinary tensor and is not included.
    """
    axes = {}
    for module in model.modules():
        for p in module.parameters() if _is(module, _FSDP) else ():
            if is_split(p):
                axes[id(p)] = 2 if p.placements[0].is_replicate() else 1  # type: ignore[attr-defined]
    return axes


def splits_heads(model: nn.Module) -> bool:
    """True if weights stay split across processes in a forward pass, as in tensor parallelism.

    Sharded data parallelism (fully_shard) also splits weights, along separate mesh axes, but gathers them for each
    pass.
    """
    return on() and bool(head_axes(model, model.parameters()))


# Ranks along a mesh axis, including this process's -> this process's index on the axis.
Axes = dict[tuple[int, ...], int]


def _splits(p: Tensor) -> Iterator[tuple[Any, int, tuple[int, ...]]]:
    """Yields each axis over which a parameter is split, with its mesh and this process's place in that."""
    if not is_split(p):
        return
    mesh = p.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(p.placements):  # type: ignore[attr-defined]
        splits = not (placement.is_replicate() or placement.is_partial())
        if splits and coordinate is not None:
            yield mesh, axis, coordinate


def split_axes(
    parameters: Iterable[Tensor], skip: Callable[[Tensor], int] = lambda _: 0
) -> Axes:
    """Returns the axes over which any of these parameters is split, without the first `skip(p)` axes of each."""
    axes: Axes = {}
    for p in parameters:
        for mesh, axis, coordinate in _splits(p):
            if axis >= skip(p):
                line = tuple(
                    slice(None) if other == axis else at
                    for other, at in enumerate(coordinate)
                )
                axes[tuple(mesh.mesh[line].tolist())] = coordinate[axis]
    return axes


def head_axes(model: nn.Module, weights: Iterable[Tensor]) -> Axes:
    """Returns the axes over which these weights stay split in a forward pass, as in tensor parallelism."""
    gathered = gathered_axes(model)
    return split_axes(weights, lambda p: gathered.get(id(p), 0))


def counted(model: nn.Module) -> Callable[[Tensor], bool]:
    """Returns a function that says whether to count this process's part of a parameter. Replicas count only once."""
    axes = split_axes(model.parameters())

    # Along an axis that splits other parameters but not this one, the processes hold replicas of it.
    def counts(p: Tensor) -> bool:
        own_axes = split_axes([p])
        return not any(index for axis, index in axes.items() if axis not in own_axes)

    return counts


# Evidence that modules on several processes form one model: wrappers around them, and meshes of their parameters.


def _living(*kinds: type) -> list[Any]:
    """Returns all objects of these kinds. It checks each type once, because there are far fewer types than objects."""
    if not kinds:
        return []
    objects = gc.get_objects()
    # By identity: a metaclass may forbid hashes.
    types = {id(kind): kind for kind in map(type, objects)}
    wanted = {number for number, kind in types.items() if issubclass(kind, kinds)}
    return [x for x in objects if id(type(x)) in wanted] if wanted else []


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Returns the DistributedDataParallel and FullyShardedDataParallel modules around a model or inside it.

    A module has no reference to its wrapper, and trainers return the inner module, so all Python objects are searched.
    """
    if world() == 1:
        return []
    return _around(model, nn.parallel.DistributedDataParallel, *fsdp1_kinds())


def _around(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    """Returns the modules of these kinds around a model or inside it."""
    inside = {id(module) for module in model.modules()}
    around = []
    for wrapper in _living(*kinds):
        if id(wrapper) in inside or any(
            module is model for module in wrapper.modules()
        ):
            around.append(wrapper)
    return around


def zero_stage(model: nn.Module) -> int:
    """Returns the stage of DeepSpeed's ZeRO under which a model trains (1 to 3), or 0 if it trains without ZeRO.

    From stage 1 on, the optimizer updates flat pieces of the weights, which are copied back where the optimizer's hooks
    cannot reach them. In stage 3 a process holds no weights between two passes.
    """
    home = sys.modules.get(_DEEPSPEED)
    stage = 0
    for engine in [] if home is None else _living(home.DeepSpeedEngine):
        if any(module is model for module in engine.modules()):
            stage = max(stage, engine.zero_optimization_stage())
    return stage


def hides_weights(model: nn.Module) -> str:
    """Returns what holds a model's weights in flat pieces between its passes, in which no rows of heads can be read:
    FullyShardedDataParallel, or stage 3 of DeepSpeed's ZeRO; otherwise ""."""
    # Without a process group there is no wrapper, and all objects of the process need not be searched.
    if on() and _around(model, *fsdp1_kinds()):
        return "FullyShardedDataParallel (FSDP1)"
    return "DeepSpeed's ZeRO, stage 3," if zero_stage(model) == 3 else ""


def wrapped_by(model: nn.Module) -> str:
    """Returns the name of the wrapper or method that distributes a model across processes, or "" if none is found."""
    around = wrappers(model)
    if around:
        return type(around[0]).__name__
    if any(_is(module, _FSDP) for module in model.modules()):
        return "fully_shard"
    return "tensor parallel" if any(map(is_split, model.parameters())) else ""


def peer_ranks(model: nn.Module) -> tuple[int, ...]:
    """Returns the ranks known to run the layers of a model, namely the ranks of its wrappers and parameters' meshes."""
    ranks = {rank()}
    for wrapper in wrappers(model):
        ranks.update(torch_distributed.get_process_group_ranks(wrapper.process_group))  # type: ignore[arg-type]
    for p in model.parameters():
        if is_split(p):
            ranks.update(p.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
    return tuple(sorted(ranks))


def stage_of(model: nn.Module) -> tuple[int, bool] | None:
    """Returns the model's pipeline stage and whether it is the last one, or None if there is no pipeline."""
    home = sys.modules.get(_PIPELINE)
    # Spares the search through all objects.
    if home is None or not on():
        return None
    # Also the base of traced stages.
    base = home.PipelineStage.__mro__[1]
    for stage in _living(base):
        if any(module is model for module in stage.submod.modules()):
            return stage.stage_index, stage.is_last
    return None


def fingerprint(model: nn.Module, names: Iterable[str]) -> str:
    """Returns a checksum of a model: the names and shapes of its weights, and the values of the named ones.

    Processes with equal fingerprints hold replicas of one model, if neither a wrapper nor a mesh shows who does.
    """
    texts = [f"{name}{tuple(p.shape)}" for name, p in model.named_parameters()]
    for name in dict.fromkeys(names):
        p = local(model.get_parameter(name)).detach().double()
        texts += [
            repr(x)
            # ZeRO leaves nothing of a weight between passes.
            for x in torch.stack(
                [p.sum(), p.abs().sum(), p.flatten()[:1].sum()]
            ).tolist()
        ]
    return str(zlib.crc32("".join([*texts, repr(stage_of(model))]).encode()))


def groups_of_models(
    peers: Sequence[Sequence[int]], fingerprints: Sequence[str]
) -> list[int]:
    """Returns, for each process, the lowest rank among the processes that run the same model.

    Args:
        peers: for each process, the ranks that its wrappers and meshes name.
        fingerprints: for each process, the checksum of its weights; "" if its wrappers and meshes are enough.
    """
    groups = list(range(len(peers)))
    for index, ranks in enumerate(peers):
        alike = [
            other
            for other, text in enumerate(fingerprints)
            if text and text == fingerprints[index]
        ]
        for other in (*ranks, *alike):
            old, new = sorted((groups[index], groups[other]), reverse=True)
            groups = [new if group == old else group for group in groups]
    return groups


# The role of a process among those that run one model: its data, heads, layers and weight shards.


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
        cls,
        mesh: DeviceMesh,
        *,
        heads: str | None = None,
        layers: str | None = None,
        context: str | None = None,
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
        names = tuple(mesh.mesh_dim_names or ())
        roles = (heads, layers, context)
        for name in roles:
            if name is not None and name not in names:
                raise unknown("axis of the mesh", name, names)
        coordinate = dict(zip(names, mesh.get_coordinate() or ()))
        data = 0
        for name, size in zip(names, mesh.shape):
            if name not in roles:
                data = data * size + coordinate[name]
        return cls(
            data=data,
            head_part=0 if heads is None else coordinate[heads],
            head_parts=1 if heads is None else mesh.shape[names.index(heads)],
            stage=None if layers is None else coordinate[layers],
            context=0 if context is None else coordinate[context],
        )

    @classmethod
    def of_model(
        cls, model: nn.Module, attentions: Iterable[nn.Module], stage: int | None
    ) -> Self:
        """Returns the role that a model's weights imply. `attentions` are the model's modules with heads.

        Raises:
            RefusedError: the weights of the model's attention layers are split over more than one axis.
        """
        axes: Axes = {}
        for module in attentions:
            axes |= head_axes(model, module.parameters())
        if len(axes) > 1:
            raise RefusedError(
                "the weights of this model's attention layers are split over more than one axis of its mesh, so it is "
                "unknown which heads this process has. Specify the axis of the heads with qkeel.watch(..., "
                "layout=Layout.of_mesh(mesh, heads=...)), where Layout is imported from qkeel.monitor"
            )
        ranks, part = (rank(),), 0
        for ranks, part in axes.items():  # noqa: B007  there is at most one
            pass
        return cls(
            data=min(ranks),
            head_part=part,
            head_parts=len(ranks),
            stage=stage,
            shard=_shard(model),
        )


def _shard(model: nn.Module) -> str:
    """Describes this process's position on the axes that split weights, by a string that is the same for replicas."""
    positions = set()
    for p in model.parameters():
        for mesh, axis, coordinate in _splits(p):
            name = (mesh.mesh_dim_names or range(mesh.ndim))[axis]
            positions.add(f"{name} of {mesh.shape[axis]}: {coordinate[axis]}")
    return ", ".join(sorted(positions))
