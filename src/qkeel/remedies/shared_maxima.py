"""The largest logits of heads over all processes that run the same layers."""

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
from qkeel.heads.site import AttentionSite
from qkeel.remedies.base import Target, where
from qkeel.remedies.processes import WHAT


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, which is the same on all processes that run these heads.

    They need one collective per step. In steps that a monitor of the same optimizer measures, they share the monitor's
    collective; in other steps they use a separate one. Replicas of a model process different sequences, and
    tensor-parallel processes compute different heads of a layer. The stages of a pipeline run different layers, even if
    these have the same names, so each stage has its own part of the row.
    """

    def __init__(
        self, target: Target, optimizer: Optimizer, maxima: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        """Sets up the exchange; `maxima` returns the maxima that this process has measured since the last step."""
        self._sites, self._maxima, self._exchange = target.sites, maxima, dist.StepExchange.of(optimizer)
        self._counts = [site.n_heads for site in target.sites]
        self._nothing = torch.full((sum(self._counts),), -torch.inf)
        self._first: dict[str, int] = {}  # this process's first head at each site of which it has a part of the heads
        self._before = self._behind = 0  # counts of other layers' values around this process's in the row of all layers
        self._over_all: dist.StepMaxima | None = None
        self._dtype = torch.float32  # the dtype in which the maxima are reduced
        if dist.world() > 1:
            self._place_heads(target)
            self._meet(target)

    @property
    def several(self) -> bool:
        """True if other processes run the same layers."""
        return self._over_all is not None

    def remove(self) -> None:
        """Ends the exchange of the maxima."""
        if self._over_all is not None:
            self._exchange.maxima.remove(self._over_all)

    def _meet(self, target: Target) -> None:
        message = {
            "peers": dist.peer_ranks(target.model),
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": _fingerprint(target),
            "double": any(target.parameter(x.parameter).dtype == torch.float64 for x in target.logit_slices()),
            "exchange": self._exchange.agreed,
        }
        words = [json.loads(word) for word in dist.gather_messages(WHAT, json.dumps(message))]
        self._dtype = torch.float64 if any(word["double"] for word in words) else torch.float32
        groups = _same_layers(words)
        lengths = {group: sum(n for _, n in words[group]["sites"]) for group in sorted(set(groups))}
        mine = groups[dist.rank()]
        self._before = sum(n for group, n in lengths.items() if group < mine)
        self._behind = sum(n for group, n in lengths.items() if group > mine)
        if len(set(groups)) < len(groups):
            exchanges = {word["exchange"] for word in words}
            self._over_all = dist.StepMaxima(self._sent, exchanges.pop() if len(exchanges) == 1 else "")
            self._exchange.maxima.append(self._over_all)

    def row(self, maxima: Mapping[str, Tensor]) -> Tensor:
        """Returns the maxima of all sites in one row on one device, with -inf for heads that were not observed here."""
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
        """Finds the first of this process's heads at each site that tensor parallelism has split.

        fully_shard gathers the weights that it has split for each pass, so a head may be stored in parts."""
        gathered = dist.fully_sharded(target.model)
        for site in target.sites:
            for s in site.terms[0].query[-1:]:
                p = target.parameter(s.parameter)
                block = dist.local_block(s.parameter, p, gathered.get(id(p), 0))
                if block is None:
                    continue
                first, last = block.in_pass[s.axis]
                is_complete = ((s.index >= first) & (s.index < last)).all(1)
                is_present = ((s.index >= first) & (s.index < last)).any(1)
                if not torch.equal(is_complete, is_present):
                    raise RefusedError(
                        f"qk_clip at {where(site)}: {s.parameter} is split in the middle of a head, so no process "
                        "sees the logits of that head; split it between heads"
                    )
                self._first[site.name] = int(is_complete.int().argmax())

    def over_all(self) -> Tensor:
        """Returns the largest logit of each head over all processes."""
        row = self.row(self._maxima())
        if self._over_all is None:
            return row
        largest = self._exchange.largest(self._over_all)
        return largest[self._before : len(largest) - self._behind].to(row)

    def _sent(self) -> Tensor:
        """Returns this process's maxima at their position in the row of all layers."""
        row = self.row(self._maxima()).to(self._dtype)
        # No reduction is guaranteed to keep NaN, so infinity, which never causes clipping either, is sent instead.
        return F.pad(row.masked_fill(row.isnan(), torch.inf), (self._before, self._behind), value=-torch.inf)


def _same_layers(words: Sequence[Mapping[str, object]]) -> list[int]:
    """Returns, for each process, the lowest rank among the processes that run the same layers.

    These are the processes of the same wrapper or mesh, and others that have the same attention and weights."""
    group = list(range(len(words)))
    for i, word in enumerate(words):
        layers = (word["sites"], word["weights"])
        replicas = [
            j for j, message in enumerate(words) if word["weights"] and layers == (message["sites"], message["weights"])
        ]
        for peer in (*word["peers"], *replicas):  # type: ignore[misc]
            old, new = sorted((group[i], group[peer]), reverse=True)
            group = [new if g == old else g for g in group]
    return group


def _fingerprint(target: Target) -> str:
    """Returns a checksum of the weights, or "" if a wrapper or mesh shows which processes run the same layers."""
    if len(dist.peer_ranks(target.model)) > 1:
        return ""
    parts = [f"{name}{tuple(p.shape)}" for name, p in target.model.named_parameters()]
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = dist.local(target.parameter(name)).detach().double()  # all of it: no other process is in its mesh
        parts += [repr(x) for x in torch.stack([p.sum(), p.abs().sum(), p.flatten()[0]]).tolist()]
    return str(zlib.crc32("".join([*parts, repr(dist.stage_of(target.model))]).encode()))
