"""The mechanism behind per-head learning rates: every optimizer step of some weights, scaled per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.handle import Handle
from qkeel.remedies.adam_pass import AdamPass
from qkeel.remedies.base import HeadWeights, Target
from qkeel.remedies.linear import check_linear, decay_rates
from qkeel.remedies.masters import innermost
from qkeel.remedies.pieces import Piece, owned
from qkeel.remedies.presence import Presence

Measure = Callable[[Tensor], Tensor]
Rates = Callable[[list[Tensor]], list[Tensor]]


def frobenius_norm(heads: Tensor) -> Tensor:
    """‖W^h‖_F of each head's part [n r m]."""
    return torch.linalg.vector_norm(heads, dim=(1, 2))


def scale_steps(
    target: Target, remedy: str, weights: HeadWeights, measure: Measure, rates: Rates, *, decay: bool = True
) -> Handle:
    """Scale every optimizer step of the weights, per head, until the handle is removed.

    w ← w_old + f · (w_new - w_old): the whole step, decoupled weight decay included. With decay=False that keeps its
    full size: w ← (1 - ηλ) · w_old + f · (w_new - (1 - ηλ) · w_old). Before the step, `measure` gets each entry's
    weight as [n r m] and gives a number per head [n]; `rates` turns those of all entries into factors f per head,
    entry by entry. Factor 1 leaves the new weight bit for bit. Exact for every optimizer linear in the learning rate.
    The one copy of the rows of heads lives only inside the step. Nothing is read back to the host, and there is no
    loop over heads. Frozen weights are measured only.

    Torch's fused Adam and AdamW on a CPU need neither copy nor rescaling: see AdamPass. With `frobenius_norm` the
    measure comes along there, so a change of a weight through `.data`, which torch does not count, is seen a step late.

    The scaling comes before every other post hook of the step (a clip, an average), in whatever order they came.
    """
    optimizer = innermost(target.need_optimizer(remedy))
    tensors = check_linear(optimizer, remedy, weights, decay=decay)
    presence = Presence(target.model, remedy, (s.parameter for s in weights.slices))
    steps = _Steps(weights, tensors, measure, rates, optimizer, plain=not decay)

    @torch.no_grad()
    def before(*_: Any) -> None:
        presence.check()
        steps.begin()

    @torch.no_grad()
    def after(optimizer: Any, *_: Any) -> None:
        steps.end(getattr(optimizer, "found_inf", None))

    first, last = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    hooks = last.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(last.id, last=False)

    def undo() -> None:
        first.remove()
        last.remove()
        steps.clear()

    return Handle(undo)


@final
class _Steps:
    """The weights before a step, and what is made of them after it. `plain`: weight decay keeps its full size."""

    def __init__(
        self,
        weights: HeadWeights,
        tensors: list[Tensor | None],
        measure: Measure,
        rates: Rates,
        optimizer: Optimizer,
        *,
        plain: bool,
    ) -> None:
        self._measure, self._rates, self._plain = measure, rates, optimizer if plain else None
        # A float32 copy, where there is one, is what is measured too: the weight is its rounding.
        self._read = [p if t is None else t for p, t in zip(weights.parameters, tensors)]
        self._slices = weights.slices
        self._owners = owned(tensors, weights.slices)
        held = {i for _, entries, _ in self._owners for i in entries}
        self._frozen = [i for i in range(len(tensors)) if i not in held]
        self._pass = AdamPass.of(optimizer, self._owners, self._slices, plain=plain)
        self._saved: list[tuple[Piece, Tensor, Tensor]] = []
        self._keeps: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget the step."""
        self._saved.clear()
        if self._pass is not None:
            self._pass.end()

    def begin(self) -> None:
        """Measure and copy, or take the step over."""
        self.clear()  # of a step that raised
        native = self._pass if self._pass is not None and self._pass.ready() else None
        sizes = {i: self._size(i) for i in self._frozen}
        sizes.update(native.norms() if native and self._measure is frobenius_norm else {})
        copies: list[tuple[Piece, Tensor]] = []
        for _, _, parts in self._owners:
            for part in parts:  # measured, then copied at once: the second read comes from the cache
                new = [i for i, _ in part.shares if i not in sizes]
                if not new and native is not None:
                    continue
                view = part.view()
                sizes.update((i, self._size(i) if part.whole else self._measure(view)) for i in new)
                if native is None:
                    copies.append((part, view.clone()))
        factors = self._rates([sizes[i] for i in range(len(sizes))])
        if native is not None:
            native.begin(factors)
            return
        self._saved.extend((part, old, part.factor(factors).to(old.dtype)) for part, old in copies)
        if self._plain is not None:
            self._keeps = {key: 1 - rate for key, rate in decay_rates(self._plain).items()}

    def end(self, found_inf: Tensor | None) -> None:
        """Scale. Nothing is saved when a subclass's step calls its parent's: both run hooks, the inner was the step."""
        for part, old, factor in self._saved:
            if self._plain is not None and part.weight.grad is not None:
                keep = self._keeps[id(part.weight)]
                # A fused optimizer runs its hooks though a GradScaler let nothing move.
                old.mul_(keep if found_inf is None else torch.where(found_inf.to(old.device) != 0, 1.0, keep))
            if part.weight.grad is not None or self._plain is None:
                new = part.view()
                torch.lerp(old, new, factor, out=new)
        self.clear()

    def _size(self, i: int) -> Tensor:
        return self._measure(self._slices[i].heads(self._read[i].detach()))
