"""The report of a retrofit: what it cost, stage by stage and layer by layer."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.remedies.retrofit.outputs import Gap


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGap:
    """The KL divergence of one site's attention weights."""

    name: str  #: the site's name
    attention_kl_naive: tuple[float, ...]  #: KL per head in nats, with initial gains
    attention_kl: tuple[float, ...]  #: KL per head in nats, with fitted gains

    def __str__(self) -> str:
        before, after = (
            sum(v) / len(v) for v in (self.attention_kl_naive, self.attention_kl)
        )
        return f"{self.name}: attention KL {before:.4g} -> {after:.4g} (head {max(self.attention_kl):.4g})"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitReport:
    """The gap to the old model after each stage of a retrofit; None for a stage that was skipped or did not help."""

    old_loss: (
        float | None
    )  #: next-token loss in nats; None for models without such a loss
    naive: Gap  #: with initial gains
    fitted: Gap  #: with fitted gains
    balanced: Gap | None  #: with queries balanced against keys
    distilled: Gap | None  #: after distillation
    layers: tuple[LayerGap, ...]  #: one per site
    held_out: str = ""  #: the part of the data that was not fitted, on which the gaps are measured; "" if there was none

    @property
    def gap(self) -> Gap:
        """The gap of the final model."""
        return self.distilled or self.balanced or self.fitted

    def __str__(self) -> str:
        if self.held_out:
            lines = [f"measured on {self.held_out}, which were not fitted"]
        else:
            lines = [
                "measured on the data that was fitted: one sequence leaves nothing to hold out"
            ]
        if self.old_loss is not None:
            lines.append(f"loss before {self.old_loss:.4g}")
        lines += [f"naive insertion: {self.naive}", f"gains fitted:    {self.fitted}"]
        if self.balanced is not None:
            lines.append(f"q, k balanced:   {self.balanced}")
        if self.distilled is not None:
            lines.append(f"distilled:       {self.distilled}")
        return "\n".join([*lines, *map(str, self.layers)])
