"""The numbers of an optimizer step besides the statistics of attention calls: weights, gradients, logit changes."""

from __future__ import annotations

from typing import final

from torch import Tensor
from torch.optim import Optimizer

from qkeel.monitor.measure.gain_bounds import GainBounds
from qkeel.monitor.measure.logit_changes import LogitChanges
from qkeel.monitor.measure.means import Means
from qkeel.monitor.measure.watched_sites import WatchedSites
from qkeel.monitor.measure.weight_norms import Numbers, WeightNorms


@final
class StepNumbers:
    """Collects the numbers of a step by (site, name): its passes' means, and what is read before and after it."""

    def __init__(
        self, sites: WatchedSites, means: Means, changes: LogitChanges | None, optimizer: Optimizer | None
    ) -> None:
        self._sites, self._means, self._changes, self._optimizer = sites, means, changes, optimizer
        self._readers: tuple[WeightNorms, GainBounds] | None = None  # made when the sites are known
        self._read: Numbers = {}

    def before(self, gradient_scale: Tensor | None, *, measuring: bool) -> None:
        """Reads weights and gradients before the step; gradients are divided by the scale that is still on them.

        measuring: False of a process that has switched itself off. It reads the weights all the same: where they are
        sharded they are gathered, and the other processes would wait for it.
        """
        if self._changes is not None and measuring:
            self._changes.before()
        if self._readers is None and self._sites.weighed:
            model, sites = self._sites.model, self._sites.weighed
            self._readers = WeightNorms(model, sites, self._optimizer), GainBounds(model, sites)
        if self._readers is not None:
            self._read = {key: x for reader in self._readers for key, x in reader.read().items()}
            if gradient_scale is not None:
                self._read = {key: x / gradient_scale if "grad" in key[1] else x for key, x in self._read.items()}

    def after(self) -> None:
        """Reads by how much the step has changed the logits of the probe batch."""
        if self._changes is not None:
            self._read |= self._changes.after()

    def take(self, rate: Tensor | None) -> Numbers:
        """All numbers of the step, once; rate: its learning rate, where there is an optimizer."""
        read, self._read = self._read, {}
        found = {**read, **self._means.read()}
        return found if rate is None else {**found, ("", "lr"): rate}
