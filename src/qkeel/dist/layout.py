"""The place of a process among those that run one model: which data, heads, layers and parts of weights it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self, final

from torch import Tensor, nn

from qkeel.dist.sharding import fully_sharded, is_split
from qkeel.dist.world import rank
from qkeel.errors import RefusedError, unknown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
                "this process has is unknown. Say it: qkeel.watch(..., layout=Layout.of_mesh(mesh, heads=...)), Layout "
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
