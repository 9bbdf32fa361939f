"""The numbers of a measured forward pass besides the statistics of its attention calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from torch import Tensor

from qkeel.handle import Handle
from qkeel.monitor.measure.hidden_norms import HiddenNorms
from qkeel.monitor.measure.means import Means
from qkeel.monitor.measure.token_classes import PassTokens
from qkeel.monitor.measure.watched_sites import WatchedSites
from qkeel.monitor.measured_steps import MeasuredSteps
from qkeel.sites.see.running_modules import tensors
from qkeel.sites.tap import Phase, Visitor


@final
class PassNumbers(Visitor):
    """Adds the norms of hidden states and the loss of each training pass to `means`. Before a pass it reads which
    of its tokens count, and before the first which sites there are.
    """

    def __init__(
        self,
        steps: MeasuredSteps,
        sites: WatchedSites,
        tokens: PassTokens,
        means: Means,
        *,
        on_fault: Callable[[Exception], None],
        step_over: Callable[[Phase], None] | None,
    ) -> None:
        """Takes step_over, which ends a step after a pass with attention; None where optimizer steps are measured."""
        self._steps, self._sites, self._tokens, self._means = steps, sites, tokens, means
        self._on_fault, self._step_over = on_fault, step_over
        self._hidden: HiddenNorms | None = None  # from the first measured pass on

    def before(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._means.begin()
        self._tokens.begin(args, kwargs)
        if self._hidden is None:
            self._hidden = self._norms(())
            self._sites.find(args, kwargs)
            self._hidden = self._norms([site.name for site in self._sites.weighed])

    def _norms(self, sites: list[str] | tuple[()]) -> HiddenNorms:
        return HiddenNorms(self._sites.model, sites, self._means, self._on_fault)

    def looking(self, phase: Phase) -> Handle | None:
        return None if self._hidden is None or phase == "eval" else self._hidden.attach()

    def after(self, phase: Phase, output: object, seen: bool) -> None:
        self._tokens.end()
        self._sites.report(seen)
        if phase == "train":
            losses = [x for x in tensors(output) if x.ndim == 0 and x.is_floating_point()]
            if len(losses) == 1:
                self._means.add(("", "train_loss"), losses[0].detach())
        if self._step_over is not None and seen:
            self._step_over(phase)

    def failed(self) -> None:
        self._means.drop()
        if self._sites.pass_failed():
            self._hidden = None

    def bracket(self, bound: Tensor) -> None:
        self._steps.bounded(bound)
