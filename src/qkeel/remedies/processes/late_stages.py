"""Models that turn out to be stages of a pipeline after a remedy took them for whole models."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.patching.parallel_training import running_stage


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
