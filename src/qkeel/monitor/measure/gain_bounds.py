"""Bounds on the largest logit of each head from the gains of a q/k norm, for any weights before the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.dist import whole
from qkeel.functional.norms import wide
from qkeel.monitor.measure.weight_norms import Numbers
from qkeel.nn.spec_module import SpecModule
from qkeel.sites.site import AttentionSite, NormGain
from qkeel.spec.scale import LogN, Scale


@final
class GainBounds:
    """Reads `gain_bound` [h] of the sites whose q and k both come from a norm.

    |scale| · ‖q‖max · ‖k‖max with ‖x‖max = factor · (length · max|g| + ‖b‖) per head, length = √n of an RMS or layer
    norm over n numbers and 1 of L2 (Cauchy–Schwarz; a rotation keeps lengths). Nats, before any cap, without what a
    mask or a position bias adds. Reached by a head whose q and k lie along the dimension of the largest gain. Of
    scales that grow with the position (LogN, FloorLogTemperature): up to the training length, below the first floor.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self.sites = [site for site in sites if site.query_gains and site.key_gains]
        self._parameters = dict(model.named_parameters())
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    @torch.no_grad()
    def read(self) -> Numbers:
        """The bound of each site as the gains are now."""
        found: Numbers = {}
        for site in self.sites:
            query = self._longest(site.query_gains, site.n_heads)
            key = self._longest(site.key_gains, site.n_kv_heads)
            found[site.name, "gain_bound"] = _scale(site, query) * query * site.per_query_head(key)
        return found

    def _longest(self, norms: tuple[NormGain, ...], heads: int) -> Tensor:
        """‖x‖max [heads]."""
        parts = [self._served(norm).expand(len(norm.heads)) for norm in norms]
        order = [h for norm in norms for h in norm.heads]
        longest = parts[0] if len(parts) == 1 else torch.cat(parts)
        return longest if order == list(range(heads)) else longest[torch.tensor(order).argsort().to(longest.device)]

    def _served(self, norm: NormGain) -> Tensor:
        length = torch.full((1,), norm.length, device=next(iter(self._parameters.values())).device)
        if norm.parameter is not None and norm.index is not None:
            length = norm.length * (norm.offset + self._part(norm.parameter, norm.index)).abs().amax(-1)
        if norm.bias is not None and norm.bias_index is not None:
            length = length + self._part(norm.bias, norm.bias_index).norm(dim=-1)
        return norm.factor * length

    def _part(self, name: str, index: Tensor) -> Tensor:
        """A head's numbers of a parameter [n r], float32 or wider."""
        x = self._parameters[name].detach()
        x = whole(x)
        key = id(index), x.device
        if key not in self._places:
            self._places[key] = index.to(x.device)
        return x.flatten()[self._places[key]].to(wide(x.dtype))


def _scale(site: AttentionSite, like: Tensor) -> Tensor:
    """|scale|, one number or one for each head."""
    params = site.module.spec_params() if isinstance(site.module, SpecModule) else {}
    at = torch.full((1, 1), _position(site.spec.scale), device=like.device)
    factor = site.spec.scale.factor(at, site.head_dim, params)
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device).abs().flatten()


def _position(scale: Scale) -> int:
    """The positions at which a scale that grows with the position is read."""
    return scale.train_length - 1 if isinstance(scale, LogN) else 0
