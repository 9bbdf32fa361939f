"""The mechanism behind per-head learning rates: every optimizer step of some weights, scaled per head."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel import dist
from qkeel.handle import Handle, compose
from qkeel.patching.optimizer_hooks import before_change, go_first
from qkeel.remedies.base import Target
from qkeel.remedies.steps.fused_adam import AdamPass, refusal
from qkeel.remedies.steps.head_groups import HeadGroups, Measure, frobenius_norm, views_by_tensor
from qkeel.remedies.steps.head_weights import HeadWeights
from qkeel.remedies.steps.linearity import ParamGroup, check_linear
from qkeel.remedies.steps.mixed_precision import found_inf, innermost
from qkeel.remedies.steps.replaced_weights import ReplacementCheck
from qkeel.remedies.steps.sharded_weights import SplitNorms

Rates = Callable[[Tensor], Tensor]
_LOG = logging.getLogger("qkeel")


def head_steps(
    target: Target, remedy: str, weights: HeadWeights, *, measure: Measure | None = None, decay: bool = True
) -> HeadSteps:
    """Returns what scales the optimizer's steps of these weights per head.

    Args:
        remedy: its name, for errors.
        weights: those of the target.
        measure: gives a number per head of [… n r m], which the rates are made of; there are ones where it is None.
        decay: whether decoupled weight decay is scaled with the rest of the step.

    Raises:
        RefusedError: the optimizer is missing, does not step these weights, or its step is not linear in the rate.
    """
    optimizer = innermost(target.need_optimizer(remedy))
    tensors = check_linear(optimizer, remedy, weights, decay=decay)
    replaced = ReplacementCheck(target.model, remedy, weights.names)
    return HeadSteps(optimizer, remedy, replaced, weights, tensors, measure, decay)


@final
class HeadSteps:
    """Scales every optimizer step of the weights, per head.

    w ← w_old + f · (w_new - w_old): the whole step, decoupled weight decay included. With `decay` that keeps its
    full size: w ← (1 - ηλ) · w_old + f · (w_new - (1 - ηλ) · w_old). Factor 1 leaves the new weight bit for bit. Exact
    for every optimizer linear in the learning rate. Frozen weights are measured only.

    The numbers of all heads are one row, entry after entry of the weights, and so are the factors. How many operators
    a step takes does not depend on how many weights or heads there are, except that frozen weights, and heads whose
    rows have no pattern, are measured one by one. Nothing is read back to the host. The one copy of the rows of heads
    lives only inside the step; on a CPU its memory is kept for the next.

    Torch's fused Adam and AdamW, on a CPU and on a GPU, need neither copy nor rescaling: `adam` takes their step over.
    At factor 1 it leaves torch's weight bit for bit on a CPU, and to a few roundings on a GPU. With `frobenius_norm` it
    also returns the measure, so a change of a weight that torch does not count (through `.data`, by another fused
    optimizer, kernel or CUDA graph) is noticed a step late. `way` says who takes the last step that began, and why; so
    does the log "qkeel" at DEBUG.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        remedy: str,
        replaced: ReplacementCheck,
        weights: HeadWeights,
        tensors: Sequence[Tensor | None],
        measure: Measure | None,
        decay: bool,
    ) -> None:
        by_tensor = views_by_tensor(tensors, weights.slices)
        views = [view for _, _, own in by_tensor for view in own]
        counts = self._counts = weights.counts
        self._optimizer, self._replaced, self._slices, self._measure = optimizer, replaced, weights.slices, measure
        # A float32 copy, where there is one, is what is measured too: the weight is its rounding.
        self._read = [p if t is None else t for p, t in zip(weights.parameters, tensors)]
        self._stepped = [(view, view.weight) for view in views]
        self._groups = HeadGroups(lambda view: view.places(counts))
        # The view of a single slice is measured by its copy, other entries one by one.
        self._measured = {view.shares[0][0]: k for k, view in enumerate(views) if not view.whole}
        self._others = [i for i in range(len(counts)) if i not in self._measured]
        self._split = SplitNorms(weights.slices, self._read, measure)
        self._order, self._dtype = torch.empty(0, dtype=torch.int64), _widest(self._read)
        self._decay = None if decay else DecayFactors(optimizer, tensors, counts, _decay_rate)
        self._adam = AdamPass.of(optimizer, by_tensor, weights.slices, plain=not decay)
        self._remedy, self.way = remedy, ""
        self._factors: Tensor | None = None  # of the step under way

    @torch.no_grad()
    def sizes(self) -> Tensor:
        """The measure of all heads [h] now, to the bit as in a step."""
        if dist.world() > 1:  # none of them may fail from here on, where they wait for each other
            dist.words_of_all("qkeel.apply", "measures")
        found = self._copied() if self._ready_adam() is None else self._one_by_one({})
        self._forget()
        return found

    def scale(self, rates: Rates) -> Handle:
        """Scale steps by what `rates` makes of the measure before each [h], until the handle is removed. The scaling
        comes before every other post hook of the step (a clip, an average), in whatever order they came."""

        @torch.no_grad()
        def before(_: Optimizer) -> None:
            self._replaced.check()
            self._begin(rates)

        @torch.no_grad()
        def after(optimizer: Optimizer, *_: object) -> None:
            self._end(found_inf(optimizer))

        first = self._optimizer.register_step_pre_hook(before_change(before))
        last = self._optimizer.register_step_post_hook(after)
        go_first(last)
        return compose(map(Handle, (self._clear, last.remove, first.remove)))

    def _ready_adam(self) -> AdamPass | None:
        """The pass that takes the coming step over, if there is one and it can."""
        now = refusal(self._optimizer, [w for _, w in self._stepped]) if self._adam is None else self._adam.refusal()
        why = now or ("the weights were of another kind when the remedy came" if self._adam is None else "")
        way = f"copied and rescaled: {why}" if why else "scaled in the optimizer's own pass"
        if way != self.way:
            self.way = way
            _LOG.debug("steps of %s are %s", self._remedy, way)
        return None if why else self._adam

    def _clear(self) -> None:
        """Forget the step."""
        self._factors = None
        self._forget()
        if self._adam is not None:
            self._adam.end()

    def _forget(self) -> None:
        """Drop the copies."""
        for group in self._groups.all:
            group.forget()

    def _begin(self, rates: Rates) -> None:
        """Measure and copy, or take the step over."""
        self._clear()  # of a step that raised
        adam = self._ready_adam()
        if adam is None:
            sizes = self._copied()
        else:
            sizes = self._one_by_one(adam.norms() if self._measure is frobenius_norm else {})
        factors = F.pad(rates(sizes), (0, 1), value=1.0)
        if adam is not None:
            adam.begin(factors)
            return
        self._factors = factors
        if self._decay is not None:
            self._decay.read(factors.dtype, factors.device)

    def _end(self, infinite: Tensor | None) -> None:
        """Scale. Nothing is saved when a subclass's step calls its parent's: both run hooks, the inner was the step."""
        if self._factors is not None:
            decay = None if self._decay is None else self._decay.row(lambda w: w.grad is not None, infinite)
            for group in self._groups.all:
                if decay is not None:
                    group.decay(decay)
                group.interpolate(self._factors)
        self._clear()

    def _copied(self) -> Tensor:
        """Copy what is stepped, and return the measure of all heads [h]."""
        if self._groups.update(self._stepped):
            self._order, self._dtype = self._positions(), _widest(self._read)
        found = [x for group in self._groups.all for x in group.copy(self._measure)]
        if self._measure is None:
            return self._ones()
        found.extend(self._one(self._measure, i) for i in self._others)
        return self._split.norms(self._row(found)[self._order])

    def _one_by_one(self, known: Mapping[int, Tensor]) -> Tensor:
        """The same without a copy, entry by entry; some may be known."""
        if self._measure is None:
            return self._ones()
        found = [known[i] if i in known else self._one(self._measure, i) for i in range(len(self._slices))]
        return self._split.norms(self._row(found))

    def _row(self, found: Sequence[Tensor]) -> Tensor:
        """All on the first weight's device; of split weights squares."""
        device = self._read[0].device
        return torch.cat([x.to(device) for x in found])

    def _one(self, measure: Measure, i: int) -> Tensor:
        if i in self._split:
            return self._split.squares(i)
        return measure(self._slices[i].heads(self._read[i].detach()))

    def _ones(self) -> Tensor:
        return torch.ones(sum(self._counts), dtype=self._dtype, device=self._read[0].device)

    def _positions(self) -> Tensor:
        """The place of each head among the numbers of all groups, and behind them those measured one by one."""
        after = sum(len(view) for group in self._groups.all for view in group.views)
        firsts = {i: self._groups.firsts[k] for i, k in self._measured.items()}
        for i in self._others:
            firsts[i], after = after, after + self._counts[i]
        order = torch.cat([torch.arange(n) + firsts[i] for i, n in enumerate(self._counts)])
        return order.to(self._read[0].device)


