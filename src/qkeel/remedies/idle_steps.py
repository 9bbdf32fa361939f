"""Notices that a remedy for optimizer steps no longer acts: another optimizer trains, or the weights were replaced."""

from __future__ import annotations

import torch

from qkeel import distributed as dist
from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.patching.autograd import writes_to
from qkeel.patching.forward import DormantHook, in_extra_pass
from qkeel.patching.modes import ModuleTree
from qkeel.patching.optimizers import in_real_steps
from qkeel.remedies.base import Remedy, Target, active_on

# Passes before which the weights changed without a step of the remedy's optimizer. One is a loaded state or a
# perturbation of the weights, as sharpness-aware steps make it; three are another optimizer's training.
_PASSES = 3


def notice_idle_steps(target: Target, remedy: Remedy) -> Handle:
    """Warns once if the model trains on without steps of the optimizer that a remedy acts on.

    That is: the weights have changed before each of three passes with gradients since its last step, or they are no
    longer parameters of the model. There is no warning if the same remedy has been applied anew."""
    optimizer = target.need_optimizers(remedy.name)[0]
    model, kind = target.model, type(optimizer).__name__
    # No more than the hook of the model holds anyway, in their weights.
    modules = [site.module for site in target.sites]
    names = list(dict.fromkeys(s.parameter for s in target.logit_slices()))
    weights, tree = [target.parameter(name) for name in names], ModuleTree(model)
    ids = {*map(id, weights)}
    # The sum of the weights' versions before the last pass, if no step of the optimizer followed it.
    version: int | None = None
    passes, has_warned = 0, False

    def after_step(*_: object) -> None:
        nonlocal version, passes
        version, passes = None, 0

    def before_pass(*_: object) -> None:
        nonlocal version, passes, has_warned
        # Without gradients it is no training, and may run other weights, as an average of them.
        if has_warned or not torch.is_grad_enabled() or in_extra_pass():
            return
        earlier, version = version, writes_to(weights)
        # Weights that stay as they are mean accumulated gradients, however many passes there are.
        passes += earlier not in (None, version)
        # fully_shard exchanges parameters during passes. Elsewhere in the model is fine, as under a parametrization that
        # was added later.
        missing = ids.difference(map(id, tree.parameters()))
        is_replaced = any([not dist.is_split(x) for x in weights if id(x) in missing])
        if not is_replaced and passes < _PASSES:
            return
        has_warned = True
        reason = (
            f"its optimizer ({kind}) took no step while something else changed the query and key weights between the "
            f"last {_PASSES} passes. If another optimizer trains the model now, remove() the handle and apply "
            f"{remedy.name} with that one"
        )
        if is_replaced:
            reason = (
                "query or key weights are no longer parameters of the model, as after load_state_dict(assign=True) or "
                "with a new layer. Change them before qkeel.apply, or remove() the handle and apply "
                f"{remedy.name} again with an optimizer of the new weights"
            )
        applied = [active_on(module).get(remedy.name, remedy) for module in modules]
        if all(active is remedy for active in applied):
            caution(f"{remedy.name} has no effect: {reason}")

    steps = optimizer.register_step_post_hook(in_real_steps(after_step))
    calls = model.register_forward_pre_hook(DormantHook(before_pass), with_kwargs=True)
    return compose([Handle(calls.remove), Handle(steps.remove)])
