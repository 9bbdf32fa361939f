"""The setting of a run as far as watching shows it: in which number format, and by what kernel, logits are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch

from qkeel.monitor.alarms.setup_rules import Setting
from qkeel.sites.calls.logit_statistics import Seen
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.site import AttentionSite, Kind, NormGain

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
