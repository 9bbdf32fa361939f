"""The measurements of a step across the watched models and sites."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import tensors
from qkeel.capture.visible_sets import LayerType
from qkeel.errors import caution
from qkeel.functional.statistics import LogitStats
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite, Sites
from qkeel.monitor.call_statistics import Extra, RowSums
from qkeel.monitor.gather import (
    WHOLE_MODEL,
    NumberKey,
    PartialValue,
    SiteNumbers,
    Stats,
    merged,
)
from qkeel.monitor.logit_changes import LogitChanges
from qkeel.monitor.pass_values import Means, PassValues
from qkeel.monitor.residual_stream import ResidualStream
from qkeel.monitor.sparse_attention import ChosenKeys, IndexSums
from qkeel.monitor.token_classes import HiddenNorms, PassTokens
from qkeel.monitor.watched_sites import WatchedSites
from qkeel.monitor.weight_norms import GainBounds, StepSpectra, WeightNorms
from qkeel.patching.modes import Guarded, ModuleTree
from qkeel.patching.roles import Phase
from qkeel.sites.find import all_sites, within
from qkeel.sites.tap import Tap, Visitor

# The numbers of a step other than the statistics of its attention calls: hidden states, losses, weights, gradients.


@final
class StepNumbers(Visitor):
    """Collects the numbers of a step by (site, name): means over its passes, and values read before and after its
    update.

    Each training pass adds the norms of hidden states and the loss. Before each pass, it is determined which of its
    tokens count, and before the first pass, which sites there are.
    """

    def __init__(
        self,
        sites: WatchedSites,
        tokens: PassTokens,
        changes: LogitChanges | None,
        optimizer: Optimizer | None,
        *,
        guard: Guarded,
        tree: ModuleTree,
        extras: frozenset[Extra] = frozenset(),
    ) -> None:
        self._sites, self._tokens, self._changes = sites, tokens, changes
        self._rows = RowSums() if "gates" in extras else None
        self._indexes = IndexSums(tokens)
        self._chosen = ChosenKeys(tokens) if "chosen" in extras else None
        self._spectra: StepSpectra | None = None  # created when the sites are known
        self._updates, self._residual = "updates" in extras, "residual" in extras
        self._stream: ResidualStream | None = None  # created when the sites are known
        self._optimizer, self._guard = optimizer, guard
        self.pass_over: Callable[[Phase], None] | None = (
            None  # called when the role of a measured pass is known
        )
        self.counted: Callable[[Phase], None] = lambda phase: (
            None
        )  # called when the role of any pass is known
        self._means, self._tree = Means(), tree
        several: list[PassValues[Any, Any] | None] = [
            self._means,
            self._indexes,
            self._rows,
            self._chosen,
        ]
        self._collected = [values for values in several if values is not None]
        self._hidden: HiddenNorms | None = None  # from the first measured pass on
        self._readers: tuple[WeightNorms, GainBounds] | None = (
            None  # created when the sites are known
        )
        self._read: SiteNumbers = {}

    def before(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        for values in self._collected:
            values.begin()
        # Such a loss is a sum over the pass's tokens, divided by those of all passes of the step.
        self._means.summed = (
            {("", "train_loss")}
            if kwargs.get("num_items_in_batch") is not None
            else set()
        )
        self._tokens.begin(args, kwargs)
        if self._hidden is None:
            self._hidden = self._norms(())
            if not self._sites.find(args, kwargs):
                self._hidden = None
                return False
            self._hidden = self._norms([site.name for site in self._sites.weighed])
        if self._residual and self._stream is None:
            names = [site.name for site in self._sites.all]
            self._stream = ResidualStream(
                self._sites.model, names, self._means.add, self._guard, self._tree
            )
        return True

    def _norms(self, sites: list[str] | tuple[()]) -> HiddenNorms:
        return HiddenNorms(
            self._sites.model, sites, self._means.add, self._guard, self._tree
        )

    def looking(self, candidate: bool) -> Handle | None:
        if self._hidden is None or not candidate:
            return None
        norms = self._hidden.attach()
        if self._stream is None:
            return norms
        stream = self._stream.attach()

        def detach() -> None:
            norms.remove()
            stream.remove()

        return Handle(detach)

    def call(self, name: str, call: Seen, candidate: bool) -> None:
        self._sites.see(name, call)
        if self._rows is not None and candidate:
            self._rows.add(name, self._tokens.on(call))
        if self._chosen is not None and candidate and self._sites.is_sparse(name):
            self._chosen.add(name, call)

    def index(self, layer: str, call: ScoresCall, candidate: bool) -> None:
        if candidate:
            self._indexes.add(layer, call)
            if self._chosen is not None:
                self._chosen.scored(layer, call)

    def after(self, output: object, seen: bool) -> list[dict[Any, Any]]:
        self._tokens.end()
        self._sites.pass_over()
        self._sites.report(seen)
        losses = [
            x
            for x in tensors(output)
            if x.ndim == 0 and x.is_floating_point() and not dist.is_split(x)
        ]
        if len(losses) == 1:
            self._means.add(("", "train_loss"), losses[0].detach(), 1)
        return [values.end() for values in self._collected]

    def settled(self, phase: Phase, collected: Any, measured: bool) -> None:
        self.counted(phase)
        if measured and phase == "train" and collected is not None:
            for values, of_pass in zip(self._collected, collected):
                values.keep(of_pass)
        if measured and self.pass_over is not None:
            self.pass_over(phase)

    @property
    def types(self) -> Mapping[str, LayerType]:
        """The types of the observed layers."""
        return self._sites.types

    def failed(self) -> None:
        for values in self._collected:
            values.begin()
        if self._sites.pass_failed():
            self._hidden = None

    @property
    def errors(self) -> int:
        """The number of failed searches for sites."""
        return self._sites.errors

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before the step; gradients are divided by the loss scale if they are still
        scaled."""
        if self._changes is not None:
            self._changes.before()
        self.read_weights()
        if self._updates and self._spectra is None and self._readers is not None:
            self._spectra = self._compared(self._readers[0].multiplied)
        if self._spectra is not None:
            self._spectra.before()
        if gradient_scale is not None:
            self._read = {
                key: _unscaled(x, gradient_scale) if "grad" in key[1] else x
                for key, x in self._read.items()
            }

    def _compared(self, sites: list[AttentionSite]) -> StepSpectra:
        """The object that compares the weights of these sites; warns if those of other sites cannot be compared."""
        others = [
            site.name or "the model itself"
            for site in self._sites.all
            if site not in sites
        ]
        if others:
            caution(
                f"the change that a step causes is not measured for {', '.join(others)}: the q and k weights are "
                "unknown, computed from other weights, split across processes, or not matrices that are multiplied "
                "together"
            )
        return StepSpectra(self._sites.model, sites)

    def read_weights(self, *, gradients: bool = True) -> None:
        """Reads the norms of the weights, and those of the gradients unless the gradients belong to another pass."""
        if self._readers is None and self._sites.weighed:
            model, sites = self._sites.model, self._sites.weighed
            self._readers = (
                WeightNorms(model, sites, self._optimizer),
                GainBounds(model, sites),
            )
        if self._readers is not None:
            read = {**self._readers[0].read(), **self._readers[1].read()}
            self._read = {
                key: x for key, x in read.items() if gradients or "grad" not in key[1]
            }

    def after_step(self) -> None:
        """Reads how much the step has changed the weights and the logits of the probe batch."""
        if self._spectra is not None:
            self._read = {**self._read, **self._spectra.after()}
        if self._changes is not None:
            changes = self._changes.after().items()
            partial = {
                key: PartialValue(value=x, weight=torch.ones_like(x), own=True)
                for key, x in changes
            }
            self._read = {**self._read, **partial}

    def take(self) -> SiteNumbers:
        """Returns all numbers of the step, and forgets them."""
        read, self._read = self._read, {}
        for values in self._collected:
            read = {**read, **values.read()}
        return read


