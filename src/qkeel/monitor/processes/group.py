"""The processes of a run measuring as one: one packed gather per measured step, and no process waits for ever."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import final

from torch import Tensor

from qkeel import dist
from qkeel.dist.words import leave_word, left_by_all, publish, published, words_under
from qkeel.errors import InvalidValueError, QkeelError, caution
from qkeel.monitor.processes.introduction import Introduction
from qkeel.monitor.processes.members import Member, Members
from qkeel.monitor.processes.transfer import Flag, Form, Measurement, Stats, Transfer, word
from qkeel.patching.parallel_training import running_stage

PATIENCE = 8.0  # seconds that a process waits for another that may not watch at all
LONGEST = 60.0  # seconds that it waits, once, for one that watches to end its first measured step
_NOTHING, _OFF = "nothing", "off"
_GONE = "the monitor of another process of this run has switched itself off"


@final
class ProcessGroup:
    """The processes of a run that measure as one, as one of them sees it.

    Before any collective the processes make sure that all of them watch, and before the first gather they introduce
    themselves, since a gather of unlike sizes, or without one of them, never ends. Later a process that stops says so
    in the gather that the others wait in.
    """

    def __init__(self, introduced: Introduction, apart: Callable[[], str], gather: dist.StepGather) -> None:
        """Takes how this process introduces itself, what tells why it must measure alone, "" if it need not, and the
        gather that ends a step."""
        self._introduced, self._apart, self._step_gather = introduced, apart, gather
        self.gathers = 0  # that were begun
        self.records_alone = False  # each process records what it sees, as without an optimizer
        self.stopped = False  # this process measures no more, and the others may not know it yet
        self.over = False  # all processes know that it is over
        self.unseen: QkeelError | None = None  # why this process has no attention; others may have some
        self._alone = False
        self._name = ""
        self._watching = False  # that all processes watch is known
        self._late = False  # another process was late to the step under way
        self._passes = self._rounds = 0
        self._form: Form = ()
        self.members: Members | None = None
        self.here()

    def here(self) -> None:
        """Tells the others, as soon as there are some, that this process watches."""
        if not self._name and dist.world() > 1:
            self._name = f"monitor {dist.ordinal('monitor')}"
            leave_word(f"{self._name} watches", "yes")

    @property
    def several(self) -> bool:
        """Returns whether other processes take part."""
        return not self._alone and not self.over and dist.world() > 1

    @property
    def waited_for(self) -> bool:
        """Returns whether others will wait for this process at the next measured step."""
        return self.several and self.members is not None

    @property
    def records_jointly(self) -> bool:
        """Returns whether what is recorded is of several processes."""
        return self.several and not self.records_alone

    def begin(self, model: str, *, gathers: bool) -> bool:
        """Called in the first pass of a model that is to be measured, before anything is done that takes all
        processes. Returns whether it is measured: none of this step is where another process was late to it.

        gathers: a pass of the model is something that all processes do.

        Raises: InvalidValueError if the monitor of another process has switched itself off before it.
        """
        self._introduced.stages[model] = running_stage()
        if self._late:
            return False
        if gathers:
            late = not self._all_come()
            self._late = late and not self.records_alone
            return not late
        if not self.records_alone:
            self.all_watch()
        return True

    def about(self) -> dict[str, object]:
        """The description of the whole model, where several processes have parts of it."""
        return {} if self.members is None else self.members.about()

    def stay_alone(self, why: str) -> None:
        """Measure this process's part only."""
        self._alone = True
        caution(f"{why}: what is recorded is what this process sees")

    def all_watch(self) -> bool:
        """Returns whether all processes watch the model; waits at most 8 seconds for them, once."""
        if self._unmet():
            self._hear("watches", PATIENCE)
        return self.several

    def _unmet(self) -> bool:
        """Returns whether other processes may take part, of which it is not known whether all watch the model."""
        self.here()
        if self.several and self._apart():
            self.stay_alone(self._apart())
        return self.several and not self._watching

    def _all_come(self) -> bool:
        """Returns False where a process is 8 seconds late to the first pass that waits for all of them. The model waits
        for it in that pass: if it has not come until the next one, it does not watch."""
        if not self._unmet():
            return True
        if not self._passes:
            self._passes = 1
            self._hear("pass 0", PATIENCE, again=True)
            return self._watching
        self._hear("pass 1", PATIENCE if left_by_all(f"{self._name} pass 0") else 0.01)
        return True

    def _hear(self, at: str, patience: float, *, again: bool = False) -> None:
        """Waits for a word of all processes; without one this process stays alone, unless it is to try again."""
        words = words_under(f"{self._name} {at}", "yes", patience)
        if words is not None and _OFF in words:
            self.over = True
            raise InvalidValueError(_GONE)
        self._watching = words is not None
        if words is None and again:
            caution(
                f"another process of this run has not come to the first measured pass within {patience:g} seconds: "
                "this step is not measured, and the next one is if that process watches the model too"
            )
        elif words is None:
            self.stay_alone("not every process of this run watches the model")

    def send(self, measured: Measurement | None, *, alone: bool) -> Transfer | None:
        """Starts the gather of a step; None says that this process, or as the answer every process, has no numbers.

        alone: only this process records the step.

        Raises: InvalidValueError if the processes can't be merged.
        """
        if self._late and not alone:
            self._late = False
            return None
        if not alone and self.all_watch() and self.members is None:
            self._meet(measured)
        members = self.members
        if alone or not self.several or members is None:
            return None if measured is None else Transfer.alone(measured)
        if measured is None:
            return self._gather(word(Flag.NOTHING, self._form), members)
        if measured.form() != members.own_form:
            self.leave(known=False)
            raise InvalidValueError(
                "what this process measures is not what it measured at first, as with layers that run in some steps "
                "only, so the processes of this run can't be merged"
            )
        return self._gather(measured.pack(dist.collective_device()), members)

    def placed(self, stats: Stats) -> Stats:
        """Statistics of this process alone, by the names and heads of the whole model once these are known."""
        return stats if self.members is None else self.members.placed(stats)

    def leave(self, *, known: bool) -> None:
        """Reports to the others that this process has switched itself off; they do the same.

        known: another process has reported the same of itself, so that nobody waits.
        """
        self.over = True
        if known or not dist.world() > 1 or not self._name:
            return
        if self.members is None:
            for at in (self._round(), f"{self._name} pass {self._passes}"):
                leave_word(at, _OFF)
        else:
            self._gather(word(Flag.OFF, self._form), self.members)

    def _gather(self, packed: Tensor, members: Members) -> Transfer:
        self.gathers += 1
        gather = functools.partial(self._step_gather.gather, self._name)
        return Transfer(packed, members.forms, members.merge, gather)

    def _meet(self, measured: Measurement | None) -> None:
        self._form = () if measured is None else measured.form()
        place, text = self._introduced(self._form).words()
        print_of = str(zlib.crc32(text.encode()))
        publish(f"{self._name} {print_of}", text)
        nothing, count = "" if self._form else _NOTHING, self._step_gather.count
        words = words_under(self._round(), f"{nothing}|{count}|{print_of}|{place}", LONGEST)
        self._rounds += 1
        if words is None:
            self.stay_alone("not every process of this run came to the end of its first measured step")
            return
        if _OFF in words:
            self.over = True
            raise InvalidValueError(_GONE)
        said = [one.split("|", 3) for one in words]
        if all(nothing for nothing, *_ in said):
            if self.unseen is not None:
                self.over = True
                raise self.unseen
            return
        texts = {of: published(f"{self._name} {of}") for of in {of for *_, of, _ in said}}
        try:
            self.members = Members([Member.of(place, texts[of]) for *_, of, place in said], dist.rank())
        except InvalidValueError:
            self.over = True
            raise
        self._form = self.members.own_form
        self._step_gather.agree(self._name, {count for _, count, *_ in said})

    def _round(self) -> str:
        return f"{self._name} round {self._rounds}"
