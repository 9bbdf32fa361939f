"""The largest logits of heads over all processes that run the same layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel import distributed as dist
from qkeel.errors import RefusedError, caution
from qkeel.remedies.base import Target, where
from qkeel.remedies.processes import WHAT
from qkeel.sites.site import AttentionSite


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, which is the same on all processes that run these heads.

    They need one collective per step, in the training's own group, since the step needs them. Replicas of a model
    process different sequences, and tensor-parallel processes compute different heads of a layer. The stages of a
    pipeline run different layers, even if these have the same names, so each stage has its own part of the row.

    """

    def __init__(self, target: Target) -> None:
        self._sites = target.sites
        #: This process's first head at each site of which it has a part of the heads.
        self._first: dict[str, int] = {}
        self._told: set[str] = set()
        #: How many values of other layers are around this process's in the row of all layers.
        self._before = self._behind = 0
        self.several = False  #: whether other processes run the same layers
        if dist.world() > 1:
            self._find_first_heads(target)
            self._find_peers(target)

    def _find_peers(self, target: Target) -> None:
        peers = dist.peer_ranks(target.model)
        # Without a wrapper or mesh, equal weights show which processes run the same layers.
        weights = [s.parameter for s in target.logit_slices()]
        message = {
            "peers": peers,
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": dist.fingerprint(target.model, weights)
            if len(peers) < 2
            else "",
        }
        members = [
            json.loads(text) for text in dist.gather_messages(WHAT, json.dumps(message))
        ]
        groups = dist.groups_of_models(
            [member["peers"] for member in members],
            [m["weights"] and f"{m['weights']} {m['sites']}" for m in members],
        )
        own_group = groups[dist.rank()]
        for group in set(groups):
            n = sum(n_heads for _, n_heads in members[group]["sites"])
            self._before += n if group < own_group else 0
            self._behind += n if group > own_group else 0
        self.several = len(set(groups)) < len(groups)

    def _find_first_heads(self, target: Target) -> None:
        """Finds the first of this process's heads at each site that tensor parallelism has split.

        fully_shard gathers the weights that it has split for each pass, so a head may be stored in parts."""
        gathered = dist.gathered_axes(target.model)
        for site in target.sites:
            s = site.terms[0].query[-1]
            p = target.parameter(s.parameter)
            block = dist.local_block(s.parameter, p, gathered.get(id(p), 0))
            if block is None:
                continue
            first, end = block.in_pass[s.axis]
            is_present = (s.index >= first) & (s.index < end)
            if not torch.equal(is_present.all(1), is_present.any(1)):
                raise RefusedError(
                    f"qk_clip at {where(site)}: {s.parameter} is split in the middle of a head, so no process sees the "
                    "logits of that head; split it between heads"
                )
            self._first[site.name] = int(is_present.all(1).int().argmax())

    def over_all(self, maxima: Mapping[str, Tensor]) -> Tensor:
        """Returns the largest logit of each head of all sites over all processes, in one row.

        maxima: what this process has measured, by site; -inf stands for heads that no process has measured."""
        device = next((x.device for x in maxima.values()), torch.device("cpu"))
        heads: list[Tensor] = []
        for site in self._sites:
            values = maxima.get(site.name, torch.empty(0, device=device)).to(device)
            missing = site.n_heads - len(values)
            if missing and len(values) and site.name not in self._first:
                self._tell(site, len(values))
                values, missing = values[:0], site.n_heads
            if missing:
                first = min(self._first.get(site.name, 0), missing)
                values = F.pad(values, (first, missing - first), value=-torch.inf)
            heads.append(values)
        row = torch.cat(heads)
        if not self.several:
            return row
        # No reduction is guaranteed to keep NaN, so infinity, which never causes clipping either, is sent instead.
        sent = row.double().masked_fill(row.isnan(), torch.inf)
        sent = F.pad(sent, (self._before, self._behind), value=-torch.inf)
        largest = dist.reduced(sent, "max")
        return largest[self._before : len(largest) - self._behind].to(row)

    def _tell(self, site: AttentionSite, n_heads: int) -> None:
        """Warns once that a site computes other heads than those whose weights are known."""
        if site.name not in self._told:
            self._told.add(site.name)
            caution(
                f"qk_clip does not clip {where(site)} in steps in which it has {n_heads} heads: it had {site.n_heads} "
                "in the example with which it was applied. Apply it with an example as long as what is trained"
            )
