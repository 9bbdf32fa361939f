"""The numbers of steps that are on their way from the device and the other processes."""

from __future__ import annotations

import dataclasses
from typing import final

from torch import Tensor

from qkeel.errors import caution
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.processes.transfer import Flag, Measurement, Stats, Transfer, merged
from qkeel.monitor.record.journal import Journal
from qkeel.sites.tap import Phase

_UNREAD = 16  # steps whose statistics wait to be merged, if anybody reads them


@final
class Arrivals:
    """Puts the numbers of each step on record when they have arrived, in the order of the steps. The statistics are
    also kept, merged, until they are read.
    """

    def __init__(self, group: ProcessGroup, journal: Journal) -> None:
        self._group, self._journal = group, journal
        self._coming: list[_Coming] = []
        self._unread: dict[Phase, list[Stats]] = {"train": [], "eval": []}
        self._said = False

    def add(self, step: int, phase: Phase, transfer: Transfer, *, unread: Stats | None) -> None:
        """One more step; unread: what of its statistics nobody has read, None for all that arrive."""
        self._coming.append(_Coming(step=step, phase=phase, transfer=transfer, unread=unread))

    @property
    def flagged(self) -> bool:
        """Returns whether another process has said, in a gather that is under way, that it has switched itself off."""
        return any(one.transfer.flagged(Flag.OFF) for one in self._coming)

    def settle(self, *, wait: bool, before: int = 0) -> None:
        """Puts on record what has arrived, and waits for the steps before `before`; with `wait` for everything.

        Raises: InvalidValueError if another process has stopped measuring.
        """
        while self._coming and (wait or self._coming[0].step < before or self._coming[0].transfer.arrived):
            one = self._coming.pop(0)
            if one.transfer.flagged(Flag.OFF):
                self._group.over = True
            measured = one.transfer.result()
            self._say_unknown(measured)
            unread = measured.stats if one.unread is None else one.unread
            waiting = self._unread[one.phase]
            if unread:
                waiting.append(unread)
            if len(waiting) > _UNREAD:
                waiting[:] = [merged(waiting)]
            if measured.stats:
                self._journal.add(one.step, one.phase, measured)

    def _say_unknown(self, measured: Measurement) -> None:
        """Says once of which sites a number is not measured since no process holds all rows of a head."""
        if not self._group.several or self._said:
            return
        numbers = measured.numbers
        norms = {
            site: x for (site, name), x in numbers.items() if name == "query_weight_norm" and isinstance(x, Tensor)
        }
        unknown = []
        for site, norm in norms.items():
            largest = numbers.get((site, "qk_spectral_norm"))
            if isinstance(largest, Tensor) and bool((largest.isnan() & norm.isfinite()).any()):
                unknown.append(site)
        if unknown:
            self._said = True
            caution(
                "qk_spectral_norm is not measured of heads whose rows no process holds whole: nothing is gathered for "
                f"a number. Weights are split through heads of {', '.join(unknown)}"
            )

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of recorded steps that nobody has read."""
        return bool(self._unread[phase])

    def take(self, phase: Phase) -> Stats:
        """Those statistics, once."""
        found, self._unread[phase] = self._unread[phase], []
        return merged(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A step whose numbers are on their way."""

    step: int
    phase: Phase
    transfer: Transfer
    unread: Stats | None
