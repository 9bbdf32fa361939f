"""Signs that the modules of several processes are one model: wrappers around them, and meshes of their parameters."""

from __future__ import annotations

import gc
import sys

from torch import distributed as torch_distributed
from torch import nn

from qkeel.dist.sharding import is_split, sharded
from qkeel.dist.world import on, rank, world

_PIPELINE = "torch.distributed.pipelining"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def wrappers(model: nn.Module) -> list[nn.Module]:
    """DistributedDataParallel and FullyShardedDataParallel modules that a model is part of, or that are part of it.

    A wrapper does not show in what it wraps, and trainers hand out the module inside: all objects are gone through.
    """
    if world() == 1:
        return []
    found = [x for x in gc.get_objects() if issubclass(type(x), _kinds())]
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
    stages = [x for x in gc.get_objects() if issubclass(type(x), base)]
    return next(((x.stage_index, x.is_last) for x in stages if any(m is model for m in x.submod.modules())), None)


def _kinds() -> tuple[type[nn.Module], ...]:
    flat = sys.modules.get(_FSDP1)
    return (nn.parallel.DistributedDataParallel, *([] if flat is None else [flat.FullyShardedDataParallel]))
