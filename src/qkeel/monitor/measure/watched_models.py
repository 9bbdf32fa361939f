"""The models that a monitor watches as one; most often there is only one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor, nn

from qkeel.heads.site import AttentionSite, Sites
from qkeel.monitor.measure.step_numbers import StepNumbers
from qkeel.monitor.processes.share import WHOLE_MODEL, SiteNumbers
from qkeel.monitor.processes.transfer import Stats, merged
from qkeel.sites.named_models import all_sites, within
from qkeel.sites.tap import Phase, Tap


@final
class WatchedModels:
    """Takes what is measured of each model together, under names that begin with that of the model.

    Numbers of the whole model, such as its loss, are those of the last model that has them.
    """

    def __init__(self, whole: nn.Module, stages: Mapping[str, int | None]) -> None:
        """Takes the model, or what holds all models; and the stages of a pipeline that they turn out to be, in whose
        order they are gone through."""
        self.whole = whole
        self._stages = stages
        self._taps: dict[str, Tap] = {}
        self._numbers: dict[str, StepNumbers] = {}
        self._passed: dict[Phase, set[str]] = {"train": set(), "eval": set()}

    def add(self, name: str, tap: Tap, numbers: StepNumbers, round_over: Callable[[Phase], None] | None) -> None:
        """One more model; round_over ends a step that is one pass of each model, where there is no optimizer."""
        self._taps[name], self._numbers[name], tap.visitor = tap, numbers, numbers
        if round_over is not None:
            numbers.pass_over = functools.partial(self._pass_over, name, round_over)

    def _pass_over(self, name: str, round_over: Callable[[Phase], None], phase: Phase) -> None:
        self._passed[phase].add(name)
        if len(self._passed[phase]) == len(self._taps) and self.has(phase):
            self._passed[phase].clear()
            round_over(phase)

    @property
    def taps(self) -> list[Tap]:
        """The tap of each model."""
        return [*self._taps.values()]

    @property
    def sites(self) -> Sites:
        """The sites of all models."""
        return all_sites({name: self._taps[name].sites for name in self._order()})

    def include(self, sites: Sequence[AttentionSite]) -> None:
        """Adds sites that were described by hand, each to the model that it is in."""
        for site in sites:
            holders = (tap for tap in self.taps if any(m is site.module for m in tap.model.modules()))
            next(holders, self.taps[0]).sites.append(site)

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics to read."""
        return any(tap.has(phase) for tap in self.taps)

    def read(self, phase: Phase) -> Stats:
        """The statistics of all sites since the last read."""
        if len(self._taps) == 1:
            ((name, tap),) = self._taps.items()
            return tap.read(phase) if not name else tap.read(phase).renamed(functools.partial(within, name))
        found = [self._taps[name].read(phase).renamed(functools.partial(within, name)) for name in self._order()]
        return merged(found)

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before a step; gradients are divided by the scale that is still on them."""
        for numbers in self._numbers.values():
            numbers.before_step(gradient_scale)

    def look_again(self) -> bool:
        """Measures all models as they are, each on the batch of its last training pass; False where one has none.
        Passes of a step that never came are measured already."""
        if any(tap.latest is None for tap in self.taps):
            return False
        try:
            seen = all(tap.has("train") or tap.look_again() for tap in self.taps)
        except Exception:
            self.read("train")  # nothing of it counts, of no model
            raise
        for numbers in self._numbers.values():
            numbers.read_weights(gradients=False)
        return seen and self.has("train")

    def after_step(self) -> None:
        """Reads what a step has changed."""
        for numbers in self._numbers.values():
            numbers.after_step()

    def take(self, rate: Tensor | None) -> SiteNumbers:
        """All numbers of the step, once; rate: its learning rate, where there is an optimizer."""
        found = SiteNumbers((), {} if rate is None else {("", "lr"): rate})
        for name in self._order():
            own = self._numbers[name].take()
            if name:
                own = own.renamed(lambda site, number: "" if number in WHOLE_MODEL else within(name, site))  # noqa: B023
            found |= own
        return found

    def _order(self) -> list[str]:
        return sorted(self._taps, key=lambda name: self._stages.get(name) or 0)
