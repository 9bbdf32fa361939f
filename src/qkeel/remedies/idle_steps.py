"""Notices that a remedy no longer acts, or not on all: another optimizer trains, the weights were replaced, attention was
added to the model, or the modules that a remedy had changed are no longer in it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.nn.attention import SpecModule
from qkeel.patching.autograd import writes_to
from qkeel.patching.forward import DormantHook, in_extra_pass
from qkeel.patching.module_tables import (
    ModuleTree,
    hooks_after,
    hooks_before,
)
from qkeel.patching.optimizers import in_real_steps
from qkeel.remedies.base import Remedy, Target, active_on, module_name

# Passes before which the weights changed without a step of the remedy's optimizer. One is a loaded state or a
# perturbation of the weights, as sharpness-aware steps make it; three are another optimizer's training.
_PASSES = 3
_KINDS = (nn.MultiheadAttention, SpecModule)


def notice_idle_steps(target: Target, remedy: Remedy) -> Handle:
    """Warns once if the model trains on without steps of the optimizer that a remedy acts on, and of attention that is put
    into the model later.

    Without steps is: the weights have changed before each of three passes with gradients since its last step, or they
    are no longer parameters of the model. There is no warning if the same remedy has been applied anew."""
    optimizer = target.need_optimizers(remedy.name)[0]
    model, kind = target.model, type(optimizer).__name__
    modules = [weakref.ref(site.module) for site in target.sites]
    names = list(dict.fromkeys(s.parameter for s in target.logit_slices()))
    weights, tree = [target.parameter(name) for name in names], ModuleTree(model)
    ids = {*map(id, weights)}
    # The sum of the weights' versions before the last pass, if no step of the optimizer followed it.
    version: int | None = None
    passes, has_warned = 0, False
    # A new layer is an instance of a class that makes attention calls in this model, or of one that everybody knows.
    kinds = (*{type(site.module) for site in target.sites}, *_KINDS)
    known = weakref.WeakSet[nn.Module](model.modules())
    listed = tree.named()

    def after_step(*_: object) -> None:
        nonlocal version, passes
        version, passes = None, 0

    def look_for_later_attention() -> None:
        nonlocal listed
        earlier, listed = listed, tree.named()
        if listed is earlier:
            return
        added = {name: m for name, m in tree.of_kind(*kinds) if m not in known}
        known.update(added.values())
        if later := [n for n, m in added.items() if remedy.name not in active_on(m)]:
            caution(
                f"{remedy.name} does not act on {', '.join(later)}, which was put into the model later: remove() the "
                f"handle and apply {remedy.name} again"
            )

    def before_pass(*_: object) -> None:
        nonlocal version, passes, has_warned
        # Without gradients it is no training, and may run other weights, as an average of them.
        if has_warned or not torch.is_grad_enabled() or in_extra_pass():
            return
        earlier, version = version, writes_to(weights)
        # Weights that stay as they are mean accumulated gradients, however many passes there are.
        passes += earlier not in (None, version)
        look_for_later_attention()
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
        applied = [
            active_on(module).get(remedy.name)
            for reference in modules
            if (module := reference()) is not None
        ]
        if all(active is None or active is remedy for active in applied):
            caution(f"{remedy.name} has no effect: {reason}")

    steps = optimizer.register_step_post_hook(in_real_steps(after_step))
    hook = _HookWithCopies(
        before_pass, remedy.name, names[0], module_name(target.sites[0])
    )
    calls = model.register_forward_pre_hook(hook, with_kwargs=True)
    return compose([Handle(calls.remove), Handle(steps.remove)])


class _HookWithCopies(DormantHook):
    """A hook before the passes of a model; a deep copy of the model has a `_TrainedCopy` in its place. Pickles load
    without qkeel, and so without a hook."""

    def __init__(self, act: object, *about: str) -> None:
        super().__init__(act)
        self._about = about

    def __deepcopy__(self, memo: object) -> _HookWithCopies:
        return _HookWithCopies(_TrainedCopy(*self._about).before_pass, *self._about)


@final
class _TrainedCopy:
    """Says once that a copy of a model is trained without the model's remedy on steps.

    Trained is a copy one of whose weights gets a gradient and is changed after it. Averages of weights and target
    networks get none, also where their passes are recorded."""

    def __init__(self, remedy: str, weight: str, site: str) -> None:
        self._remedy, self._name, self._site = remedy, weight, site
        self._weight: Tensor | None = None
        self._version: int | None = None

    def before_pass(self, model: nn.Module, *_: object) -> None:
        """Called before each pass of the copy."""
        if not self._name or not torch.is_grad_enabled() or in_extra_pass():
            return
        if self._weight is None:
            try:
                weight = model.get_parameter(self._name)
            except AttributeError:
                # The modules of this copy were exchanged.
                self._name = ""
                return
            if weight.requires_grad:
                self._weight = weight
                weight.register_post_accumulate_grad_hook(self._note_gradient)
        elif self._version not in (None, writes_to([self._weight])):
            self._name = ""
            if self._remedy not in active_on(model.get_submodule(self._site)):
                caution(
                    f"{self._remedy} does not act on a {type(model).__name__} that is trained now: it is a copy of the "
                    f"model that {self._remedy} was applied to, and a copy does not have what acts on an optimizer's "
                    f'steps. Apply it to the copy too: qkeel.apply(copy, "{self._remedy}", optimizer_of_copy)'
                )

    def _note_gradient(self, weight: Tensor) -> None:
        # The first time, since a step within the backward pass may come before this.
        if self._version is None:
            self._version = writes_to([weight])


def changes_of(model: nn.Module) -> dict[nn.Module, tuple[object, ...]]:
    """Returns what a remedy may change in each module inside a model: its forward, and the numbers of its hooks."""
    return {
        m: (vars(m).get("forward"), *hooks_before(m), *hooks_after(m))
        for m in model.modules()
        if m is not model
    }


def notice_replaced_modules(
    model: nn.Module, before: Mapping[nn.Module, tuple[object, ...]], remedy: str
) -> Handle:
    """Warns once if a module that a remedy has changed is no longer in the model, as where layers were converted to 8-bit
    floats. before: what `changes_of` returned before the remedy."""
    tree, states = ModuleTree(model), changes_of(model)
    changed = {m for m, state in states.items() if before.get(m, state) != state}
    names = {m: name for name, m in model.named_modules() if m in changed}

    def before_pass(*_: object) -> None:
        nonlocal modules
        # The same list as long as no module has come or gone.
        earlier, modules = modules, tree.named()
        # Modules that are wrapped in others are still in the model.
        gone = () if modules is earlier else changed.difference(model.modules())
        if gone:
            changed.clear()
            caution(
                f"{remedy} no longer acts at {', '.join(sorted(names[m] for m in gone))}: other modules took their place "
                "since it was applied. Convert or exchange the layers first and apply it then, to a new model"
            )

    modules = tree.named()
    hook = model.register_forward_pre_hook(DormantHook(before_pass), with_kwargs=True)
    return Handle(hook.remove)
