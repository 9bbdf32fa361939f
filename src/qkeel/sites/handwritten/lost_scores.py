"""Scores that an operation made into something that is not understood, and the softmaxes that take it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from qkeel.patching.modes import Args
from qkeel.sites.handwritten.products import apart
from qkeel.sites.handwritten.tags import Lost, Scores, Tags, Weights
from qkeel.sites.missed import Missed
from qkeel.sites.see.running_modules import Frame, tensors

SOFTMAXES = ("softmax", "safe_softmax", "log_softmax")
_FIRST = ("topk", "sort", "kthvalue")  # the numbers come first, then where they were

# What people do to scores before the softmax, in words.
_WORDS: Mapping[str, str] = {
    "linear": "a linear map",
    "conv2d": "a convolution",
    "einsum": "an einsum with a weight",
    "matmul": "a product with a weight",
    "topk": "a choice of the largest",
    "scatter": "a choice of some, written into a new tensor",
    "sub of a number per row": "the subtraction of a number per row, as in a softmax over blocks of keys",
    "setitem": "writing into a tensor piece by piece",
}


class LostScores:
    """Follows what scores became where an operation ended them; `missed` are the softmaxes that took it."""

    def __init__(self, tags: Tags) -> None:
        self.missed: list[Missed] = []
        self.ends: dict[str, None] = {}  # the operations that ended scores
        self._tags = tags

    def begin(self, name: str, frame: Frame, tag: Scores, x: Tensor, out: object) -> None:
        """`name(…)` of tagged scores x made `out`, which are no scores any more."""
        self.ends[name] = None
        if x.ndim < 4 and not any(apart(part.sides) for part in tag.parts):
            return  # heads are concatenated: these are features
        rows, columns = x.shape[-2:]
        if isinstance(out, Tensor) and out.shape[:-1] == x.shape[:-1]:
            columns = max(columns, out.shape[-1])  # some were chosen and written into a row of all
        first = name in _FIRST
        for part in (*tensors((out,)),)[: 1 if first else None]:
            lost = Lost(operation=name, frame=tag.frame, rows=rows, columns=part.shape[-1] if first else columns)
            self._put(part, lost)

    def product(self, name: str, given: Args, out: object) -> None:
        """`name(…)` multiplied tensors; where one is of scores and the others are weights, scores are lost."""
        operands = list(tensors(given))
        for x in operands:
            tag = self._tags.get(x)
            others = [y for y in operands if y is not x]
            if isinstance(tag, (Scores, Lost)) and others and all(_is_weight(y) for y in others):
                if isinstance(tag, Scores):
                    self.begin(name, tag.frame, tag, x, out)
                else:
                    self.go_on(name, tag.frame, tag, out)

    def go_on(self, name: str, frame: Frame, tag: Lost, out: object) -> None:
        """`name(…)` of something lost made `out`: a softmax, or exponentials, are an attention that is missed."""
        weights = name in SOFTMAXES or name in ("exp", "exp2")
        if weights:
            words = _WORDS.get(tag.operation, tag.operation)
            self.miss(frame.shared_with(tag.frame), tag.operation, f"its scores are followed no further than {words}")
        for part in tensors((out,)):
            if weights:
                self._tags.put(part, Weights())
            else:
                self._put(part, tag)

    def miss(self, frame: Frame, operation: str, reason: str) -> None:
        """An attention that is not understood."""
        self.missed.append(Missed(module=frame.name, operation=operation, reason=reason))

    def _put(self, out: Tensor, tag: Lost) -> None:
        if tag.passes_to(out):
            self._tags.put(out, tag)
        else:
            self._tags.drop(out)


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or x.ndim < 3


def is_lost(tag: object) -> bool:
    """True if a tensor with this tag counts as one without a tag, but for what is made of it."""
    return tag is None or isinstance(tag, Lost)
