"""The numbers of a step besides the statistics of its attention calls: hidden states, losses, weights, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel import dist
from qkeel.capture.modules import tensors
from qkeel.handle import Handle
from qkeel.monitor.cadence import MeasuredSteps
from qkeel.monitor.measure.gain_bounds import GainBounds
from qkeel.monitor.measure.hidden_norms import HiddenNorms
from qkeel.monitor.measure.logit_changes import LogitChanges
from qkeel.monitor.measure.token_classes import PassTokens
from qkeel.monitor.measure.watched_sites import WatchedSites
from qkeel.monitor.measure.weight_norms import WeightNorms
from qkeel.monitor.processes.share import Key, Row, Share, SiteNumbers
from qkeel.patching.guard import Guarded
from qkeel.patching.module_tables import ModuleTree
from qkeel.sites.tap import Phase, Visitor


@final
class StepNumbers(Visitor):
    """Collects the numbers of a step by (site, name): means over its passes, and what is read around its update.

    Of each training pass those are the norms of hidden states and the loss. Before a pass it reads which of its tokens
    count, and before the first which sites there are.
    """

    def __init__(
        self,
        steps: MeasuredSteps,
        sites: WatchedSites,
        tokens: PassTokens,
        changes: LogitChanges | None,
        optimizer: Optimizer | None,
        *,
        guard: Guarded,
    ) -> None:
        self._steps, self._sites, self._tokens, self._changes = steps, sites, tokens, changes
        self._optimizer, self._guard = optimizer, guard
        self.pass_over: Callable[[Phase], None] | None = None  # after each pass that was measured
        self._means, self._tree = Means(), ModuleTree(sites.model)
        self._hidden: HiddenNorms | None = None  # from the first measured pass on
        self._readers: tuple[WeightNorms, GainBounds] | None = None  # made when the sites are known
        self._read = SiteNumbers()

    def before(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        self._means.begin()
        self._tokens.begin(args, kwargs)
        if self._hidden is None:
            self._hidden = self._norms(())
            if not self._sites.find(args, kwargs):
                self._hidden = None
                return False
            self._hidden = self._norms([site.name for site in self._sites.weighed])
        return True

    def _norms(self, sites: list[str] | tuple[()]) -> HiddenNorms:
        return HiddenNorms(self._sites.model, sites, self._means.add, self._guard, self._tree)

    def looking(self, phase: Phase) -> Handle | None:
        return None if self._hidden is None or phase == "eval" else self._hidden.attach()

    def after(self, phase: Phase, output: object, seen: bool) -> None:
        self._tokens.end()
        self._sites.report(seen)
        if phase == "train":
            losses = [x for x in tensors(output) if x.ndim == 0 and x.is_floating_point() and not dist.is_split(x)]
            if len(losses) == 1:
                self._means.add(("", "train_loss"), losses[0].detach(), 1)
        if self.pass_over is not None:
            self.pass_over(phase)

    def failed(self) -> None:
        self._means.drop()
        if self._sites.pass_failed():
            self._hidden = None

    def bracket(self, bound: Tensor) -> None:
        self._steps.bounded(bound)

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before the step; gradients are divided by the scale that is still on them."""
        if self._changes is not None:
            self._changes.before()
        self.read_weights()
        if gradient_scale is not None:
            self._read = self._read.each(lambda name, x: x / gradient_scale if "grad" in name else x)

    def read_weights(self, *, gradients: bool = True) -> None:
        """Reads the norms of the weights, and of the gradients unless those are of another pass."""
        if self._readers is None and self._sites.weighed:
            model, sites = self._sites.model, self._sites.weighed
            self._readers = WeightNorms(model, sites, self._optimizer), GainBounds(model, sites)
        if self._readers is not None:
            read = self._readers[0].read() | self._readers[1].read()
            self._read = read if gradients else read.only(lambda name: "grad" not in name)

    def after_step(self) -> None:
        """Reads by how much the step has changed the logits of the probe batch."""
        if self._changes is not None:
            changes = self._changes.after().items()
            self._read |= {key: Share(value=x, weight=torch.ones_like(x), own=True) for key, x in changes}

    def take(self) -> SiteNumbers:
        """All numbers of the step, once."""
        read, self._read = self._read, SiteNumbers()
        return read | self._means.read()


@final
class Means:
    """Means on their device, each over so many values, and the means of all.

    A mean is one number, or a row of one number of each of some sites.
    """

    def __init__(self) -> None:
        self._means: dict[_Of, tuple[Tensor, int]] = {}
        self._before: dict[_Of, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """A pass begins, whose values `drop` takes back."""
        self._before = dict(self._means)

    def drop(self) -> None:
        """The pass failed."""
        self._means = self._before

    def add(self, of: _Of, mean: Tensor, n: int) -> None:
        """One more mean, over n values; of a site, or of several, as one tensor."""
        known, before = self._means.get(of, (mean, 0))
        self._means[of] = mean if not before else torch.lerp(known, mean, n / (before + n)), before + n

    def read(self) -> SiteNumbers:
        """The means since the last read, once."""
        means, self._means = self._means, {}
        rows: list[Row] = []
        single: dict[Key, Tensor | Share] = {}
        for (sites, name), (x, n) in means.items():
            if n and isinstance(sites, tuple):
                rows.append(Row(name=name, sites=sites, counts=(), values=x, weight=n))
            elif n:
                assert isinstance(sites, str)
                single[sites, name] = Share(value=x, weight=torch.full_like(x, n))
        return SiteNumbers(rows, single)


_Of = tuple[str | tuple[str, ...], str]  # the site, "" for the whole model, or several; and the name of the number
