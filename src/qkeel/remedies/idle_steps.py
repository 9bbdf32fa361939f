"""Notices that a remedy for optimizer steps no longer acts: another optimizer trains, or the weights were replaced."""

from __future__ import annotations

import weakref

from qkeel import distributed as dist
from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.patching.autograd import version_of
from qkeel.patching.forward import ForwardPasses
from qkeel.patching.modes import unguarded
from qkeel.patching.optimizers import in_real_steps
from qkeel.patching.roles import PassRole
from qkeel.remedies.base import Remedy, Target, active_on

# Passes between which the weights change without a step of the remedy's optimizer. One is a loaded state or a
# perturbation of the weights, as sharpness-aware steps make it; three in a row are another optimizer's training.
_PASSES = 3


def notice_idle_steps(target: Target, remedy: Remedy) -> Handle:
    """Warns once if the model trains on without steps of the optimizer that a remedy acts on.

    That is: the weights have changed before each of three trained passes in a row since its last step, or they are no
    longer parameters of the model. There is no warning if the same remedy has been applied anew."""
    optimizer = target.need_optimizers(remedy.name)[0]
    model, kind = target.model, type(optimizer).__name__
    modules = [weakref.ref(site.module) for site in target.sites]
    names = list(dict.fromkeys(s.parameter for s in target.logit_slices()))
    weights = [target.parameter(name) for name in names]
    versions: list[int] = []
    passes, has_warned = 0, False

    def after_step(*_: object) -> None:
        nonlocal passes
        passes = 0
        versions.clear()

    def after_pass(output: object, failed: bool) -> None:
        if failed or has_warned:
            return
        if not versions and not is_replaced():
            # The first pass after a step of the optimizer, as all are in training as usual.
            versions[:] = map(version_of, weights)
        else:
            # Only once a gradient reaches the output: references and rollouts are no training.
            PassRole.of_output(model, (), output, look)

    def look() -> None:
        nonlocal passes
        # Weights that stay as they are mean accumulated gradients, however many passes there are.
        current = list(map(version_of, weights))
        passes += bool(versions) and current != versions
        versions[:] = current
        if not has_warned and is_replaced():
            warn(
                "query or key weights are no longer parameters of the model, as after load_state_dict(assign=True) or "
                "with a new layer. Change them before qkeel.apply, or remove() the handle and apply "
                f"{remedy.name} again with an optimizer of the new weights"
            )
        elif not has_warned and passes >= _PASSES:
            warn(
                f"its optimizer ({kind}) took no step while something else changed the query and key weights between "
                f"the last {_PASSES} training passes. If another optimizer trains the model now, remove() the handle "
                f"and apply {remedy.name} with that one"
            )

    def is_replaced() -> bool:
        # fully_shard exchanges parameters during passes. Elsewhere in the model is fine, as under a parametrization that
        # was added later.
        present = {id(parameter) for parameter in model.parameters()}
        return any(not dist.is_split(x) and id(x) not in present for x in weights)

    def warn(reason: str) -> None:
        nonlocal has_warned
        has_warned = True
        applied = [
            active_on(module).get(remedy.name)
            for reference in modules
            if (module := reference()) is not None
        ]
        if all(active is None or active is remedy for active in applied):
            caution(f"{remedy.name} has no effect: {reason}")

    steps = optimizer.register_step_post_hook(in_real_steps(after_step))
    hooks = ForwardPasses(model, lambda *_: None, after_pass, guard=unguarded)
    return compose([hooks, Handle(steps.remove)])
