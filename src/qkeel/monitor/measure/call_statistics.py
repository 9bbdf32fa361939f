"""The statistics of an attention call in a Monitor: all, or those that its kernel found while it attended."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.functional.statistics.head_formulas import HEAD_FORMULAS
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.prepare import row_statistics
from qkeel.kernels.stats.per_head import stats_of_rows
from qkeel.monitor.measure.run_setting import SettingSeen
from qkeel.monitor.measure.token_classes import PassTokens
from qkeel.sites.calls.logit_statistics import Seen, statistics
from qkeel.sites.calls.scores import ScoresCall
from qkeel.spec import AttentionCall

# True for every statistic, "entropy" for those that a compiled kernel finds while it attends.
Wanted = Literal[True, "entropy"]


@final
class CallStatistics:
    """Statistics of calls over the tokens that count; what the calls have in common is noted in `setting`."""

    def __init__(self, tokens: PassTokens, setting: SettingSeen, wanted: Wanted = True) -> None:
        self.tokens, self.setting, self._wanted = tokens, setting, wanted

    def call(self, call: Seen) -> LogitStats:
        """Everything, by a pass of its own; where that is not wanted, on a GPU by the one that finds what is."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        if self._wanted == "entropy" and isinstance(counted, AttentionCall):
            with torch.no_grad(), torch.autocast(counted.q.device.type, enabled=False):
                found = row_statistics(counted)
            if found is not None:
                return stats_of_rows(counted, KernelRows(found.largest, found.lse, found.entropy))
        stats = statistics(counted)
        return stats if not HEAD_FORMULAS else dataclasses.replace(stats, formulas=_formulas(counted))

    def rows(self, call: AttentionCall, rows: KernelRows) -> LogitStats:
        """Largest logits and entropies, from the pass that attended."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        assert isinstance(counted, AttentionCall)
        return stats_of_rows(counted, rows)


def _formulas(call: Seen) -> dict[str, Tensor]:
    """The statistics of HEAD_FORMULAS of a call; none of packed sequences, or where only the scores were seen."""
    if isinstance(call, AttentionCall):
        q, k = call.encoded()
    elif isinstance(call, ScoresCall) and call.q is not None and call.k is not None:
        q, k = call.q, call.k
    else:
        return {}
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return {name: formula.of(q, k, call.query_mask) for name, formula in HEAD_FORMULAS.items()}
