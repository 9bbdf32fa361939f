"""The statistics of the attention calls in a Monitor, and their common setting: number format, kernel, size, scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.capture.calls import ScoresCall
from qkeel.capture.statistics import Seen, find, find_maxima
from qkeel.functional.statistics.rows import KernelRows
from qkeel.heads.site import AttentionSite, Kind, NormGain
from qkeel.kernels.prepare import row_statistics
from qkeel.kernels.stats.found import Found, FoundExtremes, FoundStats
from qkeel.kernels.stats.logsumexp import sample_rate
from qkeel.kernels.stats.per_head import find_kernel_rows, find_plain_extremes, find_plain_rows, sampled_stats
from qkeel.kernels.triton import available
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

    def call(self, call: Seen) -> Found:
        """Everything, by a pass of its own; where that is not wanted, on a GPU by the one that finds what is."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        if self._wanted == "max":
            return find_maxima(counted)
        found = None if self._wanted is True or not isinstance(counted, AttentionCall) else self._few(counted)
        return find(counted) if found is None else found

    def plain(self, q: Tensor, k: Tensor, scale: float, causal: bool) -> Found | None:
        """The same of a call of torch's own function without a mask; None where that does not do."""
        if not self.tokens.all_count:
            return None
        self.setting.see_plain(q, scale)
        return (find_plain_extremes if self._wanted == "max" else find_plain_rows)(q, k, scale, causal)

    def _few(self, call: AttentionCall) -> Found | None:
        """Largest logits and entropies; None where only the pass for everything finds them."""
        if not available.usable(call.q.device):
            return None
        rate = sample_rate(str(self._wanted))
        with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
            sampled = sampled_stats(call, rate) if rate else None
            if sampled is not None:
                return FoundStats(sampled)
            rows = row_statistics(call)
            return None if rows is None else find_kernel_rows(call, KernelRows(rows.largest, rows.lse, rows.entropy))

    def rows(self, call: AttentionCall, rows: KernelRows) -> Found:
        """Largest logits and entropies, or the former alone, from the pass that attended."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        assert isinstance(counted, AttentionCall)
        with torch.no_grad():
            if self._wanted != "max":
                return find_kernel_rows(counted, rows)
            top, mask = rows.largest, counted.query_mask
            return FoundExtremes(top if mask is None else top.masked_fill(~mask[:, None], -torch.inf), None)


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

    def see_plain(self, q: Tensor, scale: float) -> None:
        """One call of torch's own function."""
        self._dims.add(q.shape[-1])
        self._scales.add(scale)
        self._formats.add((q.dtype, "fused"))

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
