"""Tells of training through a part of a model, whose calls belong to no pass of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import nn

from qkeel.errors import caution
from qkeel.handle import Handle
from qkeel.patching.forward import DormantHook, ForwardPasses
from qkeel.patching.guards import Guarded
from qkeel.patching.roles import PassRole
from qkeel.patching.sharded_models import inferring_shapes
from qkeel.patching.torch_state import recomputing
from qkeel.sites.site import AttentionSite

# Programs that call a part of the model do so in each step, so hooks on every layer need not stay.
_PASSES = 8


@final
class OutsideCalls(Handle):
    """Warns once if a gradient reaches what attention returned outside the model's passes, as in `model.encoder(x)`.

    Such calls are in no pass: no number has them, and no clip sees their logits.
    """

    def __init__(
        self,
        passes: ForwardPasses,
        sites: Iterable[AttentionSite],
        guard: Guarded,
        owner: object,
    ) -> None:
        self._model, self._guard = passes, guard
        self._left = _PASSES
        names = {site.module: site.name for site in sites if site.module is not None}
        names.pop(passes.inner, None)
        self._hooks = [
            module.register_forward_hook(
                DormantHook(
                    lambda module, _, output, compiled: self._guard(
                        self._called, module, names[module], output
                    ),
                    owner,
                )
            )
            for module in names
        ]
        super().__init__(self._unhook)

    def count_pass(self) -> None:
        """Called at each of the model's passes: after a few, the hooks go."""
        self._left -= 1
        if not self._left:
            self.remove()

    def _called(self, module: nn.Module, name: str, output: object) -> None:
        is_part_of_a_pass = self._model.busy or recomputing() or inferring_shapes()
        if self.active and torch.is_grad_enabled() and not is_part_of_a_pass:
            PassRole.of_output(module, (), output, lambda: self._tell(name))

    def _tell(self, name: str) -> None:
        if not self.active:
            return
        self.remove()
        kind = type(self._model.inner).__name__
        caution(
            f"{name} was trained by a call that did not come through {kind}(...), such as model.encoder(x): no number "
            f"of qkeel's and no remedy's limit counts such calls. Make them in {kind}.forward, or watch a module "
            "whose forward makes all calls of a step"
        )

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
