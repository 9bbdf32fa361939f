"""Which steps to measure, and their count: every n-th step, steps evenly spaced on a log scale, or steps where the
logits change."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import ClassVar, final, get_args

import torch
from torch import Tensor

from qkeel import dist
from qkeel.errors import InvalidTypeError, InvalidValueError, check
from qkeel.patching.roles import Phase
from qkeel.sites.tap import Look


class Cadence(abc.ABC):
    """Chooses which steps are measured; it has no state, so that all processes of a run make the same choice."""

    brackets: ClassVar[bool] = False  # whether it needs the bound on the largest logit at every step

    @abc.abstractmethod
    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        """Returns whether step `step` is measured.

        last: the last measured step, or None before the first. bound_ratio: the factor by which the bound on the
        largest logit has risen or fallen since then (1 if unknown).
        """


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Every(Cadence):
    """Every n-th step, from step 0 on.

    >>> [step for step in range(7) if Every(3).due(step, None, 1.0)]
    [0, 3, 6]
    """

    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise InvalidTypeError(f"expected a whole number of steps between two measurements, got {self.n!r}")
        check(self.n >= 1, "at least 1 step between two measurements", self.n)

    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        return step % self.n == 0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogSpaced(Cadence):
    """`per_decade` steps for each factor of ten in steps, from step 0 on, because logit drift follows a power law,
    which is fastest at the start.

    >>> [step for step in range(101) if LogSpaced(per_decade=4).due(step, None, 1.0)]
    [0, 1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    per_decade: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.per_decade, int) or self.per_decade < 1:
            raise InvalidValueError(f"expected at least 1 measurement per decade, got {self.per_decade!r}")

    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        if step < 2:
            return True
        place = round(math.log10(step) * self.per_decade)
        return any(step == round(10 ** (p / self.per_decade)) for p in (place - 1, place, place + 1))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(Cadence):
    """Measures at intervals of `least` to `most` steps, depending on when the bound on the largest logit has changed.

    The bound is the largest row logsumexp, lse - ln n <= max <= lse, which torch's fused CPU kernel computes anyway.
    Where no logsumexp is available (with dropout or on a GPU), the bound is scale·max|q|·max|k|; for hand-written
    attention, it is the maximum itself. A change is a factor of more than 1 + `change` since the first step after the
    last measurement. The bound cannot be used for compiled models, which are not read between measurements, or with
    several processes, which must all make the same choice. In both cases, every `most`-th step is measured, and every
    `least`-th of the first `start` steps, in which logits change most.

    >>> [step for step in range(10) if Adaptive(least=2, most=9, start=6).due(step, 0, 1.0)]
    [0, 2, 4, 6, 9]
    """

    least: int = 5
    most: int = 100
    change: float = 0.1
    start: int = 0
    brackets = True

    def __post_init__(self) -> None:
        check(1 <= self.least <= self.most, "1 <= least <= most", f"least={self.least}, most={self.most}")
        check(self.change > 0, "a change above 0 (0.1 is ten per cent)", self.change)
        check(self.start >= 0, "a start of at least 0 steps", self.start)

    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        if last is None or step - last >= self.most:
            return True
        if step <= self.start and step % self.least == 0:
            return True
        return step - last >= self.least and abs(math.log(bound_ratio)) > math.log1p(self.change)


WHILE_LOGITS_MOVE = Adaptive(least=2, most=10, change=0.25, start=20)  # the default of the command line


def cadence(every: int | Cadence) -> Cadence:
    """`every` as a cadence: a number of steps is Every(n)."""
    return every if isinstance(every, Cadence) else Every(every)


LEAST = 1.0  # nats; bounds below this count as equal, because they make no difference to a softmax


