"""The largest logits of heads over all processes that run the same layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel import distributed as dist
from qkeel.errors import RefusedError
from qkeel.heads.site import AttentionSite
from qkeel.remedies.base import Target, where
from qkeel.remedies.processes import WHAT


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, which is the same on all processes that run these heads.

    They need one collective per step, in the training's own group, since the step needs them. Replicas of a model
    process different sequences, and tensor-parallel processes compute different heads of a layer. The stages of a
    pipeline run different layers, even if these have the same names, so each stage has its own part of the row.
    """

    def __init__(
        self, target: Target, maxima: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        """Sets up the exchange; `maxima` returns the maxima that this process has measured since the last step."""
        self._sites, self._maxima = target.sites, maxima
        self._counts = [site.n_heads for site in target.sites]
        self._nothing = torch.full((sum(self._counts),), -torch.inf)
        self._first: dict[
            str, int
        ] = {}  # this process's first head at each site of which it has a part of the heads
        self._before = self._behind = (
            0  # counts of other layers' values around this process's in the row of all layers
        )
        self.several = False  # whether other processes run the same layers
        self._dtype = torch.float32  # the dtype in which the maxima are reduced
        if dist.world() > 1:
            self._place_heads(target)
            self._meet(target)

    def _meet(self, target: Target) -> None:
        message = {
            "peers": dist.peer_ranks(target.model),
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": self._fingerprint(target),
            "double": any(
                target.parameter(x.parameter).dtype == torch.float64
                for x in target.logit_slices()
            ),
        }
        words = [
            json.loads(word) for word in dist.gather_messages(WHAT, json.dumps(message))
        ]
        self._dtype = (
            torch.float64 if any(word["double"] for word in words) else torch.float32
        )
        fingerprints = [
            word["weights"] and f"{word['weights']} {word['sites']}" for word in words
        ]
        groups = dist.groups_of_models([word["peers"] for word in words], fingerprints)
        lengths = {
            group: sum(n for _, n in words[group]["sites"])
            for group in sorted(set(groups))
        }
        mine = groups[dist.rank()]
        self._before = sum(n for group, n in lengths.items() if group < mine)
        self._behind = sum(n for group, n in lengths.items() if group > mine)
        self.several = len(set(groups)) < len(groups)

    @staticmethod
    def _fingerprint(target: Target) -> str:
        """Returns a checksum of the weights, or "" if a wrapper or mesh shows which processes run the same layers."""
        if len(dist.peer_ranks(target.model)) > 1:
            return ""
        return dist.fingerprint(
            target.model, [s.parameter for s in target.logit_slices()]
        )

    def row(self, maxima: Mapping[str, Tensor]) -> Tensor:
        """Returns the maxima of all sites in one row on one device, with -inf for heads that were not observed here."""
        if not maxima:
            return self._nothing
        device = next(iter(maxima.values())).device
        self._nothing = self._nothing.to(device)
        nothing = self._nothing.split(self._counts)
        return torch.cat(
            [
                self._placed(site, maxima, none)
                for site, none in zip(self._sites, nothing)
            ]
        )

    def _placed(
        self, site: AttentionSite, maxima: Mapping[str, Tensor], nothing: Tensor
    ) -> Tensor:
        top = maxima.get(site.name)
        if top is None:
            return nothing
        if len(top) == site.n_heads:
            return top.to(nothing.device)
        first = self._first[site.name]
        return F.pad(
            top.to(nothing.device),
            (first, site.n_heads - first - len(top)),
            value=-torch.inf,
        )

    def _place_heads(self, target: Target) -> None:
        """Finds the first of this process's heads at each site that tensor parallelism has split.

        fully_shard gathers the weights that it has split for each pass, so a head may be stored in parts."""
        gathered = dist.gathered_axes(target.model)
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
        if not self.several:
            return row
        # No reduction is guaranteed to keep NaN, so infinity, which never causes clipping either, is sent instead.
        sent = row.to(self._dtype).masked_fill(row.isnan(), torch.inf)
        sent = F.pad(sent, (self._before, self._behind), value=-torch.inf)
        largest = dist.reduced(sent, "max")
        return largest[self._before : len(largest) - self._behind].to(row)
