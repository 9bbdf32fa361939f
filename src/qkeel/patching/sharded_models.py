"""Models that distributed training has split: stages of pipelines, weights of fully_shard, collectives, Join."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Joinable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qkeel.patching.torch_state import running_frames

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


# The state of distributed training: the store, pipelines, sharded weights and Join.


def process_store() -> distributed.Store:
    """Returns the key-value store of the default process group, which cannot be blocked by a silent process."""
    return distributed.distributed_c10d._get_default_store()


_STAGES = "torch.distributed.pipelining.stage"


def joined(model: nn.Module) -> bool:
    """True inside torch's Join context, where processes may end at different steps.

    `model` must be the wrapper that was passed to the context, such as DistributedDataParallel."""
    return isinstance(model, Joinable) and model._join_config.enable


def running_stage() -> int | None:
    """Returns the index of the pipeline stage whose pass is running, or None if no such pass is running."""
    for frame in _stage_frames():
        stage = (
            vars(frame.f_locals["self"]).get("stage_index")
            if "self" in frame.f_locals
            else None
        )
        if isinstance(stage, int):
            return stage
    return None


# The latter in torch 2.11.
_SHAPES_INFERRED = ("_compute_outputs", "_shape_inference")


def inferring_shapes() -> bool:
    """True in the pass in which a pipeline stage infers the shapes of its outputs, from tensors without data."""
    # a fast exit, since every pass calls this function.
    if _STAGES not in sys.modules:
        return False
    return any(frame.f_code.co_name in _SHAPES_INFERRED for frame in _stage_frames())


def _stage_frames() -> Iterator[FrameType]:
    """Yields the running frames of torch's pipeline stage module, innermost first."""
    module = sys.modules.get(_STAGES)
    if module is not None:
        yield from (
            frame
            for frame in running_frames()
            if frame.f_code.co_filename == module.__file__
        )


def collective_of(operator: object, args: Sequence[object]) -> tuple[int, ...] | None:
    """Returns the ranks that an operator waits for, or None if it is not a collective."""
    if (
        not isinstance(operator, torch._ops.OpOverload)
        or operator.namespace not in _COLLECTIVES
    ):
        return None
    group = None
    if args and isinstance(args[-1], str):
        group = distributed.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[arg-type]
    elif operator.namespace == "c10d" and not _BETWEEN_TWO.search(str(operator)):
        boxed = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        group = None if boxed is None else distributed.ProcessGroup.unbox(boxed)
    return None if group is None else tuple(distributed.get_process_group_ranks(group))


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_BETWEEN_TWO = re.compile("send|recv")


def fsdp1_kinds() -> tuple[type[nn.Module], ...]:
    """Returns the class FullyShardedDataParallel, or nothing if it was not imported, which takes as long as half of torch."""
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return () if home is None else (home.FullyShardedDataParallel,)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A context in which weights that fully_shard has split are complete and have their usual names.

    All processes must enter it together. Passes inside the context need no other process to gather weights, so a pass
    that fails on one process does not block the others."""
    with ExitStack() as undo:
        modules = _sharded_modules(model)
        for module in modules:
            state = module._get_fsdp_state()
            # The first pass would do it and set the outermost module to stay whole
            # afterwards.
            state._lazy_init()
            groups = _parameter_groups(module)
            kept = [
                (state, "_auto_reshard_after_forward"),
                *((group, "post_forward_mesh_info") for group in groups),
            ]
            after = ("reshard_after_backward", "reduce_grads", "all_reduce_grads")
            kept += [(group, name) for group in groups for name in after]
            # A failing pass would leave these marked as running.
            kept += [
                (state._state_ctx, "iter_forward_root"),
                *((x, "_training_state") for x in (state, *groups)),
            ]
            # This is undone last: a group that a failed pass has left marked as running forward would not be
            # resharded.
            undo.callback(module.reshard)
            for owner, name in kept:
                undo.callback(setattr, owner, name, vars(owner)[name])
            module.set_reshard_after_forward(False, recurse=False)
            # A gradient through a part with separately sharded weights, such as a norm of q, would free these weights,
            # and would reduce the gradients that earlier passes have left unreduced.
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
        for module in modules:
            module.unshard()
        yield


def shard_alike(model: nn.Module, part: nn.Module, near: Tensor) -> None:
    """Applies fully_shard to a new part of a model, with the settings of the group that holds the parameter `near`.

    A part that is added after fully_shard is not in any of the model's groups, so its gradients would not be reduced.
    It gets a separate group on the same mesh, with the same precision, offloading and division of gradients. All
    processes must call this together. Nothing happens if `near` is not under fully_shard, or if fully_shard does not
    support the part: it cannot split scalars, and it accepts no new part on a mesh that it shares with tensor
    parallelism.
    """
    # Nearly always, and of every part that is added to a model; a walk over its modules takes longer than the part.
    if not is_traceable_wrapper_subclass(near):
        return
    modules = _sharded_modules(model)
    groups = [group for module in modules for group in _parameter_groups(module)]
    home = next(
        (g for g in groups if any(near is x.sharded_param for x in g.fsdp_params)), None
    )
    sizes = [p.ndim for p in part.parameters()]
    if (
        home is None
        or getattr(home.mesh_info, "is_spmd_mesh", False)
        or not sizes
        or 0 in sizes
    ):
        return
    new = sys.modules[
        "torch.distributed.fsdp"
    ].fully_shard(  # imported by the code that sharded the model
        part,
        mesh=home.mesh_info.mesh,
        # The part lies inside the group, and only the inputs and outputs of the whole group are cast.
        mp_policy=dataclasses.replace(
            home.mp_policy, cast_forward_inputs=False, output_dtype=None
        ),
        offload_policy=home.offload_policy,
        reshard_after_forward=home.post_forward_mesh_info is not None,
    )
    for group in _parameter_groups(new):
        for name in _OF_A_GROUP:
            setattr(group, name, getattr(home, name))


# The settings of a group that users can change: the factor that divides its gradients, and whether and how they are
# reduced.
_OF_A_GROUP = (
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_grads",
    "all_reduce_grads",
)
_OF_A_GROUP += ("reshard_after_backward",)


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Returns the groups in which fully_shard holds a module's own parameters. In torch 2.11 there is at most one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules: list[FSDPModule] = []
    for module in model.modules() if fsdp is not None else ():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            modules.append(module)  # type: ignore[arg-type]
    return modules
