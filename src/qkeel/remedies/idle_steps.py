"""Notices that a remedy for optimizer steps no longer acts: another optimizer trains, or the weights were replaced."""

from __future__ import annotations

import weakref

from qkeel import distributed as dist
from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.patching.autograd import version_of
from qkeel.patching.forward import ForwardPasses
from qkeel.patching.modes import parameters_of, unguarded
from qkeel.patching.optimizers import in_real_steps
from qkeel.remedies.base import Remedy, Target, active_on

# Passes before which the weights changed without a step of the remedy's optimizer. One is a loaded state or a
# perturbation of the weights, as sharpness-aware steps make it; three are another optimizer's training.
_PASSES = 3


def notice_idle_steps(target: Target, remedy: Remedy) -> Handle:
    """Warns once if the model trains on without steps of the optimizer that a remedy acts on.

    That is: the weights have changed before each of three passes since its last step, or they are no longer parameters
    of the model. There is no warning if the same remedy has been applied anew."""
    optimizer = target.need_optimizers(remedy.name)[0]
    model, kind = target.model, type(optimizer).__name__
    modules = [weakref.ref(site.module) for site in target.sites]
    names = list(dict.fromkeys(s.parameter for s in target.logit_slices()))
    weights = [target.parameter(name) for name in names]
    owner, _, local_name = names[0].rpartition(".")
    layer = model.get_submodule(owner)
    # The sum of the weights' versions before the last pass, if no step of the optimizer followed it.
    version: int | None = None
    passes, has_warned = 0, False

    def after_step(*_: object) -> None:
        nonlocal version, passes
        version, passes = None, 0

    def before_pass(*_: object) -> None:
        nonlocal version, passes, has_warned
        earlier, version = version, sum(map(version_of, weights))
        # Weights that stay as they are mean accumulated gradients or evaluation, however many passes there are.
        passes += earlier not in (None, version)
        # One weight is enough to look at, and fully_shard exchanges parameters during passes. Elsewhere in the model is
        # fine, as under a parametrization that was added later.
        is_replaced = (
            not dist.is_split(weights[0])
            and parameters_of(layer).get(local_name) is not weights[0]
            and all(p is not weights[0] for p in model.parameters())
        )
        if has_warned or not (is_replaced or passes >= _PASSES):
            return
        has_warned = True
        reason = (
            f"its optimizer ({kind}) took no step while something else changed the query and key weights between the "
            f"last {_PASSES} passes. If another optimizer trains the model now, remove() the handle and apply "
            f"{remedy.name} with that one"
        )
        if is_replaced:
            reason = (
                "its query and key weights are no longer parameters of the model, as after "
                "load_state_dict(assign=True). Load before qkeel.apply, or remove() the handle and apply "
                f"{remedy.name} again with an optimizer of the new weights"
            )
        applied = [
            active_on(module).get(remedy.name)
            for reference in modules
            if (module := reference()) is not None
        ]
        if all(active is None or active is remedy for active in applied):
            caution(f"{remedy.name} has no effect: {reason}")

    steps = optimizer.register_step_post_hook(in_real_steps(after_step))
    hooks = ForwardPasses(model, before_pass, lambda *_: None, guard=unguarded)
    return compose([hooks, Handle(steps.remove)])
