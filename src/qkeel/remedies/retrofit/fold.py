"""Folds the scales of sigma_reparam into ordinary weights."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import nn

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.patching.forward import unwrapped
from qkeel.patching.module_tables import parameters_of
from qkeel.remedies.apply import forget
from qkeel.remedies.sigma_reparam import SigmaReparam, fold_layer, stored


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The result of `fold`: the layers that are ordinary again, and those that it kept, with the reasons."""

    written: tuple[str, ...]  #: one phrase per folded layer
    kept: tuple[str, ...]  #: one phrase per kept layer

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"folded {line}" for line in self.written),
                *(f"kept {line}" for line in self.kept),
            ]
        )


@torch.no_grad()
def fold(model: nn.Module) -> Folded:
    """Makes Ŵ = (γ/σ) W of `sigma_reparam` the weights of ordinary layers again. Outputs in evaluation stay the same.

    A layer stays as it is if another layer shares W. Pass the whole model, since layers outside it are not seen. Folding
    cannot be undone: the handle of the remedy then no longer has any effect on the folded layers.

    Raises:
        RefusedError: nothing can be folded. The message says why.

    Example:
        >>> from qkeel import apply
        >>> from qkeel.nn import Attention
        >>> attention = Attention(16, 4)
        >>> handle = apply(attention, "sigma_reparam")
        >>> fold(attention).written[0]
        'sigma_reparam of q_proj'
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"expected a torch.nn.Module to fold, got {type(model).__name__}"
        )
    inner_model = unwrapped(model)
    written, kept = list[str](), list[str]()
    holders = _holders(inner_model)
    # Folding removes modules.
    for name, layer in list(inner_model.named_modules()):
        phrase, weights = f"sigma_reparam of {name or 'the model'}", stored(layer)
        sharing = [
            holder
            for p in weights.values()
            for holder, module in holders[id(p)].items()
            if module is not layer
        ]
        if sharing:
            kept.append(
                f"{phrase}: {', '.join(n or 'the model' for n in sharing)} shares its weight and would change "
                "too; give the layer a weight of its own before the remedy is applied, or remove() the handle"
            )
        elif weights:
            fold_layer(layer)
            written.append(phrase)
    # Otherwise the handle still has layers to restore.
    if written and not kept:
        forget(inner_model, lambda remedy: isinstance(remedy, SigmaReparam))
    if not written:
        reason = "; ".join(kept) or "no layer is under sigma_reparam"
        raise RefusedError(f"nothing to fold: {reason}")
    return Folded(written=tuple(written), kept=tuple(kept))


def _holders(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """Returns the modules that hold each parameter, by id of the parameter and name of the module.

    A module with several names is one module. A layer whose weight is computed from the parameter holds it."""
    holders: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        owner = _owner(name)
        for p in parameters_of(module).values():
            if p is not None:
                holders.setdefault(id(p), {})[owner] = model.get_submodule(owner)
    return holders


def _owner(name: str) -> str:
    """Returns the name of a module, or of the layer if the module is one of a layer's parametrizations."""
    return f".{name}".partition(".parametrizations.")[0].removeprefix(".")
