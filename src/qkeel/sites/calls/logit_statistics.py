"""The per-head statistics of an attention call that was seen, and its maxima alone: of SDPA, flex, flash or softmax."""

from __future__ import annotations

import dataclasses
from functools import reduce

import torch

from qkeel.functional.statistics.logit_stats import LogitStats, merge
from qkeel.kernels.stats.per_head import logit_maxima, logit_stats
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.sites.calls.mask_functions import PackedCall
from qkeel.sites.calls.scores import ScoresCall, scores_maxima, scores_stats
from qkeel.spec import AttentionCall

Seen = AttentionCall | ScoresCall | PackedCall


def statistics(call: Seen, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Exact statistics of a seen call, in its own precision even under autocast."""
    with torch.no_grad(), torch.autocast(_device(call), enabled=False):
        if isinstance(call, ScoresCall):
            return scores_stats(call, threshold)
        return reduce(merge, (logit_stats(part, threshold) for part in _parts(call)))


def maxima(call: Seen) -> LogitStats:
    """The max_logit and min_logit of `statistics`, the rest as if nothing was seen: for less than half its cost."""
    with torch.no_grad(), torch.autocast(_device(call), enabled=False):
        found = [scores_maxima(call)] if isinstance(call, ScoresCall) else [logit_maxima(part) for part in _parts(call)]
        top, low = (reduce(pick, ends) for pick, ends in zip((torch.maximum, torch.minimum), zip(*found)))
        nothing = LogitStats.empty(len(top), len(top), top)
        return dataclasses.replace(nothing, max_logit=top, min_logit=low)


def _device(call: Seen) -> str:
    return (call.logits if isinstance(call, ScoresCall) else call.q).device.type


def _parts(call: AttentionCall | PackedCall) -> list[AttentionCall]:
    return list(call.parts()) if isinstance(call, PackedCall) else [call]
