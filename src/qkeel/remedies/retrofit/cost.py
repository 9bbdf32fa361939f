"""The cost of a retrofit, in numbers."""

from __future__ import annotations

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The distance of a changed model from the old one on the batches given.

    `kl`: mean over tokens of KL(old ‖ new) of the predicted distributions, in nats. `loss`: the new loss of the next
    tokens minus the old one, in nats; None where there is no such loss.
    """

    kl: float
    loss: float | None

    def __str__(self) -> str:
        return f"KL {self.kl:.4g}" + ("" if self.loss is None else f", loss {self.loss:+.4g}")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGap:
    """One site: KL of its attention weights (per head) with gains as they start and as fitted, and the model's gap if
    this site alone is normed."""

    name: str
    attention_kl_naive: tuple[float, ...]
    attention_kl: tuple[float, ...]
    alone: Gap

    def __str__(self) -> str:
        before, after = (sum(v) / len(v) for v in (self.attention_kl_naive, self.attention_kl))
        return (
            f"{self.name}: attention KL {before:.4g} -> {after:.4g} (head {max(self.attention_kl):.4g}); {self.alone}"
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitReport:
    """The gap to the old model with naive gains, with fitted ones, with queries balanced against keys, and after
    distillation; None for what was not done or did not help."""

    old_loss: float | None
    naive: Gap
    fitted: Gap
    balanced: Gap | None
    distilled: Gap | None
    layers: tuple[LayerGap, ...]

    @property
    def gap(self) -> Gap:
        """The gap of the model as it was left."""
        return self.distilled or self.balanced or self.fitted

    def __str__(self) -> str:
        loss = "" if self.old_loss is None else f"loss before {self.old_loss:.4g}\n"
        steps = [f"naive insertion: {self.naive}", f"gains fitted:    {self.fitted}"]
        if self.balanced is not None:
            steps.append(f"q, k balanced:   {self.balanced}")
        if self.distilled is not None:
            steps.append(f"distilled:       {self.distilled}")
        return loss + "\n".join([*steps, *map(str, self.layers)])