@final
class MeasuredSteps:
    """Counts the passes and steps of a run and asks the cadence which of them are measured.

    If there is an optimizer, passes that may be trained belong to its steps. All other passes, and those in evaluation
    mode, are counted individually, separately for each model. The role of a pass is known later; see `counted`.
    """

    def __init__(self, cadence: Cadence, models: Iterable[str] = ("",), *, by_optimizer: bool) -> None:
        self.done = 0  # optimizer steps
        self.closer: int | None = None  # every so many steps, in addition to the steps that the cadence selects
        self.besides: set[int] = set()  # training steps that are measured regardless of the cadence
        self._passes: dict[tuple[Phase, str], int] = {(p, name): 0 for p in get_args(Phase) for name in models}
        self._begun = dict(self._passes)  # by the role that their mode suggests
        self._cadence, self._by_optimizer = cadence, by_optimizer
        self._last: dict[tuple[Phase, str], int] = {}
        self._bound = BoundChange()
        self.continued: Callable[[], int] | None = None  # returns the steps before this run

    def due(self, model: str, candidate: bool, training: bool, compiled: bool) -> tuple[Look, bool]:
        """Returns what to measure in the pass that is about to start, and whether this counts if the pass turns out to
        be trained; call it once per pass.

        candidate: whether gradients are on, so that the pass may be trained. training: the mode of the model.
        """
        if candidate and self.continued is not None:
            self.done, self.continued = max(self.done, self.continued()), None
        likely: Phase = "train" if candidate and training else "eval"
        begun, self._begun[likely, model] = self._begun[likely, model], self._begun[likely, model] + 1
        if not self._by_optimizer:
            counts = self._measures(begun, likely, "" if likely == "train" else model)
            if counts and likely == "eval":
                self._last["eval", model] = begun
            measured = counts
        else:
            counts = candidate and self._measures(self.done, "train")
            measured = counts
            if likely == "eval" and self._measures(begun, "eval", model):
                self._last["eval", model] = begun
                measured = True
        if measured:
            return "statistics", counts
        return ("bracket" if self._cadence.brackets and candidate and not compiled else "nothing"), candidate

    def counted(self, model: str, phase: Phase) -> None:
        """Counts a pass whose role is known."""
        self._passes[phase, model] += 1

    def passed(self, phase: Phase) -> int:
        """Returns the total number of passes of all models."""
        return sum(n for (of, _), n in self._passes.items() if of == phase)

    @property
    def begun(self) -> int:
        """The number of passes of all models that have begun."""
        return sum(self._begun.values())

    def rounds(self, phase: Phase) -> int:
        """Returns the smallest number of passes that any of the models has made."""
        return min(n for (of, _), n in self._passes.items() if of == phase)

    @property
    def step_due(self) -> bool:
        """Whether the current optimizer step is measured."""
        return self._measures(self.done, "train")

    def _measures(self, step: int, phase: Phase, model: str = "") -> bool:
        if phase == "train" and step == self.last and self._by_optimizer:
            return False  # it has been recorded already
        if phase == "train" and (step in self.besides or (self.closer is not None and step % self.closer == 0)):
            return True
        return self._cadence.due(step, self._last.get((phase, model)), self._bound.factor if phase == "train" else 1.0)

    @property
    def last(self) -> int | None:
        """The last measured training step."""
        return self._last.get(("train", ""))

    def bounded(self, bound: Tensor) -> None:
        """Records the bound on the largest logit of a training pass that was not fully measured."""
        self._bound.see(bound)
        if not self._by_optimizer:
            self._bound.step()

    def measured(self, step: int) -> None:
        """Records that this training step was measured."""
        self._last["train", ""] = step
        self.besides.discard(step)
        self._bound.measured()

    def stepped(self) -> None:
        """Counts one optimizer step."""
        self.done += 1
        self._bound.step()


@final
class BoundChange:
    """The change of the bound on the largest logit since the first step after a measurement, computed without waiting
    for the device.

    Bounds are compared with bounds only, because lse and the maximum differ by up to ln n. Bounds are read one step
    late, once they have arrived from the device. If several processes train, `factor` stays 1, because all of them must
    make the same choice.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._now: Tensor | None = None
        self._before: float | None = None
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._room: Tensor | None = None  # pinned host memory; allocating it can make the host wait

    def see(self, bound: Tensor) -> None:
        """Records the bound of one more pass of this step."""
        self._now = bound if self._now is None else torch.maximum(self._now, bound)

    def measured(self) -> None:
        """Records that this step was fully measured; later bounds are compared with the first bound after it."""
        self.factor = 1.0
        self._before, self._now, self._coming = None, None, None

    def step(self) -> None:
        """Ends the step."""
        self._arrive()
        if self._coming is not None:  # the device lags behind: send it with the next bound
            return
        now, self._now = self._now, None
        if now is None or dist.world() > 1:
            return
        if now.device.type == "cuda":
            if self._room is None:
                self._room = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
            event = torch.cuda.Event()
            self._room.copy_(now, non_blocking=True)
            event.record()
            self._coming = self._room, event
        else:
            self._coming = now.cpu(), None
            self._arrive()

    def _arrive(self) -> None:
        if self._coming is None or (self._coming[1] is not None and not self._coming[1].query()):
            return
        bound = max(float(self._coming[0]), LEAST)
        self._coming = None
        if self._before is None:
            self._before = bound
        self.factor = bound / self._before
