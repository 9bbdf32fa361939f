"""Scales the steps of an optimizer per head, for any optimizer whose steps are proportional to its learning rate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.patching.optimizers import before_change, go_first, in_real_steps
from qkeel.remedies.base import Target
from qkeel.remedies.head_groups import HeadGroups, WeightNorm, views_by_tensor
from qkeel.remedies.head_weights import LOW_PRECISION, HeadWeights, SplitNorms, found_inf, innermost
from qkeel.remedies.optimizer_trials import ParamGroup, check_steps, optimizer_like

# Adds the new parameters of a remedy (gains, scales) to the optimizer, and removes them again.


def join(
    optimizer: Optimizer | None, added: Mapping[str, nn.Parameter], near: Tensor, *, matrices: bool = False
) -> Handle:
    """Adds parameters (by qualified name) to an optimizer group. The handle removes them and their state.

    They are added to the first group that contains only vectors and scalars, which is where gains usually are, or else
    to the group of `near`. They are therefore decayed like other gains, and an existing scheduler sets their rate too.
    With `matrices` they are weights like `near` and are added to its group.
    """
    if optimizer is None or not added:
        return Handle(lambda: None)
    if isinstance(optimizer, torch.optim.Muon) and not matrices:
        raise RefusedError(
            f"torch's Muon takes matrices only, and {', '.join(added)} are gains; pass the optimizer that holds the "
            "model's norms instead"
        )
    flat = [g for g in optimizer.param_groups if g["params"] and all(p.ndim < 2 for p in g["params"])]
    homes = (flat if not matrices else []) or [g for g in optimizer.param_groups if any(p is near for p in g["params"])]
    group = homes[0] if homes else optimizer.param_groups[0]
    group["params"].extend(added.values())
    if "param_names" in group:
        group["param_names"].extend(added)
    for parameter in added.values():
        _start_state(optimizer, parameter, group)

    def undo() -> None:
        gone = {id(p) for p in added.values()}
        kept = [i for i, p in enumerate(group["params"]) if id(p) not in gone]
        for column in ("params", "param_names"):
            if column in group:
                group[column][:] = [group[column][i] for i in kept]
        for parameter in added.values():
            optimizer.state.pop(parameter, None)

    return Handle(undo)


def _start_state(optimizer: Optimizer, parameter: nn.Parameter, group: ParamGroup) -> None:
    """Sets up the state of a parameter for optimizers that do so in their constructor, such as Adagrad."""
    if not optimizer.state or not any(optimizer.state.get(p) for p in group["params"] if p is not parameter):
        return
    try:
        state = optimizer_like(optimizer, parameter, group).state
    except Exception:  # a class that cannot be instantiated again sets up its state in the step, or fails there
        return
    if parameter in state:
        optimizer.state[parameter] = state[parameter]


# The mechanism behind per-head learning rates: scales every optimizer step of some weights per head.

RateFactors = Callable[[Tensor], Tensor]


def head_steps(
    target: Target, remedy: str, weights: HeadWeights, *, measure: WeightNorm | None = None, decay: bool = True
) -> HeadSteps:
    """Returns an object that scales the optimizer's steps of these weights per head.

    Args:
        target: the model and its optimizer.
        remedy: the name of the remedy, for error messages.
        weights: the query and key weights of the target.
        measure: computes a number per head from [… n r m], on which the rates depend. With None, the numbers are 1.
        decay: if True, decoupled weight decay is scaled together with the rest of the step.

    Raises:
        RefusedError: the optimizer is missing, does not update these weights, or its step is not linear in the rate.
    """
    optimizer = innermost(target.need_optimizer(remedy))
    tensors = weights.in_full_precision(optimizer, remedy, "scales small steps")
    check_steps(optimizer, remedy, tensors, needs_decoupled_decay=not decay)
    return HeadSteps(optimizer, remedy, weights, tensors, measure, decay)


@final
class HeadSteps:
    """Scales every optimizer step of the weights per head.

    The full step is scaled, including decoupled weight decay: w ← w_old + f · (w_new - w_old). With decay=False the
    decay keeps its full size: w ← (1 - ηλ) · w_old + f · (w_new - (1 - ηλ) · w_old). A factor of 1 leaves the new
    weight unchanged bit for bit. This is exact for every optimizer whose step is linear in the learning rate. Frozen
    weights are only measured.

    The measures of all heads form one row, ordered by weight, and so do the factors. The number of operators per step
    does not depend on the number of weights or heads, except that frozen weights, and heads whose rows follow no
    regular pattern, are measured one by one. The host reads nothing back. The rows of the heads are copied once, for
    the duration of the step; on a CPU the memory is kept for the next step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        remedy: str,
        weights: HeadWeights,
        tensors: Sequence[Tensor | None],
        measure: WeightNorm | None,
        decay: bool,
    ) -> None:
        by_tensor = views_by_tensor(tensors, weights.slices)
        views = [view for _, _, own in by_tensor for view in own]
        counts = self._counts = weights.counts
        self._optimizer, self._remedy, self._slices, self._measure = optimizer, remedy, weights.slices, measure
        # If there is a float32 copy, it is also what is measured, since the weight is only its rounded value.
        self._read = [p if t is None else t for p, t in zip(weights.parameters, tensors)]
        self._stepped = [(view, view.weight) for view in views]
        self._groups = HeadGroups(lambda view: view.places(counts))
        # The view of a single slice is measured on its copy; other entries are measured one by one.
        self._measured = {view.shares[0][0]: k for k, view in enumerate(views) if not view.whole}
        self._others = [i for i in range(len(counts)) if i not in self._measured]
        self._split = SplitNorms(weights.slices, self._read, measure)
        self._order, self._dtype = torch.empty(0, dtype=torch.int64), _widest(self._read)
        self._decay = None if decay else DecayFactors(optimizer, tensors, counts, _decay_rate)
        self._factors: Tensor | None = None  # the factors of the current step

    @torch.no_grad()
    def sizes(self) -> Tensor:
        """Returns the current measure of all heads [h], bit for bit equal to the one computed in a step."""
        if dist.world() > 1:  # no process may fail from here on, because they wait for each other
            dist.gather_messages("qkeel.apply", "measures")
        measures = self._copied()
        self._clear()
        return measures

    def scale(self, rates: RateFactors, *, freezes: bool = False) -> Handle:
        """Scales each step by factors that `rates` computes from the measure [h] before the step.

        If it `freezes`, all factors are 0 or 1, and weights with a factor of 0 keep their bits whatever the step does.

        This continues until the returned handle is removed.

        The scaling runs before all other post-step hooks (such as a clip or an average), in whatever order they were
        added.
        """

        @torch.no_grad()
        def before(_: Optimizer) -> None:
            self._begin(rates)

        @torch.no_grad()
        def after(optimizer: Optimizer, *_: object) -> None:
            self._end(found_inf(optimizer), freezes)

        first = self._optimizer.register_step_pre_hook(in_real_steps(before_change(before)))
        last = self._optimizer.register_step_post_hook(in_real_steps(after))
        go_first(last)
        return compose(map(Handle, (self._clear, last.remove, first.remove)))

    def _clear(self) -> None:
        """Drops everything that belongs to the current step."""
        self._factors = None
        for group in self._groups.all:
            group.forget()

    def _begin(self, rates: RateFactors) -> None:
        """Measures and copies the weights."""
        self._clear()  # if an earlier step raised an exception
        self._factors = F.pad(rates(self._copied()), (0, 1), value=1.0)
        if self._decay is not None:
            self._decay.read(self._factors.dtype, self._factors.device)

    def _end(self, infinite: Tensor | None, freezes: bool) -> None:
        """Scales the step. If a subclass's step calls its parent's, both run hooks, but only the inner is scaled."""
        if self._factors is not None:
            decay = None if self._decay is None else self._decay.row(lambda w: w.grad is not None, infinite)
            for group in self._groups.all:
                if decay is not None:
                    group.decay(decay)
                if freezes:
                    group.restore(self._factors)
                else:
                    group.interpolate(self._factors)
        self._clear()

    def _copied(self) -> Tensor:
        """Copies the weights that the step updates and returns the measure of all heads [h]."""
        if self._groups.update(self._stepped):
            for view, tensor in self._stepped:
                if tensor.dtype in LOW_PRECISION:
                    raise RefusedError(
                        f"{self._remedy} scales small steps, and {view.shares[0][1].parameter} was cast to "
                        f"{tensor.dtype} since it was applied, which rounds them away; keep float32 weights and use "
                        "autocast, or remove() the handle"
                    )
            self._order, self._dtype = self._positions(), _widest(self._read)
        found = [x for group in self._groups.all for x in group.copy(self._measure)]
        device = self._read[0].device
        if self._measure is None:
            return torch.ones(sum(self._counts), dtype=self._dtype, device=device)
        for i in self._others:
            if i in self._split:
                found.append(self._split.squares(i))
            else:
                found.append(self._measure(self._slices[i].heads(self._read[i].detach())))
        return self._split.norms(torch.cat([x.to(device) for x in found])[self._order])

    def _positions(self) -> Tensor:
        """Returns each head's index in the row of the measures of all groups, then those measured one by one."""
        after = sum(len(view) for group in self._groups.all for view in group.views)
        firsts = {i: self._groups.firsts[k] for i, k in self._measured.items()}
        for i in self._others:
            firsts[i], after = after, after + self._counts[i]
        order = torch.cat([torch.arange(n) + firsts[i] for i, n in enumerate(self._counts)])
        return order.to(self._read[0].device)


