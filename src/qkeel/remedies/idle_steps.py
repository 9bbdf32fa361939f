"""Notices that a remedy for optimizer steps no longer acts: another optimizer trains, or the weights were replaced."""

from __future__ import annotations

import weakref
from typing import final

from qkeel import distributed as dist
from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.heads.site import APPLIED
from qkeel.patching.autograd import version_of
from qkeel.patching.forward import ForwardPasses
from qkeel.patching.modes import parameters_of, unguarded
from qkeel.patching.optimizers import in_real_steps
from qkeel.patching.roles import PassRole
from qkeel.remedies.base import Remedy, Target
from qkeel.remedies.head_weights import innermost

_STEPS = 3  # steps of another optimizer in a row that are no coincidence
_PASSES = 100  # the same for passes in which it cannot be told whether a step was taken


def notice_idle_steps(target: Target, remedy: Remedy) -> Handle:
    """Warns once if the model trains on without steps of the optimizer that a remedy acts on.

    There is no warning if the same remedy has been applied anew."""
    optimizer = innermost(target.need_optimizer(remedy.name))
    idle = _IdleSteps(target, remedy, type(optimizer).__name__)
    steps = optimizer.register_step_post_hook(in_real_steps(idle.after_step))
    passes = ForwardPasses(
        target.model, lambda *_: None, idle.after_pass, guard=unguarded
    )
    return compose([passes, Handle(steps.remove)])


@final
class _IdleSteps:
    """Counts the steps that another optimizer takes on a remedy's weights between two steps of its own optimizer.

    A step of another optimizer shows in the passes: the weights have changed since the last one, and no gradients are
    there that still accumulate. Where gradients are set to zero and not dropped, that cannot be told from a program
    that changes weights between passes; then only many passes count.
    """

    def __init__(self, target: Target, remedy: Remedy, optimizer: str) -> None:
        self._model, self._remedy, self._optimizer = target.model, remedy, optimizer
        self._modules = [weakref.ref(site.module) for site in target.sites]
        names = dict.fromkeys(s.parameter for s in target.logit_slices())
        self._weights = [target.parameter(name) for name in names]
        self._places = [
            (
                target.model.get_submodule(name.rpartition(".")[0]),
                name.rpartition(".")[2],
            )
            for name in names
        ]
        self._versions: list[int] = []
        self._steps = self._passes = 0
        self._has_warned = False

    def after_step(self, *_: object) -> None:
        """Starts to count anew after a step of the remedy's optimizer."""
        self._versions = []
        self._steps = self._passes = 0

    def after_pass(self, output: object, failed: bool) -> None:
        """Looks at the weights once a gradient reaches the output: references and rollouts are no training."""
        if not failed and not self._has_warned:
            PassRole.of_output(self._model, (), output, self._look)

    def _look(self) -> None:
        versions = list(map(version_of, self._weights))
        if self._versions and versions != self._versions:
            self._passes += 1
            self._steps += all(weight.grad is None for weight in self._weights)
        self._versions = versions
        if not self._has_warned and self._are_replaced():
            self._warn(
                "its query and key weights are no longer parameters of the model, as after "
                "load_state_dict(assign=True). Load before qkeel.apply, or remove() the handle and apply "
                f"{self._remedy.name} again with an optimizer of the new weights"
            )
        elif not self._has_warned and (
            self._steps >= _STEPS or self._passes >= _PASSES
        ):
            self._warn(
                f"its optimizer ({self._optimizer}) took no step while something else changed the query and key "
                "weights between the last training passes. If another optimizer trains the model now, remove() the "
                f"handle and apply {self._remedy.name} with that one"
            )

    def _are_replaced(self) -> bool:
        held = [parameters_of(module).get(name) for module, name in self._places]
        if all(parameter is weight for parameter, weight in zip(held, self._weights)):
            return False
        # Elsewhere in the model is fine, as under a parametrization that was added later; and fully_shard exchanges
        # parameters during passes.
        weights = [weight for weight in self._weights if not dist.is_split(weight)]
        in_model = {id(parameter) for parameter in self._model.parameters()}
        return any(id(weight) not in in_model for weight in weights)

    def _warn(self, reason: str) -> None:
        self._has_warned = True
        for reference in self._modules:
            module = reference()
            active = (
                None
                if module is None
                else module.__dict__.get(APPLIED, {}).get(self._remedy.name)
            )
            if active is not None and active is not self._remedy:
                return
        caution(f"{self._remedy.name} has no effect: {reason}")