def _decay_rate(group: ParamGroup) -> float | Tensor:
    """η·λ now; 0 without weight decay."""
    return group.get("lr", 0.0) * group.get("weight_decay", 0.0)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that holds numbers of all of them, float32 at least."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


Rate = Callable[[ParamGroup], float | Tensor]


@final
class DecayFactors:
    """1 - rate for every head of every entry, by the group that holds its tensor, in a few operators per group.

    Args:
        tensors: what the optimizer steps for each entry; None where it steps nothing.
        counts: the number of heads of each entry.
        rate: the share that a group's options take away in one step.
    """

    def __init__(
        self, optimizer: Optimizer, tensors: Sequence[Tensor | None], counts: Sequence[int], rate: Rate
    ) -> None:
        self._optimizer, self._tensors, self._counts, self._rate = optimizer, tensors, counts, rate
        self._values = torch.ones(1)
        self._groups: tuple[int, ...] = ()
        self._index = torch.empty(0, dtype=torch.int64)

    def read(self, dtype: torch.dtype, device: torch.device) -> None:
        """Read the rates as they are now; numbers are never sent to the device, tensors never read by the host."""
        groups = self._optimizer.param_groups
        if (self._values.shape[0], self._values.dtype, self._values.device) != (len(groups) + 1, dtype, device):
            self._values = torch.ones(len(groups) + 1, dtype=dtype, device=device)
        for value, group in zip(self._values.unbind(), groups):
            rate = self._rate(group)
            value.fill_(1 - (rate.reshape(()) if isinstance(rate, Tensor) else rate))

    def row(self, is_stepped: Callable[[Tensor], bool], found_inf: Tensor | None) -> Tensor:
        """[all heads, and a 1]: 1 where a tensor is not stepped, and everywhere in a step that a GradScaler skips."""
        groups = self._optimizer.param_groups
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        numbers = tuple(len(groups) if t is None or not is_stepped(t) else group_of[id(t)] for t in self._tensors)
        if numbers != self._groups or self._index.device != self._values.device:
            self._groups = numbers
            index = [i for i, n in zip(numbers, self._counts) for _ in range(n)]
            self._index = torch.tensor([*index, len(groups)], device=self._values.device)
        if found_inf is None:
            return self._values[self._index]
        # A fused optimizer runs its hooks though a GradScaler skips the step.
        skipped = torch.as_tensor(found_inf).to(self._values.device) != 0
        return torch.where(skipped, 1.0, self._values)[self._index]
