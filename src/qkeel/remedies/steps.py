"""The mechanism behind per-head learning rates: every optimizer step of some weights, scaled per head."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.handle import Handle
from qkeel.remedies.adam_pass import AdamPass
from qkeel.remedies.base import HeadWeights, Target
from qkeel.remedies.bundle import Bundles, Measure, frobenius_norm
from qkeel.remedies.group_rates import GroupKeeps
from qkeel.remedies.linear import check_linear
from qkeel.remedies.masters import innermost
from qkeel.remedies.pieces import Piece, owned
from qkeel.remedies.presence import Presence

Rates = Callable[[Tensor], Tensor]


@final
class HeadSteps:
    """Scales every optimizer step of the weights, per head.

    w ← w_old + f · (w_new - w_old): the whole step, decoupled weight decay included. With decay=False that keeps its
    full size: w ← (1 - ηλ) · w_old + f · (w_new - (1 - ηλ) · w_old). Factor 1 leaves the new weight bit for bit. Exact
    for every optimizer linear in the learning rate. Frozen weights are measured only.

    `measure` gives a number per head of [… n r m]; there are ones where it is None. The numbers of all heads stand in
    one row, entry after entry of the weights, and so do the factors. How many operators a step takes does not depend
    on how many weights or heads there are, except that frozen weights, and heads whose rows have no pattern, are
    measured one by one. Nothing is read back to the host. The one copy of the rows of heads lives only inside the
    step; on a CPU its memory is kept for the next.

    Torch's fused Adam and AdamW on a CPU need neither copy nor rescaling: see AdamPass. With `frobenius_norm` the
    measure comes along there, so a change of a weight through `.data`, which torch does not count, is seen a step late.
    """

    def __init__(
        self,
        target: Target,
        remedy: str,
        weights: HeadWeights,
        *,
        measure: Measure | None = None,
        decay: bool = True,
    ) -> None:
        self._optimizer = innermost(target.need_optimizer(remedy))
        tensors = check_linear(self._optimizer, remedy, weights, decay=decay)
        self._presence = Presence(target.model, remedy, (s.parameter for s in weights.slices))
        owners = owned(tensors, weights.slices)
        counts = [s.n for s in weights.slices]
        # A float32 copy, where there is one, is what is measured too: the weight is its rounding.
        read = [p if t is None else t for p, t in zip(weights.parameters, tensors)]
        self._keeps = None if decay else GroupKeeps(self._optimizer, tensors, counts, _decay)
        self._pass = AdamPass.of(self._optimizer, owners, weights.slices, plain=not decay)
        self._heads = _Heads(weights, read, [piece for _, _, found in owners for piece in found])
        self._measure = measure
        self._factors: Tensor | None = None  # of the step under way

    def sizes(self) -> Tensor:
        """What is measured now, of all heads [h], to the bit as in a step."""
        with torch.no_grad():
            found = self._heads.measure(self._measure, {}) if self._native() else self._heads.copy(self._measure)
        self._heads.forget()
        return found

    def scale(self, rates: Rates) -> Handle:
        """Scale steps by what `rates` makes of the measure before each [h], until the handle is removed.

        The scaling comes before every other post hook of the step (a clip, an average), in whatever order they came.
        """

        @torch.no_grad()
        def before(*_: Any) -> None:
            self._presence.check()
            self._begin(rates)

        @torch.no_grad()
        def after(optimizer: Any, *_: Any) -> None:
            self._end(getattr(optimizer, "found_inf", None))

        first, last = self._optimizer.register_step_pre_hook(before), self._optimizer.register_step_post_hook(after)
        hooks = last.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(last.id, last=False)

        def undo() -> None:
            first.remove()
            last.remove()
            self._clear()

        return Handle(undo)

    def _native(self) -> AdamPass | None:
        """What takes the coming step over, if anything does."""
        return self._pass if self._pass is not None and self._pass.ready() else None

    def _clear(self) -> None:
        """Forget the step."""
        self._factors = None
        self._heads.forget()
        if self._pass is not None:
            self._pass.end()

    def _begin(self, rates: Rates) -> None:
        """Measure and copy, or take the step over."""
        self._clear()  # of a step that raised
        native = self._native()
        if native is None:
            sizes = self._heads.copy(self._measure)
        else:
            sizes = self._heads.measure(self._measure, native.norms() if self._measure is frobenius_norm else {})
        factors = F.pad(rates(sizes), (0, 1), value=1.0)
        if native is not None:
            native.begin(factors)
            return
        self._factors = factors
        if self._keeps is not None:
            self._keeps.read(factors.dtype, factors.device)

    def _end(self, found_inf: Tensor | None) -> None:
        """Scale. Nothing is saved when a subclass's step calls its parent's: both run hooks, the inner was the step."""
        if self._factors is not None:
            keeps = None if self._keeps is None else self._keeps.row(lambda w: w.grad is not None, found_inf)
            self._heads.move(self._factors, keeps)
        self._clear()


def _decay(group: dict[str, Any]) -> Any:
    """η·λ now; 0 without weight decay."""
    return group.get("lr", 0.0) * group.get("weight_decay", 0.0)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """What holds numbers of all of them, float32 at least."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


