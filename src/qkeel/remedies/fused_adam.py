"""Steps of fused Adam or AdamW with a rate per head, which replace torch's steps for the weights of heads."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from qkeel.heads.site import HeadSlice
from qkeel.kernels.native import operators
from qkeel.kernels.triton import available
from qkeel.patching import optimizers
from qkeel.patching.autograd import is_wrapper, writes_of
from qkeel.remedies.head_groups import HeadView, stacked

_WHOLE = (Tensor, nn.Parameter)  # classes that wrap no other tensors
Owner = tuple[Tensor, list[int], list[HeadView]]
TensorVersion = tuple[int, int]  # a tensor's count of in-place changes, and its data pointer


@final
class AdamPass:
    """Updates the weights of heads in one pass that scales each head's step and sums the squares of the new weights.

    Inside `optimizer.step()` torch calls `_init_group` to get the tensors to update. Between `begin` and `end` the
    result omits the weights of heads, which have already been updated: torch's own state tensors are advanced, and the
    weights change as in torch's fused step, but scaled. Gradients and parameter groups are never changed, except that
    gradients are unscaled where torch's step would do so. The pass is compiled C++ on a CPU and a Triton kernel on a
    GPU.
    """

    def __init__(self, optimizer: Optimizer, owners: Sequence[Owner], slices: Sequence[HeadSlice], plain: bool) -> None:
        self._optimizer, self._plain = optimizer, plain
        self._weights = [weight for weight, _, _ in owners]
        self._place = {id(weight): k for k, weight in enumerate(self._weights)}
        self._axes = [slices[entries[0]].axis if weight.ndim == 2 else 0 for weight, entries, _ in owners]
        self._n_lines = [weight.shape[axis] for weight, axis in zip(self._weights, self._axes)]
        self._owned = [entries for _, entries, _ in owners]
        self._entries = [i for entries in self._owned for i in entries]
        counts = [s.n for s in slices]
        all_lines = [HeadView(weight=w, shares=tuple((i, slices[i]) for i in own), whole=True) for w, own, _ in owners]
        self._makers = stacked([view.places(counts) for view in all_lines])
        self._counts = [counts[i] for i in self._entries]
        self._lines = _lines(owners, slices, self._n_lines)
        self._kernels: ModuleType | None = None
        self._answer = self._without_heads  # one object, so that it can be recognised later
        self._move(self._makers.device)

    @classmethod
    def of(
        cls, optimizer: Optimizer, owners: Sequence[Owner], slices: Sequence[HeadSlice], *, plain: bool
    ) -> Self | None:
        """Returns the pass, or None if torch's step is unknown or the weights are of an unsupported kind."""
        known = optimizers.is_known(optimizer) and owners and all(_is_plain(weight) for weight, _, _ in owners)
        return cls(optimizer, owners, slices, plain) if known else None

    def _move(self, device: torch.device) -> None:
        """Moves the tensors that the pass reads and writes to the weights' device."""
        self._rates = torch.ones(sum(self._n_lines), dtype=torch.float32, device=device)
        self._squares = torch.zeros(sum(self._n_lines) + 1, dtype=torch.float64, device=device)  # the last stays 0
        self._line_rates = self._rates.split(self._n_lines)
        self._line_squares = self._squares.split([*self._n_lines, 1])[:-1]
        self._makers, self._lines = self._makers.to(device), self._lines.to(device)
        self._known: list[TensorVersion | None] = [None] * len(self._weights)
        self._states: list[dict[str, Any] | None] = [None] * len(self._weights)

    def refusal(self) -> str:
        """Returns the reason why the pass cannot take the coming step, or "" if it can."""
        why = refusal(self._optimizer, self._weights)
        if why:
            return why
        device = self._weights[0].device
        self._kernels = _kernels(device)
        if self._kernels is None:
            return f"there is no compiled step for {device}: it is switched off or cannot be loaded"
        here = self._kernels is not operators  # the pass for CPUs does not read a GradScaler's tensors
        if any(x is not None and not (here and x.device == device) for x in _scaler(self._optimizer)):
            return "a GradScaler may skip the step, and its decision cannot be read here"
        if device != self._rates.device:
            self._move(device)
        if not self._takes_all():
            return (
                "the weights are on several devices or not dense by rows or columns, or the optimizer's state is not "
                "in the form that its fused step creates"
            )
        return ""

    def _takes_all(self) -> bool:
        """True if the weights and states are of the right kind. Those unchanged since the last step aren't checked."""
        states, device = self._optimizer.state, self._rates.device
        for k, (weight, now) in enumerate(zip(self._weights, writes_of(self._weights))):
            state = states.get(weight, {})
            if self._known[k] == now and self._states[k] is state:
                continue
            if not (_fits(weight, device) and all(_fits_state(name, x, weight) for name, x in state.items())):
                return False
        return True

    def norms(self) -> dict[int, Tensor]:
        """Returns the Frobenius norms per head of entries whose weights have been updated, here or before a checkpoint.

        They are computed from the squares that the last step summed. For weights that have been written to since, the
        squares are summed again.
        """
        now = writes_of(self._weights)
        old = [k for k, w in enumerate(self._weights) if self._known[k] != now[k] and self._optimizer.state.get(w)]
        if old:
            assert self._kernels is not None
            self._kernels.sum_lines(
                [self._weights[k].detach() for k in old],
                [self._line_squares[k] for k in old],
                [self._axes[k] for k in old],
            )
        for k in old:
            self._known[k] = now[k]
        fresh = {i for k, entries in enumerate(self._owned) if self._known[k] == now[k] for i in entries}
        if not fresh:
            return {}
        all_norms = self._squares[self._lines].sum(1).sqrt().float().split(self._counts)
        return {i: norm for i, norm in zip(self._entries, all_norms) if i in fresh}

    def begin(self, factors: Tensor) -> None:
        """Takes the coming step with these factors: one for each head, ordered by weight, and a 1 at the end."""
        torch.amin(factors.to(self._rates)[self._makers], 1, out=self._rates)
        optimizers.put_answer(self._optimizer, self._answer)

    def end(self) -> None:
        """Returns control of the steps to torch."""
        optimizers.take_answer_back(self._optimizer, self._answer)

    def _without_heads(self, group: optimizers.Group, *lists: list[Tensor]) -> bool:
        """Returns torch's answer without the weights of heads, which are updated here."""
        complex_ones = optimizers.torchs_answer(self._optimizer, group, lists)
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
        assert self._kernels is not None
        means, variances, maxima, steps = state
        places = [self._place[id(w)] for w in weights]
        laid = [  # with the memory layout of their weights
            g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in zip(gradients, weights)
        ]
        tensors = operators.AdamTensors(
            weights=weights,
            gradients=laid,
            means=means,
            variances=variances,
            maxima=maxima,
            steps=steps,
            rates=[self._line_rates[k] for k in places],
            squares=[self._line_squares[k] for k in places],
            axes=[self._axes[k] for k in places],
            **dict(zip(("grad_scale", "found_inf"), _scaler(self._optimizer))),
        )
        self._kernels.adam_lines(tensors, _options(group, self._plain))
        for g, own in zip(gradients, laid) if tensors.grad_scale is not None else ():
            if g is not own:
                g.copy_(own)
        for k, weight, now in zip(places, weights, writes_of(weights)):
            self._known[k], self._states[k] = now, self._optimizer.state[weight]


