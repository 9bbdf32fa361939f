"""The module that makes the final logits of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.capture.modules import tensors
from qkeel.errors import RefusedError
from qkeel.nn.decoder import Decoder
from qkeel.remedies.base import Target


def logits_module(target: Target, remedy: str, named: str) -> nn.Module:
    """The module called `named`, or the one whose output, as it is, the model returns for the example.

    qkeel's own Decoder needs neither. Of a stage of a pipeline that is not the last, a module that nobody runs.

    Raises:
        RefusedError: no such module; no example to observe; no module or several whose output is returned.
    """
    stage = dist.stage_of(target.model)
    if stage is not None and not stage[1]:
        return nn.Identity()  # another stage of the pipeline makes the logits
    if named:
        try:
            return target.model.get_submodule(named)
        except AttributeError as error:
            raise RefusedError(
                f"{remedy}: this model has no module {named!r}; name the one that makes logits"
            ) from error
    if isinstance(target.model, Decoder):
        return target.model.head
    if not any(target.example):
        raise RefusedError(
            f"{remedy} acts on the module that makes the final logits, which one forward pass shows: give an example "
            f"batch, apply({remedy!r}, model, example=batch), or its name, apply({remedy!r}, model, module='lm_head')"
        )
    found = _observed(target)
    if len(found) != 1:
        seen = f"several ({', '.join(found)})" if found else "none"
        raise RefusedError(
            f"{remedy} acts on the module whose output is the model's floating-point output [... vocabulary] as it is, "
            f"and this {type(target.model).__name__} has {seen}; name it: apply({remedy!r}, model, module='lm_head')"
        )
    return target.model.get_submodule(found[0])


def _observed(target: Target) -> list[str]:
    """Innermost modules whose output tensor is among what the model returns."""
    made: dict[int, tuple[str, Tensor]] = {}

    def note(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            made.setdefault(id(output), (name, output))  # inner modules end first

    with ExitStack() as hooks:
        for name, module in target.model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_hook(functools.partial(note, name)).remove)
        returned = target.returned()
    parts = tuple(returned.values()) if isinstance(returned, Mapping) else returned
    outputs = {id(x) for x in tensors(parts) if x.is_floating_point() and x.ndim > 1}
    return [name for key, (name, _) in made.items() if key in outputs]
