"""The largest logits of heads over all processes that run their layers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.remedies.base import Target, where
from qkeel.remedies.processes.wrapped_models import WHAT
from qkeel.sites.site import AttentionSite


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, the same on all processes that run them, by one collective per step.

    Replicas of a model see other sequences, and tensor parallel processes other heads of the same layer. The stages of
    a pipeline run other layers, whatever these are called, and each has a place of its own in what is reduced.
    """

    def __init__(self, target: Target) -> None:
        self._sites = target.sites
        self._counts = [site.n_heads for site in target.sites]
        self._nothing = torch.full((sum(self._counts),), -torch.inf)
        self._first: dict[str, int] = {}  # of this process's heads of a site, where it has a part of them
        self._before = self._behind = 0  # numbers of other layers around this process's in the row of all
        self.several = False
        if dist.world() > 1:
            self._place_heads(target)
            self._meet(target)

    def _meet(self, target: Target) -> None:
        own = {
            "mates": dist.mates(target.model),
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": _fingerprint(target),
        }
        words = [json.loads(word) for word in dist.words_of_all(WHAT, json.dumps(own))]
        groups = _same_layers(words)
        lengths = {group: sum(n for _, n in words[group]["sites"]) for group in sorted(set(groups))}
        mine = groups[dist.rank()]
        self.several = len(set(groups)) < len(groups)
        self._before = sum(n for group, n in lengths.items() if group < mine)
        self._behind = sum(n for group, n in lengths.items() if group > mine)

    def row(self, maxima: Mapping[str, Tensor]) -> Tensor:
        """The maxima of all sites, one after the other, on one device; -inf of heads that this process did not see."""
        if not maxima:
            return self._nothing
        device = next(iter(maxima.values())).device
        self._nothing = self._nothing.to(device)
        nothing = self._nothing.split(self._counts)
        return torch.cat([self._placed(site, maxima, none) for site, none in zip(self._sites, nothing)])

    def _placed(self, site: AttentionSite, maxima: Mapping[str, Tensor], nothing: Tensor) -> Tensor:
        top = maxima.get(site.name)
        if top is None:
            return nothing
        if len(top) == site.n_heads:
            return top.to(nothing.device)
        first = self._first[site.name]
        return F.pad(top.to(nothing.device), (first, site.n_heads - first - len(top)), value=-torch.inf)

    def _place_heads(self, target: Target) -> None:
        """Find out which heads of each site tensor parallelism has left to this process."""
        for site in target.sites:
            for s in site.terms[0].query[-1:]:
                part = dist.shard(s.parameter, target.parameter(s.parameter))
                if part is None:
                    continue
                first, last = part.in_pass[s.axis]
                here = ((s.index >= first) & (s.index < last)).all(1)
                some = ((s.index >= first) & (s.index < last)).any(1)
                if not torch.equal(here, some):
                    raise RefusedError(
                        f"qk_clip at {where(site)}: {s.parameter} is split in the middle of a head, so no process sees "
                        "the logits of that head; split it at whole heads"
                    )
                self._first[site.name] = int(here.int().argmax())

    def over_all(self, row: Tensor) -> Tensor:
        """The largest of each head over all processes."""
        if not self.several:
            return row
        # No reduction keeps NaN for sure; infinity, which never clips either, is passed on.
        sent = F.pad(row.double().masked_fill(row.isnan(), torch.inf), (self._before, self._behind), value=-torch.inf)
        found = dist.reduced(sent, "max")
        return found[self._before : len(found) - self._behind].to(row)


def _same_layers(words: Sequence[Mapping[str, object]]) -> list[int]:
    """For each process the first of those that run the same layers: processes of one wrapper or mesh, and others with
    the same attention and weights."""
    group = list(range(len(words)))
    for i, word in enumerate(words):
        own = (word["sites"], word["weights"])
        alike = [j for j, other in enumerate(words) if word["weights"] and own == (other["sites"], other["weights"])]
        for mate in (*word["mates"], *alike):  # type: ignore[misc]
            old, new = sorted((group[i], group[mate]), reverse=True)
            group = [new if g == old else g for g in group]
    return group


def _fingerprint(target: Target) -> str:
    """A number that tells the weights of two layers apart; "" where a wrapper says which processes run the same."""
    if len(dist.mates(target.model)) > 1:
        return ""
    parts = [f"{name}{tuple(p.shape)}" for name, p in target.model.named_parameters()]
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = target.parameter(name).detach().double()
        parts += [repr(x) for x in torch.stack([p.sum(), p.abs().sum(), p.flatten()[0]]).tolist()]
    return str(zlib.crc32("".join([*parts, repr(dist.stage_of(target.model))]).encode()))
