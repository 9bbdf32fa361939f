"""Remedies on a model that several processes train: which are refused, and the handle of a change that all made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.heads.site import AttentionSite
from qkeel.patching.optimizer_hooks import go_first
from qkeel.patching.parallel_training import running_stage
from qkeel.remedies.base import Target, where
from qkeel.remedies.steps.mixed_precision import innermost

WHAT = "qkeel.apply"


def check_wrapper(model: nn.Module) -> None:
    """Raise RefusedError for a model whose parameters FullyShardedDataParallel has flattened: between two passes there
    is nothing, or a part of one vector, behind their names."""
    if any(map(dist.is_flat, dist.wrappers(model))):
        raise RefusedError(
            "this model is wrapped in FullyShardedDataParallel, which flattens its parameters, so the weights of heads "
            "cannot be known. Use torch.distributed.fsdp.fully_shard, or apply the remedy before wrapping"
        )


def check_added(remedy: str, target: Target, before: Mapping[str, Tensor], handle: Handle) -> Handle:
    """Raise RefusedError where a remedy has given a model parameters whose gradients nobody adds up over processes.

    What wraps a model knows the parameters that it had then, and tensor parallelism of heads, which may come later,
    leaves to each process the gradient that its heads have: each pass looks for that until the remedy's handle, which
    is returned, is removed.
    """
    old, model = {id(p) for p in before.values()}, target.model
    several = dist.world() > 1
    added = [n for n, p in model.named_parameters() if n not in before and id(p) not in old] if several else []
    if not added:
        return handle
    wrapper = dist.wrapped_by(model)
    if wrapper:
        more = f" and {len(added) - 1} more" if len(added) > 1 else ""
        raise RefusedError(
            f"{remedy} adds parameters ({added[0]}{more}) to a model that {wrapper} has spread over processes already: "
            "their gradients would not be averaged, and the processes would part. Apply it before the model is wrapped "
            "or split, and make the optimizer after that"
        )

    def look(*_: object) -> None:
        held = [p for site in target.sites for p in site.module.parameters()]
        if not any(map(dist.is_split, held)):
            return
        if dist.head_axes(model, held):
            raise RefusedError(
                f"{remedy} has added parameters ({added[0]}) that all heads share, and tensor parallelism has split "
                "the heads over processes since: each would learn from its own heads only. Use fully_shard or "
                "DistributedDataParallel, or a remedy without parameters"
            )
        hook.remove()

    hook = model.register_forward_pre_hook(look)

    def undo() -> None:
        hook.remove()
        handle.remove()

    return Handle(undo, state=handle.state, load=handle.load)


def check_mates(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Raise ApartError unless processes that run the same layers see the same attention. The stages of a pipeline have
    layers of their own, and nothing to be compared with."""
    if dist.world() == 1:
        return
    own = ", ".join(f"{where(site)} of {site.n_heads} heads" for site in sites) or "no attention"
    mates = dist.mates(model)
    words = dist.words_of_all(WHAT, f"{' '.join(map(str, mates))}|{own}")
    for other, word in enumerate(words):
        group, _, seen = word.partition("|")
        for mate in map(int, group.split()):
            theirs = words[mate].partition("|")[2]
            if theirs != seen:
                raise dist.ApartError(
                    f"{WHAT}: processes of one model hold different attention. Process {other} has {seen}; process "
                    f"{mate} has {theirs}"
                )


def refuse_late_stage(model: nn.Module, remedy: str) -> Handle:
    """Has the first optimizer step raise RefusedError where the passes before it show that a model is a stage whose
    PipelineStage was made after the remedy. All stages know it then, so no process waits for another."""
    if dist.world() == 1 or dist.stage_of(model) is not None:
        return Handle(lambda: None)
    late: list[bool] = []

    def look(*_: object) -> None:
        passes.remove()
        late.append(running_stage() is not None)

    def refuse(*_: object) -> None:
        if any(late):
            raise RefusedError(
                f"{remedy} was applied before the PipelineStage of this model was made, and could not know of which "
                "stage the model is: the step was not taken. Make every PipelineStage before qkeel.apply"
            )

    passes, steps = model.register_forward_pre_hook(look), register_optimizer_step_pre_hook(refuse)
    return compose(map(Handle, (passes.remove, steps.remove)))


def on_all_processes(handle: Handle, name: str, optimizer: Optimizer | None) -> Handle:
    """The handle of a change that all processes have made. Where one of them alone removes it, each raises an error
    before the next step of the optimizer, which is not taken."""
    if dist.world() == 1 or optimizer is None:
        return handle
    member = dist.Membership(name)
    left: list[bool] = []

    def before(*_: object) -> None:
        if not left and not member.step():
            left.append(True)
            if list(hook.hooks_dict_ref() or ())[-1:] == [hook.id]:  # else torch goes on through them: it stays, idle
                hook.remove()

    hook = innermost(optimizer).register_step_pre_hook(before)
    go_first(hook)  # before any other hook waits for the other processes

    def undo() -> None:
        handle.remove()
        member.leave()

    return Handle(undo, state=handle.state, load=handle.load)