@final
class _Heads:
    """The heads of all entries in one row: where each is measured, and the bundles that move them."""

    def __init__(self, weights: HeadWeights, read: Sequence[Tensor], moved: Sequence[Piece]) -> None:
        self._slices, self._read, self._moved = weights.slices, read, [(piece, piece.weight) for piece in moved]
        self._counts = [s.n for s in weights.slices]
        firsts = [0, *itertools.accumulate(self._counts)]
        self._bundles = Bundles(lambda piece: piece.makers(firsts, firsts[-1]))
        # A piece that is one slice's is measured by its copy.
        self._measured = {piece.shares[0][0]: k for k, piece in enumerate(moved) if not piece.whole}
        self._apart = [i for i in range(len(read)) if i not in self._measured]
        self._order, self._dtype = torch.empty(0, dtype=torch.int64), _widest(read)

    def copy(self, measure: Measure | None) -> Tensor:
        """Copy what moves; what was measured of all heads [h]."""
        if self._bundles.update(self._moved):
            self._order, self._dtype = self._places(), _widest(self._read)
        found = [x for bundle in self._bundles.all for x in bundle.copy(measure)]
        if measure is None:
            return self.ones()
        found.extend(self._one(measure, i) for i in self._apart)
        return self._row(found)[self._order]

    def measure(self, measure: Measure | None, known: Mapping[int, Tensor]) -> Tensor:
        """The same without a copy, entry by entry; some may be known."""
        if measure is None:
            return self.ones()
        found = [known[i] if i in known else self._one(measure, i) for i in range(len(self._slices))]
        return self._row(found)

    def _row(self, found: Sequence[Tensor]) -> Tensor:
        """All on the first weight's device."""
        device = self._read[0].device
        return torch.cat([x.to(device) for x in found])

    def _one(self, measure: Measure, i: int) -> Tensor:
        return measure(self._slices[i].heads(self._read[i].detach()))

    def ones(self) -> Tensor:
        """A 1 per head."""
        return torch.ones(sum(self._counts), dtype=self._dtype, device=self._read[0].device)

    def move(self, factors: Tensor, keeps: Tensor | None) -> None:
        """Scale the step, after the decay of what it started from."""
        for bundle in self._bundles.all:
            if keeps is not None:
                bundle.decay(keeps)
            bundle.move(factors)

    def forget(self) -> None:
        """Drop the copies."""
        for bundle in self._bundles.all:
            bundle.forget()

    def _places(self) -> Tensor:
        """Where each head stands among the numbers of all bundles, and behind them those measured one by one."""
        after = sum(len(view) for bundle in self._bundles.all for view in bundle.views)
        firsts = {i: self._bundles.firsts[k] for i, k in self._measured.items()}
        for i in self._apart:
            firsts[i], after = after, after + self._counts[i]
        order = torch.cat([torch.arange(n) + firsts[i] for i, n in enumerate(self._counts)])
        return order.to(self._read[0].device)
