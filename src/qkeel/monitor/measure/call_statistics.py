"""The statistics of an attention call in a Monitor: all, or those that its kernel found while it attended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.functional.statistics.head_formulas import HEAD_FORMULAS, Formula
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.prepare import row_statistics
from qkeel.kernels.stats.logsumexp import sample_rate
from qkeel.kernels.stats.per_head import sampled_stats, stats_of_rows
from qkeel.monitor.measure.run_setting import SettingSeen
from qkeel.monitor.measure.token_classes import PassTokens
from qkeel.sites.calls.logit_statistics import Seen, statistics
from qkeel.sites.calls.scores import ScoresCall
from qkeel.spec import AttentionCall
from qkeel.spec.band_call import of_key

# True for every statistic, "entropy" for those that a compiled kernel finds while it attends; with a sample, on a GPU
# the entropy from one of so many rows.
Wanted = Literal[True, "entropy", "entropy:sample=16", "entropy:sample=32"]


@final
class CallStatistics:
    """Statistics of calls over the tokens that count; what the calls have in common is noted in `setting`."""

    def __init__(self, tokens: PassTokens, setting: SettingSeen, wanted: Wanted = True) -> None:
        self.tokens, self.setting, self._wanted = tokens, setting, wanted

    def call(self, call: Seen) -> LogitStats:
        """Everything, by a pass of its own; where that is not wanted, on a GPU by the one that finds what is."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        found = None if self._wanted is True or not isinstance(counted, AttentionCall) else self._few(counted)
        if found is not None:
            return found
        stats, formulas = statistics(counted), {n: f.of for n, f in HEAD_FORMULAS.items() if f.of is not None}
        return dataclasses.replace(stats, formulas=_formulas(counted, formulas)) if formulas else stats

    def _few(self, call: AttentionCall) -> LogitStats | None:
        """Largest logits and entropies; None where only the pass for everything finds them."""
        rate = sample_rate(str(self._wanted))
        with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
            sampled = sampled_stats(call, rate) if rate else None
            rows = row_statistics(call) if sampled is None else None
        return sampled if rows is None else stats_of_rows(call, KernelRows(rows.largest, rows.lse, rows.entropy))

    def rows(self, call: AttentionCall, rows: KernelRows) -> LogitStats:
        """Largest logits and entropies, from the pass that attended."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        assert isinstance(counted, AttentionCall)
        return stats_of_rows(counted, rows)


def _formulas(call: Seen, formulas: Mapping[str, Formula]) -> dict[str, Tensor]:
    """The statistics of HEAD_FORMULAS of a call; none of packed sequences, or where only the scores were seen."""
    if isinstance(call, AttentionCall) and of_key(call) is None:
        q, k = call.encoded()
    elif isinstance(call, ScoresCall) and call.q is not None and call.k is not None:
        q, k = call.q, call.k
    else:
        return {}
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return {name: formula(q, k, call.query_mask) for name, formula in formulas.items()}
