"""Bounds on the largest logit of each head from the gains of a q/k norm, for any weights before the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.dist.shards import local, shard
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, NormGain
from qkeel.monitor.measure.head_stacks import Joined, Place, Places, stacks
from qkeel.monitor.processes.share import Key, Share, SiteNumbers
from qkeel.nn.spec_module import SpecModule
from qkeel.spec.slot import Geometry, Params


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
        self._placed: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._places: Places | None = None

    @torch.no_grad()
    def read(self) -> SiteNumbers:
        """The bound of each site as the gains are now; of gains that are split over processes, the factors of query
        and key of which this one knows its part.
        """
        if not self.sites:
            return SiteNumbers()
        joined = Joined()
        norms = dict.fromkeys(norm for site in self.sites for norm in (*site.query_gains, *site.key_gains))
        gained = [norm for norm in norms if _has_gain_alone(norm)]
        for offset in dict.fromkeys(norm.offset for norm in gained):
            alike = [norm for norm in gained if norm.offset == offset]
            rows = [self._gains(*_gain(norm), offset)[..., None] for norm in alike]
            for numbers, stack in stacks(rows):
                gains = stack.to(wide(stack.dtype))
                largest = torch.linalg.vector_norm(gains + offset if offset else gains, torch.inf, dim=(1, 2))
                joined.add(largest, [(alike[i], len(rows[i])) for i in numbers])
        for norm in norms:
            if not _has_gain_alone(norm):
                longest = self._longest(norm)
                joined.add(longest, [(norm, len(longest))])
        lengths = joined.whole()
        self._places = self._places or self._looked_up(joined, lengths)
        rows = SiteNumbers(self._places.taken(lengths, torch.mul))
        if not any([self._is_split(site) or _scale_params(site) for site in self.sites]):  # noqa: C419
            return rows
        found: dict[Key, Tensor] = dict(rows)  # type: ignore[arg-type]
        for site in self.sites:
            scaled = (site.name, "query_bound" if self._is_split(site) else "gain_bound")
            if _scale_params(site):
                found[scaled] = _scale(site, found[scaled]) * found[scaled]
        return SiteNumbers((), {key: _largest(x) if key[1] != "gain_bound" else x for key, x in found.items()})

    def _looked_up(self, joined: Joined, like: Tensor) -> Places:
        alone: dict[Key, Place] = {}
        pairs: dict[Key, tuple[Place, Place]] = {}
        for site in self.sites:
            at, factor = _served(site.query_gains, site.n_heads, joined)
            query: Place = [at], factor * (1.0 if _scale_params(site) else _scale(site, factor))
            at, factor = _served(site.key_gains, site.n_kv_heads, joined)
            used = site.used(site.n_kv_heads)
            key: Place = [at[used]], factor[used]
            if self._is_split(site):
                alone |= {(site.name, "query_bound"): query, (site.name, "key_bound"): key}
            else:
                pairs[site.name, "gain_bound"] = query, key
        return Places(alone, pairs, like)

    def _is_split(self, site: AttentionSite) -> bool:
        norms = (*site.query_gains, *site.key_gains)
        return any(n.parameter is not None and dist.is_split(self._parameters[n.parameter]) for n in norms)

    def _longest(self, norm: NormGain) -> Tensor:
        """‖x‖max [n] of a norm with a bias, or without a gain."""
        length = torch.full((1,), norm.length, device=next(iter(self._parameters.values())).device)
        if norm.parameter is not None:
            gains = self._gains(*_gain(norm), norm.offset)
            length = norm.length * (norm.offset + gains.to(wide(gains.dtype))).abs().amax(-1)
        if norm.bias is not None and norm.bias_index is not None:
            bias = self._gains(norm.bias, norm.bias_index, 0.0)
            length = length + bias.to(wide(bias.dtype)).norm(dim=-1)
        return length

    def _gains(self, name: str, index: Tensor, offset: float) -> Tensor:
        """The numbers of each head [n r] of a parameter; -offset where another process has them."""
        p = self._parameters[name]
        x = local(p).detach().flatten()
        part = shard(name, p)
        if part is None and index.numel() == len(x) and index.flatten().equal(torch.arange(len(x))):
            return x.view(index.shape)
        key = id(index), x.device
        if key not in self._placed:
            first, last = (0, p.numel()) if part is None else (n * (p.numel() // len(p)) for n in part.spans[0])
            at = index.to(x.device)
            self._placed[key] = (at - first).clamp(0, max(len(x) - 1, 0)), (at >= first) & (at < last)
        at, here = self._placed[key]
        if not len(x):
            return x.new_full(at.shape, -offset)
        return x[at] if part is None else x[at].masked_fill(~here, -offset)

    def _unknown(self, site: AttentionSite) -> bool:
        """Returns whether no process knows the bound: a part of its scale, or of a bias, is with another."""
        biases = [norm.bias for norm in (*site.query_gains, *site.key_gains) if norm.bias is not None]
        learned = _scale_params(site).values()
        return any(map(dist.is_split, (*learned, *(self._parameters[name] for name in biases))))


def _has_gain_alone(norm: NormGain) -> bool:
    return norm.parameter is not None and norm.bias is None


def _gain(norm: NormGain) -> tuple[str, Tensor]:
    assert norm.parameter is not None
    assert norm.index is not None
    return norm.parameter, norm.index


def _served(norms: tuple[NormGain, ...], heads: int, joined: Joined) -> tuple[Tensor, Tensor]:
    """The place of the longest vector of each head, and the factor that it is multiplied by."""
    at, factors = torch.empty(heads, dtype=torch.long), torch.empty(heads, dtype=torch.float64)
    for norm in norms:
        mine, own = joined.sources[norm], torch.tensor(norm.heads)
        at[own] = torch.arange(mine.start, mine.stop).expand(len(own))
        factors[own] = norm.factor * (norm.length if _has_gain_alone(norm) else 1.0)
    return at, factors


def _largest(value: Tensor) -> Share:
    return Share(value=value, weight=torch.ones_like(value), how="max", of="weights")


def _scale_params(site: AttentionSite) -> Params:
    """The parameters that a learned scale is computed from, {} where it has none."""
    heads = Geometry(n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim)
    if not isinstance(site.module, SpecModule) or not site.spec.scale.parameters(heads):
        return {}
    return site.module.spec_params()


def _scale(site: AttentionSite, like: Tensor) -> Tensor:
    """|scale|, one number or one for each head."""
    at = torch.full((1, 1), site.spec.scale.last_position, device=like.device)
    factor = site.spec.scale.factor(at, site.head_dim, _scale_params(site))
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device).abs().flatten()
