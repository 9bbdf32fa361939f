"""The per-head statistics of an attention call that was seen, and its maxima alone: of SDPA, flex, flash or softmax."""

from __future__ import annotations

import dataclasses

import torch

from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.kernels.stats.per_head import logit_maxima, logit_stats
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.sites.calls.mask_functions import FlexCall
from qkeel.sites.calls.scores import ScoresCall, scores_maxima, scores_stats
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
