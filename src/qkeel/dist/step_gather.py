"""The gather that ends an optimizer's step, and the maxima over all processes that are sent with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.dist.reductions import gather, reduced


@final
class StepGather:
    """The gather at the end of some steps of an optimizer. Maxima that are wanted after each step are sent with it, so
    that such a step has one collective; all processes must have agreed on that."""

    def __init__(self) -> None:
        self.maxima: list[StepMaxima] = []
        self.agreed = ""  # the name of the gather that all processes take part in

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """The one of an optimizer, which is the same for all who ask."""
        return _OF.setdefault(optimizer, cls())  # type: ignore[return-value]

    def agree(self, name: str, counts: set[str]) -> None:
        """All processes take part in the gather of this name; `counts`: what each of them said of `count`."""
        self.agreed = name
        for one in self.maxima if len(counts) == 1 else ():
            one.sent_with = name

    @property
    def count(self) -> str:
        """The number of vectors of maxima, to be compared over the processes."""
        return str(len(self.maxima))

    def gather(self, name: str, vector: Tensor) -> Tensor:
        """[n] on every process -> [world n] on each; the maxima are sent behind it, and handed to who wants them."""
        with_it = [one for one in self.maxima if one.sent_with == name and one.found is None]
        sent = [vector, *(one.own().to(vector) for one in with_it)]
        rows, *others = gather(torch.cat(sent)).split([len(x) for x in sent], 1)
        for one, found in zip(with_it, others):
            one.found = found.amax(0)
        return rows

    def largest(self, wanted: StepMaxima) -> Tensor:
        """The maxima over all processes, once a step; those that no gather took along, by one collective for all."""
        if wanted.found is None:
            left = [one for one in self.maxima if one.found is None]
            own = [one.own() for one in left]
            over_all = reduced(torch.cat([x.to(own[0]) for x in own]), "max")
            for one, found in zip(left, over_all.split([len(x) for x in own])):
                one.found = found
        found, wanted.found = wanted.found, None
        assert found is not None
        return found


@final
class StepMaxima:
    """A vector of which each process knows some numbers at the end of a step, and whose maxima over all are wanted.

    `sent_with` is the name of the gather, agreed by all processes, that takes it along where one is made in a step;
    else it is reduced; `own` is asked once a step. None of the numbers is NaN.
    """

    def __init__(self, own: Callable[[], Tensor], sent_with: str) -> None:
        self.own, self.sent_with = own, sent_with
        self.found: Tensor | None = None


_OF: WeakKeyDictionary[Optimizer, StepGather] = WeakKeyDictionary()
