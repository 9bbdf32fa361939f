"""Norms after the projections that produce the heads: before the rotation, and before keys enter a cache.

Shapes: b batch, t tokens, h heads, d dimensions per head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.patching.module_forward import InstanceForward
from qkeel.remedies.base import (
    Args,
    Kwargs,
    quantised,
    unconfirmed,
)
from qkeel.remedies.spec_remedy import refuse_heads
from qkeel.sites.site import AttentionSite, HeadSlice, unique_slices
from qkeel.spec.logits import Scale
from qkeel.spec.norm import Norm, NormedPart
from qkeel.spec.slot import ParameterSizes, Params

SIDES: dict[NormedPart, str] = {"q": "queries", "k": "keys", "v": "values"}


@final
class HeadNorm(nn.Module):
    """The norm x̃ = norm(x) · gain · factor (· learned scale) of x [... h d], where `weight` is the gain.

    `factor` implements a change of the logit scale and differs from 1 on only one side, q or k.
    """

    def __init__(
        self,
        norm: Norm,
        part: NormedPart,
        geometry: ParameterSizes,
        like: Tensor,
        *,
        factor: float,
        learned: Scale | None,
    ) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor
        self.part: NormedPart = part
        self.heads = geometry.n_heads
        gain = norm.init_params(geometry).get(f"{part}_norm")
        self.weight = None if gain is None else nn.Parameter(gain.to(like))
        self.logit_scale = None
        if learned is not None:
            scale = learned.init_params(geometry)["logit_scale"].squeeze(-1)
            self.logit_scale = nn.Parameter(scale.to(like))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [... h d] normed, in its dtype."""
        params: Params = {}
        if self.weight is not None:
            params[f"{self.part}_norm"] = self.weight
        # [n h 1 d]: each token is a sequence of one, whatever dimensions come before.
        rows = x.reshape(-1, *x.shape[-2:])[:, :, None]
        y = self.norm.apply(self.part, rows, params).reshape(x.shape)
        if self.logit_scale is not None:
            y = y * (self.factor * self.logit_scale).to(y.dtype)
        elif self.factor != 1.0:
            y = y * self.factor
        return y.clone() if self.by_itself else y

    @property
    def by_itself(self) -> bool:
        """True if fully_shard gathers this module's gain separately, in which case it changes the module's class.

        fully_shard's hooks on an output are lost if the output is a view and is changed in place."""
        return type(self) is not HeadNorm

    def extra_repr(self) -> str:
        """Shows the norm in print(model)."""
        return repr(self.norm)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSource:
    """The module output that contains q, k or v: the features `index` [n d] out of `size`."""

    module: nn.Module
    name: str
    index: Tensor
    size: int


def heads_of(
    model: nn.Module, site: AttentionSite, part: NormedPart, ways: Iterable[HeadSlice]
) -> HeadSource:
    """Returns the module whose output contains complete heads of q, k or v.

    Args:
        model: the model that contains the weights.
        site: the attention.
        part: the side to look for: q, k or v.
        ways: the last weight before the score for each term of the logit.

    Raises:
        RefusedError: there is none, or heads are made of the outputs of several modules. The message says why.
    """
    side, n_heads = SIDES[part], site.n_heads if part == "q" else site.n_kv_heads
    # Values have no logit by which an experiment could confirm them, and spectral norm lets every head depend on all
    # stored rows; whether the norms act on whole heads is checked once they are there.
    if part != "v" and site.unverified and not site.reparametrised:
        raise RefusedError(str(unconfirmed(site)))
    slices = unique_slices(ways)
    if not slices:
        refusal = quantised(site)
        why = site.why if refusal is None else refusal.reason
        raise refuse_heads(f"it is not known which weights produce the {side} ({why})")
    names = sorted({s.parameter for s in slices})
    weight = model.get_parameter(names[0])
    name = _owner(names[0])
    module = model.get_submodule(name)
    # Heads of a convolution are channels, and no last dimension of its output.
    is_convolution = weight.ndim > 2
    is_around = site.module in module.modules()
    is_apart = len(names) > 1 or {s.n for s in slices} != {n_heads}
    if is_convolution or is_around or is_apart:
        raise refuse_heads(
            f"no single module outputs complete heads of the {side} ({n_heads} heads of {site.head_dim}): they are "
            f"computed by {', '.join(names)}"
        )
    return HeadSource(
        module=module,
        name=name,
        index=torch.cat([s.index for s in slices], dim=1).sort(dim=1).values,
        size=weight.shape[slices[0].axis],
    )


def _owner(parameter: str) -> str:
    """Returns the name of the module that computes with a parameter."""
    owner, separator, _ = parameter.partition(".parametrizations.")
    return owner if separator else parameter.rpartition(".")[0]


@final
class NormedProjection(InstanceForward):
    """A projection with normed heads: only q, or q, k (and v) of a fused projection."""

    def __init__(
        self, source: HeadSource, norms: list[tuple[HeadNorm, Tensor]]
    ) -> None:
        super().__init__(source.module)
        self.size = source.size
        self.norms = [norm for norm, _ in norms]
        # The sizes of the outputs in a trial pass.
        self.seen: list[int] | None = None
        # Adjacent heads are views of the output; others are gathered and put back.
        self.blocks: list[tuple[int, int, HeadNorm]] | None = []
        for norm, index in norms:
            first, features = int(index[0, 0]), index.flatten().cpu()
            if self.blocks is not None:
                self.blocks.append((first, first + len(features), norm))
            if not torch.equal(features, torch.arange(first, first + len(features))):
                self.blocks = None
        if self.blocks is None:
            device = next(self.module.parameters()).device
            for norm, index in norms:
                norm.register_buffer("features", index.to(device), persistent=False)
        else:
            self.blocks.sort(key=lambda block: block[0])

    def run(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Returns the projection's output with its heads normed."""
        out = self.replaced(args, kwargs)
        if self.seen is not None:
            self.seen.append(out.shape[-1] if isinstance(out, Tensor) else 0)
        if self.blocks is None:
            for norm in self.norms:
                index = norm.get_buffer("features")
                # As in Falcon's groups of query heads, each followed by its key and value.
                heads = norm(out[..., index]).flatten(-2)
                out = out.index_copy(-1, index.flatten(), heads)
            return out
        pieces, end = [], 0
        for start, stop, norm in self.blocks:
            heads = norm(out[..., start:stop].unflatten(-1, (norm.heads, -1)))
            pieces += [out[..., end:start], heads.flatten(-2)]
            end = stop
        pieces = [piece for piece in (*pieces, out[..., end:]) if piece.shape[-1]]
        if len(pieces) > 1:
            return torch.cat(pieces, dim=-1)
        # The model may change it in place (see `HeadNorm.by_itself`).
        return pieces[0].clone() if self.norms[0].by_itself else pieces[0]
