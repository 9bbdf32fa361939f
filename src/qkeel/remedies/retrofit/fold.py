"""Folds scale factors into ordinary weights where this is exact."""

from __future__ import annotations

import dataclasses
import math
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.functional.norms import widest
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import unwrapped
from qkeel.patching.module_tables import parameters_of
from qkeel.remedies.apply import forget
from qkeel.remedies.base import where
from qkeel.remedies.sigma_reparam import SigmaReparam, fold_layer, stored
from qkeel.remedies.spec_remedy import settle
from qkeel.sites.find import find_sites
from qkeel.sites.site import AttentionSite
from qkeel.spec import InverseSqrt, NoNorm
from qkeel.spec.norm import Norm


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The result of `fold`: the factors that it wrote into weights, and the factors that it kept, with the reasons."""

    written: tuple[str, ...]  #: one phrase per folded factor
    kept: tuple[str, ...]  #: one phrase per kept factor

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"folded {line}" for line in self.written),
                *(f"kept {line}" for line in self.kept),
            ]
        )


@torch.no_grad()
def fold(model: nn.Module) -> Folded:
    """Writes scale factors back into weights in place. Outputs stay the same up to rounding.

    - In any model, Ŵ = (γ/σ) W of `sigma_reparam` becomes the weight of an ordinary layer again, unless another layer
      shares W. Pass the whole model, since layers outside it are not seen.
    - In qkeel's own modules, a logit scale other than 1/√d, constant or learned (`logit_scale`, a temperature), is
      moved into W_q and its bias, or, after a norm with a gain on q, into that gain. Position-dependent factors stay.

    The gains of a q/k norm are not folded, since the norm lies between the weights and the gain. Folding cannot be
    undone: handles of remedies that changed the spec of a folded site no longer have any effect.

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
    if any(isinstance(m, SpecModule) for m in inner_model.modules()):
        for site in find_sites(inner_model):
            reason = _fold_scale(inner_model, site)
            if reason:
                kept.append(f"{where(site)}: {reason}")
            elif reason is not None:
                written.append(f"{where(site)}: its scale")
    if not written:
        default = (
            "no layer under sigma_reparam, and no scale other than 1/√d in qkeel's own "
            "attention"
        )
        raise RefusedError(f"nothing to fold: {'; '.join(kept) or default}")
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


def _fold_scale(model: nn.Module, site: AttentionSite) -> str | None:
    """Returns None if the scale is 1/√d, "" if it was folded, or else the reason why it was not folded."""
    module = site.module
    assert isinstance(module, SpecModule)
    spec, d = module.spec, module.head_dim
    inner = spec.scale.base
    norm = spec.norm if "q" in spec.norm.sides else NoNorm()
    if inner == InverseSqrt():
        if norm.sides in ("", "q") or norm.gain == "none":
            return None
        return f"the gains of {norm.formula()} come after a norm, which undoes any scaling of weights"
    if norm.sides and norm.gain == "none":
        return "q is normed without a gain, which cancels any scaling of its weights"
    if inner.follows_position:
        return f"{inner.formula()} depends on the position"
    factor = inner.factor(torch.zeros(1, 1), d, module.spec_params())
    ratio = (
        (torch.as_tensor(factor, dtype=torch.float64) * math.sqrt(d))
        .flatten()
        .expand(site.n_heads)
    )
    reason = (
        _into_gain(module, norm, ratio)
        if norm.sides
        else _into_weights(model, site, ratio)
    )
    if reason:
        return reason
    parameters_of(module).pop("logit_scale", None)
    module.spec = spec.replace(scale=spec.scale.with_base(InverseSqrt()))
    settle(module)
    forget(module, lambda remedy: remedy.changes_spec)
    return ""


def _into_weights(model: nn.Module, site: AttentionSite, ratio: Tensor) -> str:
    """Multiplies q's last weight in each term, and its bias, by a factor per query head.

    Returns the reason if this is not possible, or else ""."""
    if site.reparametrised:
        return "W_q is computed from another weight"
    elsewhere = {
        id(model.get_parameter(s.parameter))
        for other_site in find_sites(model)
        if other_site.module is not site.module
        for s in (*other_site.query, *other_site.key)
    }
    holders = _holders(model)
    pieces = [term.query[-1] for term in site.terms]
    for piece in pieces:
        key = id(model.get_parameter(piece.parameter))
        if key in elsewhere or len(holders[key]) > 1:
            return f"{piece.parameter} is shared with another layer"
    for piece in pieces:
        for rows in filter(None, (piece, piece.bias_of())):
            p = model.get_parameter(rows.parameter)
            by = rows.lines(ratio.to(p.device, widest(p.device)), p.shape[0])
            p.copy_(p.to(by.dtype) * (by[:, None] if p.ndim > 1 else by))
    return ""


def _into_gain(module: SpecModule, norm: Norm, ratio: Tensor) -> str:
    """Multiplies the gain of q by a factor per query head. Returns the reason if this is not possible, or else ""."""
    if norm.shared:
        return "q and k share one gain"
    per_head = norm.gain in ("head", "head_dim")
    if not per_head and bool((ratio != ratio[0]).any()):
        return f"a scale per head does not fit into gain={norm.gain}, which heads share"
    gain, by = module.get_parameter("q_norm"), ratio[:, None] if per_head else ratio[0]
    offset = 1.0 if norm.gain == "one_plus_dim" else 0.0
    by = by.to(gain.device, widest(gain.device))
    gain.copy_((gain.to(by.dtype) + offset) * by - offset)
    if norm.bias:
        bias = module.get_parameter("q_norm_bias")
        bias.copy_(bias.to(by.dtype) * by)
    return ""
