"""Bounds on the largest logit of each head from the gains of a q/k norm, for any weights before the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.dist.shards import local, shard
from qkeel.functional.norms import wide
from qkeel.monitor.processes.share import Key, Share
from qkeel.nn.spec_module import SpecModule
from qkeel.sites.site import AttentionSite, NormGain
from qkeel.spec.scale import Fixed, InverseSqrt, LogN, Scale, Sqrt

_PLAIN = (Fixed, InverseSqrt, LogN, Sqrt)  # scales without parameters


@final
class GainBounds:
    """Reads `gain_bound` [h] of the sites whose q and k both come from a norm.

    |scale| · ‖q‖max · ‖k‖max with ‖x‖max = factor · (length · max|g| + ‖b‖) per head, length = √n of an RMS or layer
    norm over n numbers and 1 of L2 (Cauchy–Schwarz; a rotation keeps lengths). Nats, before any cap, without what a
    mask or a position bias adds. Reached by a head whose q and k lie along the dimension of the largest gain. Of
    scales that grow with the position (LogN, FloorLogTemperature): up to the training length, below the first floor.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._parameters = dict(model.named_parameters())
        self.sites = [site for site in sites if site.query_gains and site.key_gains and not self._unknown(site)]
        self._places: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def read(self) -> dict[Key, Tensor | Share]:
        """The bound of each site as the gains are now; of gains that are split over processes, the factors of query
        and key of which this one knows its part.
        """
        found: dict[Key, Tensor | Share] = {}
        for site in self.sites:
            query = self._longest(site.query_gains, site.n_heads)
            key = site.per_query_head(self._longest(site.key_gains, site.n_kv_heads))
            query = _scale(site, query) * query
            if any(self._is_split(norm) for norm in (*site.query_gains, *site.key_gains)):
                found[site.name, "query_bound"], found[site.name, "key_bound"] = map(_largest, (query, key))
            else:
                found[site.name, "gain_bound"] = query * key
        return found

    def _is_split(self, norm: NormGain) -> bool:
        return norm.parameter is not None and dist.is_split(self._parameters[norm.parameter])

    def _longest(self, norms: tuple[NormGain, ...], heads: int) -> Tensor:
        """‖x‖max [heads]."""
        parts = [self._served(norm).expand(len(norm.heads)) for norm in norms]
        order = [h for norm in norms for h in norm.heads]
        longest = parts[0] if len(parts) == 1 else torch.cat(parts)
        return longest if order == list(range(heads)) else longest[torch.tensor(order).argsort().to(longest.device)]

    def _served(self, norm: NormGain) -> Tensor:
        length = torch.full((1,), norm.length, device=next(iter(self._parameters.values())).device)
        if norm.parameter is not None and norm.index is not None:
            length = norm.length * self._gains(norm.parameter, norm.index, norm.offset).abs().amax(-1)
        if norm.bias is not None and norm.bias_index is not None:
            length = length + self._gains(norm.bias, norm.bias_index, 0.0).norm(dim=-1)
        return norm.factor * length

    def _gains(self, name: str, index: Tensor, offset: float) -> Tensor:
        """A head's numbers of a parameter and `offset` [n r], float32 or wider; 0 where another process has them."""
        p = self._parameters[name]
        x = local(p).detach().flatten()
        key = id(index), x.device
        if key not in self._places:
            part = shard(name, p)
            first, last = (0, p.numel()) if part is None else (n * (p.numel() // len(p)) for n in part.spans[0])
            at = index.to(x.device)
            self._places[key] = (at - first).clamp(0, max(len(x) - 1, 0)), (at >= first) & (at < last)
        at, here = self._places[key]
        if not len(x):
            return torch.zeros(at.shape, dtype=wide(x.dtype), device=x.device)
        return (offset + x[at].to(wide(x.dtype))).masked_fill(~here, 0.0)

    def _unknown(self, site: AttentionSite) -> bool:
        """Returns whether no process knows the bound: a part of its scale, or of a bias, is with another."""
        params = site.module.spec_params() if isinstance(site.module, SpecModule) else {}
        biases = [norm.bias for norm in (*site.query_gains, *site.key_gains) if norm.bias is not None]
        learned = [] if isinstance(site.spec.scale, _PLAIN) else [*params.values()]
        return any(map(dist.is_split, (*learned, *(self._parameters[name] for name in biases))))


def _largest(value: Tensor) -> Share:
    return Share(value=value, weight=torch.ones_like(value), how="max", of="weights")


def _scale(site: AttentionSite, like: Tensor) -> Tensor:
    """|scale|, one number or one for each head."""
    own = isinstance(site.module, SpecModule) and not isinstance(site.spec.scale, _PLAIN)
    params = site.module.spec_params() if own else {}  # type: ignore[operator]
    at = torch.full((1, 1), _position(site.spec.scale), device=like.device)
    factor = site.spec.scale.factor(at, site.head_dim, params)
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device).abs().flatten()


def _position(scale: Scale) -> int:
    """The positions at which a scale that grows with the position is read."""
    return scale.train_length - 1 if isinstance(scale, LogN) else 0
