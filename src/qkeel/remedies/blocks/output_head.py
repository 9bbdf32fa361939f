"""The module that makes the final logits of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.nn.decoder import Decoder
from qkeel.remedies.base import Args, Kwargs, Target
from qkeel.sites.probe import copied, undisturbed
from qkeel.sites.see.running_modules import tensors


def logits_module(target: Target, remedy: str, named: str) -> nn.Module:
    """The module called `named`, or the one whose output, as it is, the model returns for the example.

    qkeel's own Decoder needs neither.

    Raises:
        RefusedError: no such module; no example to observe; no module or several whose output is returned.
    """
    if named:
        try:
            return target.model.get_submodule(named)
        except AttributeError as error:
            raise RefusedError(
                f"{remedy}: this model has no module {named!r}; name the one that makes logits"
            ) from error
    if isinstance(target.model, Decoder):
        return target.model.head
    args, kwargs = target.example
    if not args and not kwargs:
        raise RefusedError(
            f"{remedy} acts on the module that makes the final logits, which one forward pass shows: give an example "
            f"batch, apply({remedy!r}, model, example=batch), or its name, apply({remedy!r}, model, module='lm_head')"
        )
    found = _observed(target.model, args, kwargs)
    if len(found) != 1:
        seen = f"several ({', '.join(found)})" if found else "none"
        raise RefusedError(
            f"{remedy} acts on the module whose output is the model's floating-point output [... vocabulary] as it is, "
            f"and this {type(target.model).__name__} has {seen}; name it: apply({remedy!r}, model, module='lm_head')"
        )
    return target.model.get_submodule(found[0])


def _observed(model: nn.Module, args: Args, kwargs: Kwargs) -> list[str]:
    """Innermost modules whose output tensor is among what the model returns."""
    made: dict[int, tuple[str, Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):

            def note(_: nn.Module, inputs: object, output: object, name: str = name) -> None:
                if isinstance(output, Tensor):
                    made.setdefault(id(output), (name, output))  # inner modules end first

            hooks.append(module.register_forward_hook(note))
    try:
        with torch.no_grad(), undisturbed(model):
            returned = model(*copied(args), **copied(dict(kwargs)))
    finally:
        for hook in hooks:
            hook.remove()
    outputs = {id(x) for x in tensors(_plain(returned)) if x.is_floating_point() and x.ndim > 1}
    return [name for key, (name, _) in made.items() if key in outputs]


def _plain(value: object) -> object:
    return tuple(value.values()) if isinstance(value, dict) else value
