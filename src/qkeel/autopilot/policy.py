"""The interface of a policy: records in, decisions out."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, final

from qkeel.autopilot.decision import Action, Decision, Held, Refused, SiteFacts, in_force
from qkeel.monitor.alarms.history import History


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """All that a policy may know at one step: the records up to it, the sites, and what it has decided before.

    history: the merged samples of training, in order. sites: in the order of the layers of the history. missed:
    attentions that were seen but not understood. decisions: earlier ones. refused: actions that sites refused so far.
    """

    history: History
    sites: tuple[SiteFacts, ...]
    missed: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    refused: tuple[Refused, ...] = ()

    @property
    def step(self) -> int:
        """The step of the last record."""
        return int(self.history.steps[-1])

    @property
    def in_force(self) -> Held:
        """The action and its heads, by remedy and site."""
        return in_force(self.decisions, self.refused)

    def refuses(self, action: Action, site: str | None) -> str:
        """The reason why a site refuses an action, "" where it does not."""
        return next((r.reason for r in self.refused if r.action == action and r.site in (site, None)), "")


class Policy(abc.ABC):
    """A pure function of records. Subclasses are frozen dataclasses; their fields are the policy's options.

    `decide` sees the records up to one step and returns what is to be done then. It keeps nothing from call to call and
    knows neither model nor optimizer, so the same records lead to the same decisions live, in a replay, and in every
    process of a run.
    """

    name: ClassVar[str]
    line: ClassVar[str]

    __slots__ = ()

    @abc.abstractmethod
    def decide(self, records: Records) -> tuple[Decision, ...]:
        """The decisions of the step of the last record."""
