"""A step of fused Adam or AdamW with a rate per head, taken in torch's place for the weights that heads are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from qkeel.kernels.native import adamw
from qkeel.patching import adam_groups
from qkeel.patching.graph_nodes import is_wrapper, version_of
from qkeel.remedies.steps.head_groups import HeadView, stacked
from qkeel.sites.site import HeadSlice

Owner = tuple[Tensor, list[int], list[HeadView]]
Known = tuple[int, int]  # a tensor's count of changes, and where its numbers lie


@final
class AdamPass:
    """Steps the weights of heads in one compiled pass that scales each head's step and sums the squares it leaves.

    Inside `optimizer.step()` torch asks `_init_group` for what there is to step. Between `begin` and `end` the answer
    leaves out the weights of heads, which have made their step then: torch's own state tensors moved on, the numbers
    those of torch's fused step, scaled. Gradients and parameter groups are never touched.
    """

    def __init__(self, optimizer: Optimizer, owners: Sequence[Owner], slices: Sequence[HeadSlice], plain: bool) -> None:
        self._optimizer, self._owners, self._plain = optimizer, owners, plain
        self._place = {id(weight): k for k, (weight, _, _) in enumerate(owners)}
        self._axes = [slices[entries[0]].axis if weight.ndim == 2 else 0 for weight, entries, _ in owners]
        lines = [weight.shape[axis] for (weight, _, _), axis in zip(owners, self._axes)]
        self._rates = torch.ones(sum(lines))
        self._squares = torch.zeros(sum(lines) + 1, dtype=torch.float64)  # the last stays 0
        self._line_rates = self._rates.split(lines)
        self._line_squares = self._squares.split([*lines, 1])[:-1]
        self._entries = [i for _, entries, _ in owners for i in entries]
        counts = [s.n for s in slices]
        all_lines = [HeadView(weight=w, shares=tuple((i, slices[i]) for i in own), whole=True) for w, own, _ in owners]
        self._makers = stacked([view.places(counts) for view in all_lines])
        self._counts = [counts[i] for i in self._entries]
        self._lines = _lines(owners, slices, lines)
        self._known: list[Known | None] = [None] * len(owners)
        self._states: list[dict[str, Any] | None] = [None] * len(owners)
        self._answer = self._without_heads  # one object, so that it is known again

    @classmethod
    def of(
        cls, optimizer: Optimizer, owners: Sequence[Owner], slices: Sequence[HeadSlice], *, plain: bool
    ) -> Self | None:
        """The pass, or None where torch's step is not known or its weights are of another kind."""
        known = adam_groups.is_known(optimizer) and all(_fits(weight) for weight, _, _ in owners)
        return cls(optimizer, owners, slices, plain) if known else None

    def ready(self) -> bool:
        """True if it can take the coming step: not one that a GradScaler may skip, nor one of another remedy."""
        o = self._optimizer
        if torch.compiler.is_compiling() or adam_groups.is_answered(o) or not adamw.ready():
            return False
        if getattr(o, "grad_scale", None) is not None or getattr(o, "found_inf", None) is not None:
            return False
        groups = [g for g in o.param_groups if any(id(p) in self._place for p in g["params"])]
        return all(map(adam_groups.is_fused, groups)) and all(map(self._takes, range(len(self._owners))))

    def _takes(self, k: int) -> bool:
        """True if a weight and its state are of the right kind: as the last step left them, or looked at."""
        weight, state = self._owners[k][0], self._optimizer.state.get(self._owners[k][0], {})
        if self._known[k] == _now(weight) and self._states[k] is state:
            return True
        return _fits(weight) and all(_fits_state(name, x, weight) for name, x in state.items())

    def norms(self) -> dict[int, Tensor]:
        """The Frobenius norms per head of entries whose weights have made a step, here or before a checkpoint."""
        for k, (weight, _, _) in enumerate(self._owners):
            if self._known[k] != _now(weight) and self._optimizer.state.get(weight):
                self._sum(k)
                self._known[k] = _now(weight)
        fresh = {i for k, (w, entries, _) in enumerate(self._owners) if self._known[k] == _now(w) for i in entries}
        if not fresh:
            return {}
        all_norms = self._squares[self._lines].sum(1).sqrt().float().split(self._counts)
        return {i: norm for i, norm in zip(self._entries, all_norms) if i in fresh}

    def _sum(self, k: int) -> None:
        """The squares of a weight's lines, by a step that leaves a copy of it as it is. To the bit those that the
        pass leaves, so that a resumed run goes on as if it had never stopped."""
        weight = self._owners[k][0].detach()
        means, variances, gradients = ([torch.zeros_like(weight)] for _ in range(3))
        tensors = adamw.AdamTensors(
            weights=[weight.clone()],
            gradients=gradients,
            means=means,
            variances=variances,
            maxima=[],
            steps=[torch.zeros(())],
            rates=[torch.zeros_like(self._line_rates[k])],
            squares=[self._line_squares[k]],
            axes=[self._axes[k]],
        )
        none = adamw.AdamOptions(lr=0, beta1=0.9, beta2=0.9, eps=1, decay=0, decoupled=True, maximize=False)
        adamw.adam_lines(tensors, none)

    def begin(self, factors: Tensor) -> None:
        """Take the coming step, at these factors per head of every entry, one after the other, and a 1 behind them."""
        torch.amin(factors.to(self._rates)[self._makers], 1, out=self._rates)
        adam_groups.put_answer(self._optimizer, self._answer)

    def end(self) -> None:
        """Leave the steps to torch again."""
        adam_groups.take_answer_back(self._optimizer, self._answer)

    def _without_heads(self, group: adam_groups.Group, *lists: list[Tensor]) -> bool:
        """Torch's answer without the weights of heads, which are stepped here."""
        complex_ones = adam_groups.torchs_answer(self._optimizer, group, lists)
        own = [i for i, p in enumerate(lists[0]) if id(p) in self._place]
        if own:
            self._step(group, *([x[i] for i in own] if x else [] for x in lists))
        for x in lists:
            for i in reversed(own if x else []):
                del x[i]
        return complex_ones

    def _step(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> None:
        means, variances, maxima, steps = state
        places = [self._place[id(w)] for w in weights]
        tensors = adamw.AdamTensors(
            weights=weights,
            gradients=[  # laid in memory as their weights
                g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in zip(gradients, weights)
            ],
            means=means,
            variances=variances,
            maxima=maxima,
            steps=steps,
            rates=[self._line_rates[k] for k in places],
            squares=[self._line_squares[k] for k in places],
            axes=[self._axes[k] for k in places],
        )
        adamw.adam_lines(tensors, _options(group, self._plain))
        for k, weight in zip(places, weights):
            self._known[k], self._states[k] = _now(weight), self._optimizer.state[weight]


def _now(weight: Tensor) -> Known:
    return version_of(weight), weight.data_ptr()


def _fits(x: Tensor) -> bool:
    """True if it is a matrix or vector of the kind the pass is written for."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.layout == torch.strided and not is_wrapper(x)
    laid = x.is_contiguous() or (x.ndim == 2 and x.T.is_contiguous())
    return plain and laid and 0 < x.ndim < 3 and not x.is_inference()


def _fits_state(name: str, x: Any, weight: Tensor) -> bool:
    """True if it is what torch's step makes of itself: a checkpoint may have brought something else."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return x.ndim == 0 if name == "step" else x.shape == weight.shape and x.stride() == weight.stride()


def _options(group: dict[str, Any], plain: bool) -> adamw.AdamOptions:
    beta1, beta2 = group["betas"]
    return adamw.AdamOptions(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
        plain=plain,
    )


def _lines(owners: Sequence[Owner], slices: Sequence[HeadSlice], lines: Sequence[int]) -> Tensor:
    """[all heads, most] places of a head's lines among all, entry by entry; the place after the last fills up."""
    found: list[Tensor] = []
    first = 0
    for (_, entries, _), n in zip(owners, lines):
        found.extend(row + first for i in entries for row in slices[i].index.cpu())
        first += n
    return pad_sequence(found, batch_first=True, padding_value=first)
