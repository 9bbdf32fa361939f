"""The models that a monitor watches as one, most often only one, and the search for the attention sites of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor, nn

from qkeel import dist
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.monitor.measure.step_numbers import StepNumbers
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.processes.share import WHOLE_MODEL, Key, Share
from qkeel.monitor.processes.transfer import Stats
from qkeel.sites.find import find_sites
from qkeel.sites.missed import Sites, share
from qkeel.sites.named_models import all_sites, within
from qkeel.sites.site import AttentionSite
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
        return {within(name, site): x for name in self._order() for site, x in self._taps[name].read(phase).items()}

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

    def take(self, rate: Tensor | None) -> dict[Key, Tensor | Share]:
        """All numbers of the step, once; rate: its learning rate, where there is an optimizer."""
        found: dict[Key, Tensor | Share] = {} if rate is None else {("", "lr"): rate}
        for name in self._order():
            for (site, number), x in self._numbers[name].take().items():
                found["" if number in WHOLE_MODEL else within(name, site), number] = x
        return found

    def _order(self) -> list[str]:
        return sorted(self._taps, key=lambda name: self._stages.get(name) or 0)


@final
class WatchedSites:
    """Finds the sites of a model by one more forward pass, and says why where it can't.

    `all` holds sites that were described by hand or given from the start, the others once they are found. `weighed` are
    those whose weights can be read. `all.missed` were seen but not understood.
    """

    def __init__(self, name: str, model: nn.Module, described: Sites, group: ProcessGroup, given: Sites | None) -> None:
        """Takes the name of the model, "" where there is only one, `described`, which is extended in place, and the
        sites that were found earlier, if they were."""
        self._name, self.model, self.all = name, model, described
        self.weighed: list[AttentionSite] = []
        self._silent = False  # it was said that a measured pass showed no attention
        self._group = group
        self._given = given is not None
        if given is not None:
            self.all += given
            self.all.missed = given.missed
            self.weighed = self.all
        self._error: QkeelError | None = None  # reported after the pass, if that goes through
        self._seen = False

    def find(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Finds them from the arguments of a pass that is about to begin. Returns whether that pass can be measured.

        Raises: InvalidValueError if that takes a pass of all processes, and not all of them watch.
        """
        split = dist.world() > 1 and any(map(dist.is_split, self.model.parameters()))
        if not self._group.begin(self._name, gathers=split):
            return False
        if split and not self._given and not self._group.several:
            raise InvalidValueError(
                "expected every process of this run to watch the model: its weights are split, and the search for its "
                "attention is a forward pass of all processes"
            )
        if self._given:
            return True
        found = Sites()
        try:
            found = find_sites(self.model, *args, **kwargs)
        except QkeelError as error:
            self._error = error
        self.all.missed = found.missed
        if found.missed:
            others = "; ".join(map(str, found.missed))
            caution(f"{found.share} of {type(self.model).__name__} are watched. Not understood: {others}")
        if dist.splits_heads(self.model) and found and not any(site.terms for site in found):
            caution(
                "the weights behind the heads are unknown in a model whose heads are split over processes, so they are "
                "not watched; the logits are. Give the sites that find_sites(model, example) found before the split: "
                "qkeel.watch(..., sites=sites)"
            )
        described = {site.name for site in self.all}
        self.all += [site for site in found if site.name not in described]
        self.weighed = self.all
        return True

    def pass_failed(self) -> bool:
        """Returns whether the search failed too: the fault was the pass's, and the next one is to be searched again."""
        failed, self._error = self._error is not None, None
        return failed

    def report(self, seen: bool) -> None:
        """After a pass that saw attention or not: warns once of sites whose weights are unknown, once if it saw none.

        Raises: QkeelError if no attention was seen, in this pass or an earlier one, and no site was found, in the only
        model.
        """
        if not seen and (self._seen or self.all) and not self._silent:
            self._silent = True
            caution(
                f"a pass that was to be measured showed no attention call, though {share(len(self.all), 0)} of "
                f"{type(self.model).__name__} are known; nothing is recorded of such passes"
            )
        self._seen = self._seen or seen
        error, self._error = self._error, None
        if not self._seen and (error is not None or not self.all):
            error = error or RefusedError("no attention was seen in this forward pass")
            if not self._group.records_jointly and not self._name:
                raise error
            if self._group.records_jointly:
                self._group.unseen, error = error, None  # others may have some
            else:
                error, self._silent = None if self._silent else RefusedError(f"{self._name}: {error}"), True
        if error is not None:
            caution(f"the weights behind the heads are unknown, so they are not watched: {error}")
