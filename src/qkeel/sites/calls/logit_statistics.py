"""The per-head statistics of an attention call that was seen, and its maxima alone, and those of a pass by site."""

from __future__ import annotations

import dataclasses
from typing import final

import torch

from qkeel.functional.statistics.logit_stats import LogitStats, merge
from qkeel.kernels.stats.per_head import logit_maxima, logit_stats
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.sites.calls.mask_functions import FlexCall
from qkeel.sites.calls.scores import ScoresCall, cat_heads, scores_maxima, scores_stats
from qkeel.spec import AttentionCall

Seen = AttentionCall | ScoresCall


def statistics(call: Seen, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Exact statistics of a seen call, in its own precision even under autocast."""
    with torch.no_grad(), torch.autocast(_device(call), enabled=False):
        return scores_stats(call, threshold) if isinstance(call, ScoresCall) else logit_stats(call, threshold)


def maxima(call: Seen) -> LogitStats:
    """The max_logit and min_logit of `statistics`, the rest as if nothing was seen: for less than half its cost. Where
    flex_attention returned the largest logits, they are all that is found, for one operation."""
    with torch.no_grad(), torch.autocast(_device(call), enabled=False):
        if isinstance(call, FlexCall) and call.largest is not None and call.query_mask is None:
            top = call.largest.amax((0, 2))
            return dataclasses.replace(LogitStats.empty(len(top), len(top), top), max_logit=top)
        top, low = scores_maxima(call) if isinstance(call, ScoresCall) else logit_maxima(call)
        nothing = LogitStats.empty(len(top), len(top), top)
        return dataclasses.replace(nothing, max_logit=top, min_logit=low)


def _device(call: Seen) -> str:
    return (call.logits if isinstance(call, ScoresCall) else call.q).device.type


@final
class SiteStatistics:
    """Statistics by site name, and which of them are single heads of one site."""

    def __init__(self) -> None:
        self.stats: dict[str, LogitStats] = {}
        self.heads: dict[str, list[str]] = {}

    def add(self, name: str, new: LogitStats, part_of: str | None) -> None:
        """Adds the statistics of a call; `part_of` names the site of which it is a single head."""
        old = self.stats.get(name)
        self.stats[name] = new if old is None else merge(old, new)
        if part_of is not None and name not in self.heads.setdefault(part_of, []):
            self.heads[part_of].append(name)

    def update(self, other: SiteStatistics) -> None:
        """Adds the statistics of another pass."""
        parts = {name: whole for whole, names in other.heads.items() for name in names}
        for name, stats in other.stats.items():
            self.add(name, stats, parts.get(name))

    def joined(self) -> dict[str, LogitStats]:
        """Per site; heads that were computed one by one as one site."""
        for name, parts in self.heads.items():
            whole = cat_heads([self.stats.pop(part) for part in parts])
            self.stats[name if name not in self.stats else parts[0]] = whole
        return self.stats
