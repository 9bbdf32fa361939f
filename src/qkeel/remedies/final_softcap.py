"""The softcap cap · tanh(z / cap) on the logits over the vocabulary."""

from __future__ import annotations

import dataclasses
import functools
from typing import final

from torch import Tensor, nn

from qkeel.functional.softcap import softcap
from qkeel.handle import Handle, compose
from qkeel.remedies.base import Remedy, Target
from qkeel.remedies.blocks.output_head import logits_module
from qkeel.remedies.processes.shared_models import refuse_late_stage


def _capped(cap: float, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """The forward hook, which copies and pickles of the model carry along."""
    return softcap(output, cap)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinalSoftcap(Remedy):
    """Bends the logits over the vocabulary so that none exceeds `cap`, in training, evaluation and generation.

    `module` names the module that makes them; without it an example shows it.
    """

    cap: float = 30.0
    module: str = ""

    name = "final_softcap"
    line = "bends the logits over the vocabulary with cap·tanh(z/cap)"
    source = "Gemma 2, arXiv 2408.00118, section 2"
    rule = "logits over the vocabulary: z ← {cap:g} · tanh(z / {cap:g})"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        head = logits_module(target, self.name, self.module)
        hook = head.register_forward_hook(functools.partial(_capped, self.cap))
        return compose([Handle(hook.remove), refuse_late_stage(target.model, self.name)])