def refusal(optimizer: Optimizer, weights: Sequence[Tensor]) -> str:
    """Returns the reason why a compiled pass cannot take over a step of these weights, or "" if there is none.

    Only the optimizer and the weights are checked.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> refusal(torch.optim.AdamW([weight]), [weight])
    'a parameter group is not fused=True, or it is capturable or differentiable'
    """
    o, own = optimizer, set(map(id, weights))
    groups = [g for g in o.param_groups if not own.isdisjoint(map(id, g["params"]))]
    if torch.compiler.is_compiling():
        return "the step is being compiled"
    if not optimizers.is_known(o):
        return f"{type(o).__name__} is not torch's own Adam or AdamW, or this torch passes it weights differently"
    if not all(map(_is_plain, weights)):
        return "the weights are not all float32 matrices or vectors that are whole in this process"
    if optimizers.is_answered(o):
        return "another remedy has replaced the step"
    if not all(map(optimizers.is_fused, groups)):
        return "a parameter group is not fused=True, or it is capturable or differentiable"
    if any(isinstance(x, Tensor) and x.device.type != "cpu" for g in groups for x in (g["lr"], *g["betas"])):
        return "a rate or beta is a tensor on a device, which the host would wait for"
    return ""


def _kernels(device: torch.device) -> ModuleType | None:
    """Returns the module that updates weights on a device: the Triton kernels, the compiled CPU operators, or None."""
    if available.usable(device):
        if not available.trusted("step of AdamW", device):
            return None
        from qkeel.kernels.triton import adamw as adam_lines

        return adam_lines
    return operators if device.type == "cpu" and operators.adamw_ready() else None


def _scaler(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Returns what a GradScaler passes to a fused optimizer: the scale of gradients, and whether any is infinite."""
    kept = vars(optimizer)
    return kept.get("grad_scale"), kept.get("found_inf")


def _fits(x: Tensor, device: torch.device) -> bool:
    """True if a tensor has the memory layout and the device that the pass expects."""
    laid = x.is_contiguous() or (x.ndim == 2 and x.T.is_contiguous())
    return _is_plain(x) and laid and x.device == device and not x.is_inference() and x.numel() > 0


def _is_plain(x: Tensor) -> bool:
    alone = type(x) in _WHOLE or not is_wrapper(x)
    return x.dtype == torch.float32 and x.layout == torch.strided and alone and x.ndim in (1, 2)


def _fits_state(name: str, x: Any, weight: Tensor) -> bool:
    """True if a state tensor is like those that torch's step creates. One from a checkpoint may be different."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.device != weight.device:
        return False
    return x.ndim == 0 if name == "step" else x.shape == weight.shape and x.stride() == weight.stride()


def _options(group: dict[str, Any], plain: bool) -> operators.AdamOptions:
    beta1, beta2 = group["betas"]
    return operators.AdamOptions(
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
    """Returns the indices [all heads, most] of each head's lines, ordered by weight and padded with the line count."""
    found: list[Tensor] = []
    first = 0
    for (_, entries, _), n in zip(owners, lines):
        found.extend(row + first for i in entries for row in slices[i].index.cpu())
        first += n
    return pad_sequence(found, batch_first=True, padding_value=first)
