"""The processes of a run measuring as one: one packed gather per measured step, and no process waits for ever."""

from __future__ import annotations

import zlib
from typing import final

from qkeel import dist
from qkeel.errors import InvalidValueError, caution
from qkeel.monitor.processes.transfer import Flag, Layout, Measurement, Transfer

PATIENCE = 30.0  # seconds, once: how much later than the others a process may come to its first measured step


@final
class ProcessGroup:
    """The processes of a run that measure as one, as one of them sees it.

    Before the first gather the processes agree that all watch and what they will send, since a gather of unlike sizes,
    or without one of them, never ends. Later a process that stops says so in the gather that the others wait in.
    """

    def __init__(self) -> None:
        self.stopped = False  # this process measures no more, and the others may not know it yet
        self.over = False  # all processes know that it is over
        self._alone = False
        self._name = ""
        self._layout: Layout | None = None

    @property
    def several(self) -> bool:
        """Returns whether other processes take part."""
        return not self._alone and not self.over and dist.world() > 1

    def stay_alone(self, why: str) -> None:
        """Measure this process's part only."""
        self._alone = True
        caution(f"{why}: what is recorded is what this process sees")

    def send(self, step: int, measured: Measurement | None, *, alone: bool) -> Transfer | None:
        """Starts the gather of a step; None says that this process, or as the answer every process, has no numbers.

        alone: only this process records the step.

        Raises: InvalidValueError if the processes can't be merged.
        """
        if self.several and not alone and self._layout is None:
            self._meet(step, measured)
        if alone or not self.several or self._layout is None:
            return None if measured is None else Transfer.of(measured, alone=True)
        if measured is None:
            return Transfer.say(Flag.NOTHING, self._layout)
        if measured.layout() != self._layout:
            self.leave(step, known=False)
            raise InvalidValueError(
                "what this process measures is not what it measured at first, as with layers that run in some steps "
                "only, so the processes of this run can't be merged"
            )
        return Transfer.of(measured, alone=False)

    def leave(self, step: int, *, known: bool) -> None:
        """Reports to the others that this process has switched itself off; they do the same.

        known: another process has reported the same of itself, so that nobody waits.
        """
        self.over = True
        if known:
            return
        if self._layout is None:
            dist.agree(self._round(step), "off", PATIENCE)
        else:
            Transfer.say(Flag.OFF, self._layout)

    def _meet(self, step: int, measured: Measurement | None) -> None:
        layout = None if measured is None else measured.layout()
        word = "nothing" if layout is None else str(zlib.crc32(repr(layout).encode()))
        verdict = dist.agree(self._round(step), word, PATIENCE)
        if verdict == "together":
            self._layout = layout
        elif verdict == "alone":
            self.stay_alone("not every process of this run watches the model")
        else:
            self.over = True
            raise InvalidValueError(
                "the processes of this run do not see the same attention, or the monitor of another process has "
                "switched itself off, so nothing can be merged"
            )

    def _round(self, step: int) -> str:
        self._name = self._name or f"monitor {dist.ordinal('monitor')}"
        return f"{self._name} step {step}"
