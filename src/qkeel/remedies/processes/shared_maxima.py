"""The largest logits of heads over all processes that run their layers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.remedies.base import Target, where
from qkeel.remedies.processes.shared_models import WHAT, refuse_late_stage


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, the same on all processes that run them, by one collective per step:
    the one in which a monitor of the same optimizer gathers, where it measures the step, else their own.

    Replicas of a model see other sequences, and tensor parallel processes other heads of the same layer. The stages of
    a pipeline run other layers, whatever these are called, and each has a place of its own in what is reduced.
    """

    def __init__(
        self, target: Target, optimizer: Optimizer, maxima: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        """`maxima`: gives those that this process saw since the last step."""
        self._sites, self._maxima, self._gather = target.sites, maxima, dist.StepGather.of(optimizer)
        self._counts = [site.n_heads for site in target.sites]
        self._nothing = torch.full((sum(self._counts),), -torch.inf)
        self._first: dict[str, int] = {}  # of this process's heads of a site, where it has a part of them
        self._before = self._behind = 0  # numbers of other layers around this process's in the row of all
        self._over_all: dist.StepMaxima | None = None
        self._late: Handle | None = None
        if dist.world() > 1:
            self._place_heads(target)
            self._meet(target)

    @property
    def several(self) -> bool:
        """Returns whether other processes run the same layers."""
        return self._over_all is not None

    def remove(self) -> None:
        """No step wants them any longer."""
        if self._over_all is not None:
            self._gather.maxima.remove(self._over_all)
        if self._late is not None:
            self._late.remove()

    def _meet(self, target: Target) -> None:
        own = {
            "mates": dist.mates(target.model),
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": _fingerprint(target),
            "gather": self._gather.agreed,
        }
        words = [json.loads(word) for word in dist.words_of_all(WHAT, json.dumps(own))]
        groups = _same_layers(words)
        lengths = {group: sum(n for _, n in words[group]["sites"]) for group in sorted(set(groups))}
        mine = groups[dist.rank()]
        self._before = sum(n for group, n in lengths.items() if group < mine)
        self._behind = sum(n for group, n in lengths.items() if group > mine)
        if any(word["weights"] and groups.count(group) > 1 for word, group in zip(words, groups)):
            self._late = refuse_late_stage(target.model, "qk_clip")  # equal stages would be taken for replicas
        if len(set(groups)) < len(groups):
            gathers = {word["gather"] for word in words}
            self._over_all = dist.StepMaxima(self._sent, gathers.pop() if len(gathers) == 1 else "")
            self._gather.maxima.append(self._over_all)

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

    def over_all(self) -> Tensor:
        """The largest of each head over all processes."""
        row = self.row(self._maxima())
        if self._over_all is None:
            return row
        found = self._gather.largest(self._over_all)
        return found[self._before : len(found) - self._behind].to(row)

    def _sent(self) -> Tensor:
        """This process's maxima among those of all layers."""
        row = self.row(self._maxima()).double()
        # No reduction keeps NaN for sure; infinity, which never clips either, is passed on.
        return F.pad(row.masked_fill(row.isnan(), torch.inf), (self._before, self._behind), value=-torch.inf)


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
