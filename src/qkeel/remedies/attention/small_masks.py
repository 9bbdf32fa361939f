"""Other things that written-out attention does to its scores: masks of small numbers (Swin's -100), and the
subtraction of the largest of each row. Where it happens is found once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from qkeel.capture.calls import HIDES, hides, is_low
from qkeel.remedies.base import Args, Kwargs

Function = Callable[..., object]

_ADDS: tuple[Function, ...] = (*(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),)
_SUBTRACTS: tuple[Function, ...] = (torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__)
_FILLS: tuple[Function, ...] = (
    *(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_, torch.where, Tensor.where),
)
MASKING: tuple[Function, ...] = (*_ADDS, *_SUBTRACTS, *_FILLS)

Place = tuple[int, int]  # the number of a call in the forward, and which of its arguments


@final
class SmallMasks:
    """The arguments of calls in a module's forward that hide pairs of scores by numbers above -9000.

    A softmax receives scores with the mask in them, where -100 cannot be separated from a logit that is that low. So
    one pass on the example notes which argument of which call hides by levels (`hides`), in scores of the size that the
    softmax takes; from then on these arguments have -inf where they hide, whatever the logits are.

    Nor does a softmax show what the logits were if the largest of each row was subtracted from them, which changes no
    weight. `shifts` are the numbers of the calls that do so; they return the scores as they are from then on.
    """

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self.shifts: set[int] = set()
        self._shifted: list[tuple[int, Tensor]] = []
        self._calls = 0
        self._candidates: list[tuple[Place, int]] = []

    @property
    def known(self) -> bool:
        """True if there are calls to be made in another way."""
        return bool(self.places or self.shifts)

    def begin(self) -> None:
        """A forward begins."""
        self._calls = 0
        self._candidates.clear()
        self._shifted.clear()

    def call(self, function: Function, args: Args, kwargs: Kwargs, *, noting: bool) -> object:
        """Calls one of MASKING, with -inf in the place of small numbers; `noting` notes where they are."""
        number, self._calls = self._calls, self._calls + 1
        if number in self.shifts:
            return args[0]
        less_top = noting and function in _SUBTRACTS and _is_top(args)
        sign = -1.0 if function in _SUBTRACTS else 1.0
        own = [i for i in range(len(args)) if (number, i) in self.places]
        out = function(*(_lowest(x, sign) if i in own else x for i, x in enumerate(args)), **kwargs)
        if noting and isinstance(out, Tensor) and out.is_floating_point():
            self._note(function, number, args, out)
            self._shifted += [(number, out.detach().clone())] if less_top else []
        return out

    def _note(self, function: Function, number: int, args: Args, out: Tensor) -> None:
        size = out.numel()
        for i, x in enumerate(args):
            if (number, i) in self.places:
                continue
            if function in _FILLS:
                found = is_low(x) and float(x) > HIDES
            elif not isinstance(x, Tensor) or x.ndim < 2 or (i == 0 and function in _SUBTRACTS):
                continue
            elif x.numel() == size and any(before == size for _, before in self._candidates):
                continue  # the scores, which have such a mask in them already
            else:
                signed = -x if function in _SUBTRACTS else x
                found = bool((hides(signed) & (signed > HIDES)).any())
            if found:
                self._candidates.append(((number, i), size))

    def keep(self, scores: Tensor) -> bool:
        """A softmax takes these scores: what was noted of calls that made as many numbers hides their pairs. Returns
        False if the largest of each row was subtracted and something was done to the rest, which hides the logits."""
        self.places |= {place for place, size in self._candidates if size == scores.numel()}
        flat = scores.detach().flatten()
        kept = [(n, out.flatten()) for n, out in self._shifted if out.numel() == len(flat)]
        found = {n for n, out in kept if bool(((out == flat) | (flat <= HIDES)).all())}
        self.shifts |= found
        return len(found) == len(kept)


def _is_top(args: Args) -> bool:
    """True of (scores, the largest of each of their rows)."""
    if len(args) < 2 or not all(isinstance(x, Tensor) and x.ndim == args[0].ndim for x in args[:2]):
        return False
    x, top = args[:2]
    rows = [i for i in range(x.ndim) if top.shape[i] == 1 < x.shape[i]]
    others = [i for i in range(x.ndim) if i not in rows and top.shape[i] != x.shape[i]]
    return len(rows) == 1 and not others and torch.equal(x.detach().amax(rows[0], keepdim=True), top.detach())


def _lowest(x: object, sign: float) -> object:
    """-inf where an added number hides, +inf where a subtracted one does, and in the place of one number."""
    if isinstance(x, Tensor) and x.numel() > 1:
        return x.masked_fill(hides(sign * x), -sign * math.inf)
    return torch.full_like(x, -math.inf) if isinstance(x, Tensor) else -math.inf
