"""Scale factors written back into plain weights, where that is exact."""

from __future__ import annotations

import dataclasses
import math
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.functional.norms import widest
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.forward_passes import unwrapped
from qkeel.patching.module_tables import parameters_of
from qkeel.remedies.apply import forget
from qkeel.remedies.attention.change_spec import settle
from qkeel.remedies.base import where
from qkeel.remedies.sigma_reparam import SigmaReparam, folded
from qkeel.sites.find import find_sites
from qkeel.spec import InverseSqrt, NoNorm
from qkeel.spec.norm import Norm


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The factors written into weights, and those kept as they are, each with the reason."""

    written: tuple[str, ...]  #: sentences, one for each factor
    kept: tuple[str, ...]  #: sentences, one for each factor

    def __str__(self) -> str:
        return "\n".join([*(f"folded {line}" for line in self.written), *(f"kept {line}" for line in self.kept)])


@torch.no_grad()
def fold(model: nn.Module) -> Folded:
    """Write scale factors back into weights, in place; outputs stay what they were, to rounding.

    - Ŵ = (γ/σ) W of `sigma_reparam` becomes the weight of a plain layer again (any model).
    - A scale of logits other than 1/√d, constant or learned (`logit_scale`, a temperature), goes into W_q and its bias,
      or, behind a norm with a gain of q's own, into that gain; a factor that depends on the position stays
      (own modules).

    Gains of a q/k norm are not folded: the norm stands between the weights and the gain. Where something was folded,
    the model is what it is from now on: handles of remedies that changed the spec of that site do nothing any more.

    >>> from qkeel import apply
    >>> from qkeel.nn import Attention
    >>> attention = Attention(16, 4)
    >>> handle = apply("sigma_reparam", attention)
    >>> fold(attention).written[0]
    'sigma_reparam of q_proj'

    Raises:
        RefusedError: nothing here can be folded; the message says why.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module to fold, got {type(model).__name__}")
    plain = unwrapped(model)
    written = [f"sigma_reparam of {name or 'the model'}" for name, m in plain.named_modules() if folded(m)]
    kept: list[str] = []
    if written:
        forget(plain, lambda remedy: isinstance(remedy, SigmaReparam))
    for site in find_sites(plain) if any(isinstance(m, SpecModule) for m in plain.modules()) else ():
        reason = _fold_scale(plain, site)
        (kept if reason else written).extend([f"{where(site)}: {reason or 'its scale'}"] if reason is not None else [])
    if not written:
        raise RefusedError(
            "nothing to fold: "
            + ("; ".join(kept) or "no layer under sigma_reparam, and no scale of qkeel's own attention but 1/√d")
        )
    return Folded(written=tuple(written), kept=tuple(kept))


def _fold_scale(model: nn.Module, site: AttentionSite) -> str | None:
    """None if the scale is plain, "" if it was folded, else the reason why it was not."""
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
        return "q is normed without a gain, which no scaling of its weights gets past"
    if inner.follows_position:
        return f"{inner.formula()} depends on the position"
    factor = inner.factor(torch.zeros(1, 1), d, module.spec_params())
    ratio = (torch.as_tensor(factor, dtype=torch.float64) * math.sqrt(d)).flatten().expand(site.n_heads)
    reason = _into_gain(module, norm, ratio) if norm.sides else _into_weights(model, site, ratio)
    if reason:
        return reason
    parameters_of(module).pop("logit_scale", None)
    module.spec = spec.replace(scale=spec.scale.with_base(InverseSqrt()))
    settle(module)
    forget(module, lambda remedy: remedy.changes_spec)
    return ""


def _into_weights(model: nn.Module, site: AttentionSite, ratio: Tensor) -> str:
    """Multiply the last matrix that makes q in each term, and its bias, by a factor per query head."""
    pieces: list[HeadSlice] = [term.query[-1] for term in site.terms]
    if site.reparametrised:
        return "W_q is computed from another weight"
    others = [s for other in find_sites(model) if other.module is not site.module for s in (*other.query, *other.key)]
    owned = {id(model.get_parameter(s.parameter)) for s in others}
    for piece in pieces:
        if id(model.get_parameter(piece.parameter)) in owned:
            return f"{piece.parameter} is shared with another attention"
    for piece in pieces:
        for part in filter(None, (piece, piece.bias_of())):
            p = model.get_parameter(part.parameter)
            rows = part.lines(ratio.to(p.device, widest(p.device)), p.shape[0])
            p.copy_(p.to(rows.dtype) * (rows[:, None] if p.ndim > 1 else rows))
    return ""


def _into_gain(module: SpecModule, norm: Norm, ratio: Tensor) -> str:
    """The gain of q times a factor per query head."""
    if norm.shared:
        return "q and k share one gain"
    per_head = norm.gain in ("head", "head_dim")
    if not per_head and bool((ratio != ratio[0]).any()):
        return f"a scale per head does not fit into gain={norm.gain}, which heads share"
    gain, by = module.get_parameter("q_norm"), ratio[:, None] if per_head else ratio[0]
    one = 1.0 if norm.gain == "one_plus_dim" else 0.0
    by = by.to(gain.device, widest(gain.device))
    gain.copy_((gain.to(by.dtype) + one) * by - one)
    if norm.bias:
        bias = module.get_parameter("q_norm_bias")
        bias.copy_(bias.to(by.dtype) * by)
    return ""
