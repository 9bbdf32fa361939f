"""Masks of small numbers (Swin's -100) in written-out attention: where the scores get them, found once, then -inf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from qkeel.remedies.base import Args, Kwargs
from qkeel.sites.calls.hidden_pairs import HIDES, hides, is_low

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
    """

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self._calls = 0
        self._candidates: list[tuple[Place, int]] = []

    def begin(self) -> None:
        """A forward begins."""
        self._calls = 0
        self._candidates.clear()

    def call(self, function: Function, args: Args, kwargs: Kwargs, *, noting: bool) -> object:
        """Calls one of MASKING, with -inf in the place of small numbers; `noting` notes where they are."""
        number, self._calls = self._calls, self._calls + 1
        sign = -1.0 if function in _SUBTRACTS else 1.0
        own = [i for i in range(len(args)) if (number, i) in self.places]
        out = function(*(_lowest(x, sign) if i in own else x for i, x in enumerate(args)), **kwargs)
        if noting and isinstance(out, Tensor) and out.is_floating_point():
            self._note(function, number, args, out)
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

    def keep(self, scores: Tensor) -> None:
        """A softmax takes these scores: what was noted of calls that made as many numbers hides their pairs."""
        self.places |= {place for place, size in self._candidates if size == scores.numel()}


def _lowest(x: object, sign: float) -> object:
    """-inf where an added number hides, +inf where a subtracted one does, and in the place of one number."""
    if isinstance(x, Tensor) and x.numel() > 1:
        return x.masked_fill(hides(sign * x), -sign * math.inf)
    return torch.full_like(x, -math.inf) if isinstance(x, Tensor) else -math.inf