def _decay_rate(group: ParamGroup) -> float | Tensor:
    """Returns η·λ, or 0 if there is no weight decay."""
    return group.get("lr", 0.0) * group.get("weight_decay", 0.0)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """Returns the dtype to which all of the tensors promote, which is at least float32."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


Rate = Callable[[ParamGroup], float | Tensor]


@final
class DecayFactors:
    """Computes 1 - rate for every head of every weight from its parameter group, in a few operators per group.

    Args:
        optimizer: the optimizer with the groups.
        tensors: the tensor that the optimizer updates for each weight, or None if the weight is not updated.
        counts: the number of heads of each weight.
        rate: computes, from a group's options, the fraction of a weight that one step removes.
    """

    def __init__(
        self, optimizer: Optimizer, tensors: Sequence[Tensor | None], counts: Sequence[int], rate: Rate
    ) -> None:
        self._optimizer, self._tensors, self._counts, self._rate = optimizer, tensors, counts, rate
        self._values = torch.ones(1)
        self._groups: tuple[int, ...] = ()
        self._index = torch.empty(0, dtype=torch.int64)

    def read(self, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the current rates. Numbers are never copied to the device, and tensors are never read by the host."""
        groups = self._optimizer.param_groups
        if (self._values.shape[0], self._values.dtype, self._values.device) != (len(groups) + 1, dtype, device):
            self._values = torch.ones(len(groups) + 1, dtype=dtype, device=device)
        for value, group in zip(self._values.unbind(), groups):
            rate = self._rate(group)
            value.fill_(1 - (rate.reshape(()) if isinstance(rate, Tensor) else rate))

    def row(self, is_stepped: Callable[[Tensor], bool], found_inf: Tensor | None) -> Tensor:
        """Returns the factors [all heads + 1] with a 1 at the end.

        The factors are 1 for tensors that are not updated, and for all tensors in a step that a GradScaler skips."""
        groups = self._optimizer.param_groups
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        numbers = tuple(len(groups) if t is None or not is_stepped(t) else group_of[id(t)] for t in self._tensors)
        if numbers != self._groups or self._index.device != self._values.device:
            self._groups = numbers
            index = [i for i, n in zip(numbers, self._counts) for _ in range(n)]
            self._index = torch.tensor([*index, len(groups)], device=self._values.device)
        if found_inf is None:
            return self._values[self._index]
        # A fused optimizer runs its hooks even if a GradScaler skips the step.
        skipped = torch.as_tensor(found_inf).to(self._values.device) != 0
        return torch.where(skipped, 1.0, self._values)[self._index]
