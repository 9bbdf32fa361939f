"""Remedies on a model that several processes train: which are refused, and the handle of a change made by all."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, with_hook
from qkeel.patching.optimizers import go_first, in_real_steps
from qkeel.patching.torch_state import is_compiled
from qkeel.remedies.base import Remedy, Target, where
from qkeel.remedies.optimizer_trials import innermost
from qkeel.sites.site import AttentionSite

WHAT = "qkeel.apply"
T = TypeVar("T")


def check_wrapper(model: nn.Module, remedies: Sequence[Remedy]) -> None:
    """Raises RefusedError for a model whose parameters FullyShardedDataParallel or DeepSpeed's ZeRO has flattened.

    Between two passes, the parameters of such a model are empty or are parts of one vector. Stages 1 and 2 of ZeRO keep
    complete weights for the passes, so remedies that change only the passes are possible there."""
    if (stage := dist.zero_stage(model)) and (
        stage == 3 or any(remedy.on_steps for remedy in remedies)
    ):
        raise RefusedError(
            f"this model trains under DeepSpeed's ZeRO, stage {stage}, whose optimizer updates flattened pieces of the "
            "weights, in which heads cannot be found. Use torch.distributed.fsdp.fully_shard, ZeRO stage 0, or a "
            "remedy that changes the model, such as qk_norm or softcap, applied before deepspeed.initialize"
        )
    if dist.hides_weights(model):
        raise RefusedError(
            "this model is wrapped in FullyShardedDataParallel, which flattens its parameters, so the weights of heads "
            "cannot be known. Use torch.distributed.fsdp.fully_shard(module) for each module that is wrapped now, or apply "
            "a remedy that changes the model, such as qk_norm, before wrapping"
        )


def agreed(act: Callable[[], T]) -> T:
    """Runs a function that may refuse a remedy, and refuses the remedy on all processes if it does so on one.

    The passes that follow may wait for the other processes, for example if the processes of a model exchange keys. A
    process that ran such a pass alone would wait forever, or would mistake another message for the one it expects."""
    if dist.world() == 1:
        return act()
    try:
        done = act()
    except dist.ApartError:
        raise
    except Exception as error:
        dist.fail_on_all(WHAT, error)
        raise
    dist.gather_messages(WHAT, "not refused")
    return done


def check_added(
    remedy: str, target: Target, before: Mapping[str, Tensor], handle: Handle
) -> Handle:
    """Raises RefusedError if a remedy has added parameters whose gradients are not reduced over the processes.

    A wrapper reduces only the gradients of parameters that the model had when it was wrapped, whereas fully_shard can
    also be applied to new modules. Under tensor parallelism each process has only the gradient from its own heads.
    Tensor parallelism may be applied later, so every pass checks for it until the returned handle is removed.
    """
    model = target.model
    zero = dist.zero_stage(model) > 0
    if not zero and dist.world() == 1:
        return handle
    old = {id(p) for p in before.values()}
    new = {
        name: p
        for name, p in model.named_parameters()
        if name not in before and id(p) not in old
    }
    if not new:
        return handle
    first = next(iter(new))
    wrapper = "ZeRO" if zero else dist.wrapped_by(model)
    reduced = dist.gathered_axes(model)
    if wrapper and not all(id(p) in reduced for p in new.values()):
        raise RefusedError(
            f"{remedy} adds parameters ({first}, …) to a model that {wrapper} has already spread across "
            "processes: their gradients would not be averaged, and the processes would diverge. Apply it before the "
            "model is wrapped or split, and create the optimizer after that"
        )
    if wrapper and any(map(is_compiled, model.modules())):
        raise RefusedError(
            f"{remedy} adds modules ({first}) to a model that has compiled parts: fully_shard's hooks on them "
            "break a compiled part into pieces, or make it fail if fullgraph=True. Apply it before parts are "
            "compiled, or compile the whole model afterwards"
        )

    # The target holds the trace of a pass, and so its graph.
    modules = [site.module for site in target.sites]

    def check() -> bool:
        held = [p for module in modules for p in module.parameters()]
        if not any(map(dist.is_split, held)):
            return False
        if dist.head_axes(model, held):
            raise RefusedError(
                f"{remedy} has added parameters ({first}) that all heads share, and tensor parallelism has split "
                "the heads across processes: each process would update them from its own heads only. Use fully_shard "
                "or DistributedDataParallel, or a remedy without parameters"
            )
        return True

    if check():
        return handle

    def look(*_: object) -> None:
        if check():
            hook.remove()

    hook = model.register_forward_pre_hook(look)
    return with_hook(handle, hook.remove)


def check_peers(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Raises ApartError unless all processes that run the same layers have found the same attention.

    The stages of a pipeline have different layers and are therefore not compared."""
    if dist.world() == 1:
        return
    description = (
        ", ".join(f"{where(site)} of {site.n_heads} heads" for site in sites)
        or "no attention"
    )
    peers = dist.peer_ranks(model)
    words = dist.gather_messages(WHAT, f"{' '.join(map(str, peers))}|{description}")
    for process, word in enumerate(words):
        group, _, attention = word.partition("|")
        for peer in map(int, group.split()):
            theirs = words[peer].partition("|")[2]
            if theirs != attention:
                raise dist.ApartError(
                    f"{WHAT}: the processes of one model hold different attention layers. Process {process} has "
                    f"{attention}; process {peer} has {theirs}"
                )


def refused_when_flattened(
    handle: Handle,
    model: nn.Module,
    remedies: Sequence[Remedy],
    optimizer: Optimizer | None,
) -> Handle:
    """Returns a handle of remedies that makes every step raise RefusedError if deepspeed.initialize was called later, or
    the model was wrapped in FullyShardedDataParallel.

    This concerns only remedies that change optimizer steps."""
    may_be_flattened = dist.on() or "deepspeed" in sys.modules
    on_steps = any(remedy.on_steps for remedy in remedies)
    if optimizer is None or not may_be_flattened or not on_steps:
        return handle
    # The look through the model is done once; a refusal, which is not cached, is found again in every step.
    check = functools.cache(lambda: check_wrapper(model, remedies))
    stepped = innermost(optimizer)
    hook = stepped.register_step_pre_hook(in_real_steps(lambda *_: check()))
    # Before the remedies read weights, of which there are only pieces between passes.
    go_first(hook)
    return with_hook(handle, hook.remove)
