"""The state of torch's ways to train one model on several processes: the store, pipelines, sharded weights, Join."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Joinable

from qkeel.errors import RefusedError
from qkeel.patching.compiler_state import running_frames

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from qkeel.patching.modes import Args


def process_store() -> distributed.Store:
    """The store at which the processes met, which a silent process cannot block: keys and values that all of them read
    and write."""
    return distributed.distributed_c10d._get_default_store()


def joined(model: nn.Module) -> bool:
    """True in a context of torch's Join, in which processes may end at different steps; asked of the wrapper, such as
    DistributedDataParallel, that the context was given."""
    return isinstance(model, Joinable) and model._join_config.enable


def running_stage() -> int | None:
    """The number of the pipeline stage whose pass is running; None outside of one."""
    for frame in _stage_frames():
        stage = vars(frame.f_locals["self"]).get("stage_index") if "self" in frame.f_locals else None
        if isinstance(stage, int):
            return stage
    return None


def inferring_shapes() -> bool:
    """True in the pass by which a stage finds out the shapes of its outputs, on memory that holds no data."""
    return any(frame.f_code.co_name == "_compute_outputs" for frame in _stage_frames())


def _stage_frames() -> Iterator[FrameType]:
    """The frames of torch's module of stages that are running, the innermost first."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is not None:
        yield from (frame for frame in running_frames() if frame.f_code.co_filename == module.__file__)


def collective_of(operator: object, args: Sequence[object]) -> tuple[int, ...] | None:
    """The ranks of the processes that an operator waits for; None if it is no collective."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace not in _COLLECTIVES:
        return None
    group = None
    if args and isinstance(args[-1], str):
        group = distributed.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[arg-type]
    elif operator.namespace == "c10d" and not _BETWEEN_TWO.search(str(operator)):
        boxed = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        group = None if boxed is None else distributed.ProcessGroup.unbox(boxed)
    return None if group is None else tuple(distributed.get_process_group_ranks(group))


def without_others(operator: object, args: Args) -> Callable[..., object] | None:
    """Returns what stands for an operator when one process repeats it with other numbers and the others don't.

    Of an all-gather that is the own part made again, and the others' as they came; another collective is refused then.
    None for what is no collective, and for functional ones, which all processes repeat.
    """
    ranks = collective_of(operator, args)
    if ranks is None or not str(operator).startswith("c10d."):
        return None

    def parts(gathered: Tensor | Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        return gathered.chunk(len(ranks)) if isinstance(gathered, Tensor) else gathered[0]

    def refuse(*_: object) -> object:
        raise RefusedError(f"{operator} makes them from numbers of other processes")

    def gather(gathered: Tensor | list[list[Tensor]], own: Tensor | list[Tensor], *_: object) -> object:
        for rank, new, came in zip(ranks, parts(gathered), parts(args[0]), strict=True):
            new.copy_(came if rank != distributed.get_rank() else own if isinstance(own, Tensor) else own[0])
        return gathered

    return gather if re.search("c10d._?allgather_(base_)?.default", str(operator)) else refuse


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_BETWEEN_TWO = re.compile("send|recv")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Weights that fully_shard has split are whole, under their names, in this context, which all processes enter
    together. A pass in it waits for no other process on their behalf, and may fail on one of them alone."""
    with ExitStack() as undo:
        modules = _sharded_modules(model)
        for module in modules:
            state = module._get_fsdp_state()
            state._lazy_init()  # the first pass would, and tell the outermost module to stay whole after it
            groups = state._fsdp_param_groups
            kept = [(state, "_auto_reshard_after_forward"), *((group, "post_forward_mesh_info") for group in groups)]
            # A pass that fails leaves behind that it is under way.
            kept += [(state._state_ctx, "iter_forward_root"), *((x, "_training_state") for x in (state, *groups))]
            undo.callback(module.reshard)
            for owner, name in kept:
                undo.callback(setattr, owner, name, vars(owner)[name])
            module.set_reshard_after_forward(False, recurse=False)
        for module in modules:
            module.unshard()
        yield


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found: list[FSDPModule] = []
    for module in model.modules() if fsdp is not None else ():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            found.append(module)  # type: ignore[arg-type]
    return found
