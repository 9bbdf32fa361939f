"""The statistics of the attention calls in a Monitor, and their common setting: number format, kernel, size, scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, final

import torch

from qkeel.capture.calls import ScoresCall, Seen, maxima, statistics
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.functional.statistics.rows import KernelRows
from qkeel.heads.site import AttentionSite, Kind, NormGain
from qkeel.kernels.prepare import row_statistics
from qkeel.kernels.stats.logsumexp import sample_rate
from qkeel.kernels.stats.per_head import sampled_stats, stats_of_rows
from qkeel.monitor.alarms.setup_rules import Setting
from qkeel.monitor.measure.token_classes import PassTokens
from qkeel.spec import AttentionCall

# True for every statistic, "entropy" for those that a compiled kernel finds while it attends; with a sample, on a GPU
# the entropy from one of so many rows; "max" for the largest logit alone.
Wanted = Literal[True, "max", "entropy", "entropy:sample=16", "entropy:sample=32"]


@final
class CallStatistics:
    """Statistics of calls over the tokens that count; what the calls have in common is noted in `setting`."""

    def __init__(self, tokens: PassTokens, setting: SettingSeen, wanted: Wanted = True) -> None:
        self.tokens, self.setting, self._wanted = tokens, setting, wanted

    def call(self, call: Seen) -> LogitStats:
        """Everything, by a pass of its own; where that is not wanted, on a GPU by the one that finds what is."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        if self._wanted == "max":
            return maxima(counted)
        found = None if self._wanted is True or not isinstance(counted, AttentionCall) else self._few(counted)
        return statistics(counted) if found is None else found

    def _few(self, call: AttentionCall) -> LogitStats | None:
        """Largest logits and entropies; None where only the pass for everything finds them."""
        rate = sample_rate(str(self._wanted))
        with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
            sampled = sampled_stats(call, rate) if rate else None
            rows = row_statistics(call) if sampled is None else None
        return sampled if rows is None else stats_of_rows(call, KernelRows(rows.largest, rows.lse, rows.entropy))

    def rows(self, call: AttentionCall, rows: KernelRows) -> LogitStats:
        """Largest logits and entropies, or the former alone, from the pass that attended."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        assert isinstance(counted, AttentionCall)
        found = stats_of_rows(counted, rows)
        if self._wanted != "max":
            return found
        nothing = LogitStats.empty(len(found.max_logit), len(found.max_logit), found.max_logit)  # as `maxima` has it
        return dataclasses.replace(nothing, max_logit=found.max_logit)


_NAMES: dict[torch.dtype, Literal["bf16", "fp16", "fp32"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@final
class SettingSeen:
    """Collects what the calls have in common. Where they differ, rules that would need it stay off."""

    def __init__(self) -> None:
        self._formats: set[tuple[torch.dtype, Literal["fused", "eager"]]] = set()
        self._dims: set[int] = set()
        self._scales: set[float | None] = set()

    def see(self, call: Seen) -> None:
        """One attention call."""
        written = isinstance(call, ScoresCall)  # its scores are in memory
        dtype = call.logits.dtype if isinstance(call, ScoresCall) and call.q is None else None
        if call.q is not None:
            dtype = call.q.dtype
            self._dims.add(call.q.shape[-1])
            self._scales.add(call.spec.scale.constant(call.q.shape[-1]))
        if dtype is not None:
            self._formats.add((dtype, "eager" if written else "fused"))

    def of(self, sites: Sequence[AttentionSite]) -> Setting:
        """The facts that hold at all sites, and the q/k norm of the sites that have one, for the bound of its gains."""
        head_dim = next(iter(self._dims)) if len(self._dims) == 1 else None
        dtype, kernel = next(iter(self._formats)) if len(self._formats) == 1 else (None, None)
        scale = next(iter(self._scales)) if len(self._scales) == 1 else None
        known = kernel == "eager" or scale is not None
        kinds: set[Kind] = {gain.kind for site in sites for gain in _both(site)}
        return Setting(
            dtype=_NAMES.get(dtype) if dtype is not None and known else None,
            kernel=kernel,
            head_dim=head_dim,
            scale=scale,
            norm=next(iter(kinds)) if len(kinds) == 1 else None,
        )


def _both(site: AttentionSite) -> tuple[NormGain, ...]:
    """The norms of q and k, if both have one."""
    return (*site.query_gains, *site.key_gains) if site.query_gains and site.key_gains else ()