def _unscaled(x: Tensor | PartialValue, scale: Tensor) -> Tensor | PartialValue:
    return (
        dataclasses.replace(x, value=x.value / scale)
        if isinstance(x, PartialValue)
        else x / scale
    )


# The models that a monitor watches together; usually there is only one.


def _renamed(stats: Mapping[str, LogitStats], model: str) -> dict[str, LogitStats]:
    """The statistics of the sites of one of several models, with their names among all models."""
    return {within(model, name): of_site for name, of_site in stats.items()}


@final
class WatchedModels:
    """Combines the measurements of several models, under names that begin with the name of the model.

    If several models have a value for the whole model, such as the loss, the value of the last model is used.
    """

    def __init__(self, whole: nn.Module, stages: Mapping[str, int | None]) -> None:
        """whole: the model, or a module that contains all models. stages: the pipeline stages that the models turn out
        to be, which determine the order of the models."""
        self.whole = whole
        self._stages = stages
        self._taps: dict[str, Tap] = {}
        self._numbers: dict[str, StepNumbers] = {}
        self._passed: dict[Phase, set[str]] = {"train": set(), "eval": set()}

    def add(
        self,
        name: str,
        tap: Tap,
        numbers: StepNumbers,
        counted: Callable[[Phase], None],
        round_over: Callable[[Phase], None] | None,
    ) -> None:
        """Adds a model. counted: called when the role of one of its passes is known. round_over: ends a step, which
        without an optimizer is one pass of each model."""
        self._taps[name], self._numbers[name], tap.visitor = tap, numbers, numbers
        numbers.counted = counted
        if round_over is not None:
            numbers.pass_over = functools.partial(self._pass_over, name, round_over)

    def _pass_over(
        self, name: str, round_over: Callable[[Phase], None], phase: Phase
    ) -> None:
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
        """Adds sites that were described by hand, each to the model that contains it."""
        for site in sites:
            holders = (
                tap
                for tap in self.taps
                if any(m is site.module for m in tap.model.modules())
            )
            next(holders, self.taps[0]).sites.append(site)

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics to read."""
        return any([tap.has(phase) for tap in self._taps.values()])

    def read(self, phase: Phase) -> Stats:
        """The statistics of all sites since the last read."""
        return merged(
            [_renamed(self._taps[name].take(phase), name) for name in self._order()]
        )

    def settle(self, *, decide: bool) -> None:
        """Sorts the passes whose role is known, or, to `decide`, all passes; see `Tap.settle`."""
        for tap in self._taps.values():
            tap.settle(decide=decide)

    def peek(self, phase: Phase | None) -> Stats:
        """The statistics of passes whose role is open, taken for trained if the model was in training mode."""
        return merged(
            [_renamed(self._taps[name].peek(phase), name) for name in self._order()]
        )

    @property
    def types(self) -> Mapping[str, LayerType]:
        """The types of the observed layers of all models."""
        if len(self._numbers) == 1 and "" in self._numbers:
            return self._numbers[""].types
        return {
            within(name, site): of
            for name, one in self._numbers.items()
            for site, of in one.types.items()
        }

    def coverage(self, phase: Phase, stats: Stats) -> dict[str, float]:
        """How much of the models these statistics cover, keyed by the names in records.MONITOR_FIELDS; calls are
        counted from the start."""
        known = [
            site.name if not name else within(name, site.name)
            for name, tap in self._taps.items()
            for site in tap.sites
        ]
        return {
            "sites": len(known),
            "calls": sum([tap.calls_seen[phase] for tap in self.taps]),
            "missed": sum([len(tap.sites.missed) for tap in self.taps]),
            "silent": len(set(known).difference(stats)),
            "errors": sum([numbers.errors for numbers in self._numbers.values()]),
        }

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before a step; gradients are divided by the loss scale if they are still
        scaled."""
        for numbers in self._numbers.values():
            numbers.before_step(gradient_scale)

    def look_again(self) -> bool:
        """Measures all models in their current state, each on the batch of its last training pass; returns False if a
        model has no such batch. Passes that belong to a step that was never taken have been measured already."""
        if any(tap.latest is None for tap in self.taps):
            return False
        try:
            seen = all(tap.has("train") or tap.look_again() for tap in self.taps)
        except Exception:
            self.read("train")  # discards the measurements of all models
            raise
        for numbers in self._numbers.values():
            numbers.read_weights(gradients=False)
        return seen and self.has("train")

    def after_step(self) -> None:
        """Reads what a step has changed."""
        for numbers in self._numbers.values():
            numbers.after_step()

    def take(self, rate: Tensor | None) -> SiteNumbers:
        """Returns all numbers of the step and forgets them. rate: the learning rate of the step, or None if there is no
        optimizer."""
        numbers: dict[NumberKey, Tensor | PartialValue] = (
            {} if rate is None else {("", "lr"): rate}
        )
        for name in self._order():
            for (site, number), x in self._numbers[name].take().items():
                if name:
                    site = "" if number in WHOLE_MODEL else within(name, site)
                numbers[site, number] = x
        return numbers

    def _order(self) -> list[str]:
        return sorted(self._taps, key=lambda name: self._stages.get(name) or 0)
