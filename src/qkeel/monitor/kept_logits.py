"""A sample of the logits of the layer that spreads most, from which an alarm says what its line of code would do."""

from __future__ import annotations

from typing import final

import numpy as np

from qkeel.monitor.history import History
from qkeel.monitor.rules import Alarm, remedy_bound, widest_spread
from qkeel.monitor.thresholds import APPROACH_FLOOR
from qkeel.sites.logit_sample import LogitSample

# A site, and the logits of a call of it if they can be kept.
KeptCall = tuple[str, LogitSample | None]


@final
class KeptLogits:
    """Keeps a few rows of the logits of one layer of the latest trained pass: that of the head which spread most in the
    latest record, if by more than 30 nats, since an alarm will name it. Nothing is waited for until an alarm is made.

    Attributes:
        site: the site of this layer, None if there is none.
    """

    site: str | None = None
    _kept: KeptCall = "", None

    def choose(self, history: History) -> None:
        """Chooses the layer whose logits the next passes keep, by the last record."""
        top = widest_spread(history)
        is_high = top is not None and top.value > APPROACH_FLOOR
        self.site = history.where(top.at)[0] if top and is_high else None

    def keep(self, call: KeptCall) -> None:
        """Takes the logits of a trained pass."""
        self._kept = call

    def effect(self, alarm: Alarm, history: History) -> str:
        """Words on what the line of an alarm would do to its head; "" if its logits were not kept, or if the line has
        neither a clip nor a cap that acts on them."""
        bound = remedy_bound(alarm.remedy)
        site, sample = self._kept
        if bound is None or sample is None or alarm.layer != site or alarm.head is None:
            return ""
        logits = history.heads["max_logit"][-1, history.layers.index(site)]
        # Another process may have computed some of the heads.
        if sample.logits.shape[1] != np.isfinite(logits).sum():
            return ""
        threshold, caps = bound
        if caps:
            name, effect = "softcap", sample.effect(alarm.head, cap=threshold)
        else:
            factor = threshold / max(threshold, float(logits[alarm.head]))
            name, effect = "a clip to", sample.effect(alarm.head, factor=factor)
        return effect and f"{name} {threshold:g} would {effect}"
