"""The decisions of a policy record by record, and the effects that were seen: the same live and in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from qkeel.autopilot.decision import Action, Decision, Effect, Refused, SiteFacts
from qkeel.autopilot.policy import Policy, Records
from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.monitor.alarms.history import History

LATER = 5  # records after a decision at which its effect is looked at
_WITH_EFFECT = (Action.CLIP, Action.RATES, Action.NORM)


@final
class Deliberation:
    """Asks a policy at each record. What it keeps follows from the records and the refusals alone.

    Of sites whose weights are not confirmed, and of attention that was missed, the policy may know nothing but that.
    """

    def __init__(self, policy: Policy, sites: Sequence[SiteFacts], missed: Sequence[str] = ()) -> None:
        self.policy, self.sites, self.missed = policy, tuple(sites), tuple(missed)
        self.decisions: list[Decision] = []
        self.refused: list[Refused] = []
        self.seen = 0  # records
        # Numbers of the record at which, and of the decision whose effect is due.
        self.waiting: list[tuple[int, int]] = []

    def see(self, history: History) -> tuple[list[Decision], list[Effect]]:
        """The decisions of the last record, and the effects that are seen in it.

        Raises: InvalidValueError, InvalidTypeError if the policy returns what is no decision for these sites and step.
        """
        self.seen += 1
        due = [number for at, number in self.waiting if at <= self.seen]
        self.waiting = [one for one in self.waiting if one[0] > self.seen]
        effects = [self._effect(self.decisions[number], history) for number in due]
        known = Records(
            history=history,
            sites=self.sites,
            missed=self.missed,
            decisions=tuple(self.decisions),
            refused=tuple(self.refused),
        )
        found = list(self.policy.decide(known))
        for one in found:
            self._check(one, known)
        for one in found:
            if one.action in _WITH_EFFECT and not one.release:
                self.waiting.append((self.seen + LATER, len(self.decisions)))
            self.decisions.append(one)
        return found, effects

    def refuse(self, refused: Refused) -> None:
        """A site has refused an action; of a decision that came to nothing no effect is awaited."""
        self.refused.append(refused)
        same = (refused.step, refused.action, refused.site)
        self.waiting = [
            (at, number)
            for at, number in self.waiting
            if (self.decisions[number].step, self.decisions[number].action, self.decisions[number].site) != same
        ]

    def _check(self, one: Decision, known: Records) -> None:
        if not isinstance(one, Decision):
            raise InvalidTypeError(f"expected decisions from the policy, got {type(one).__name__}")
        site = next((site for site in self.sites if site.name == one.site), None)
        if one.step != known.step or (one.site is not None and site is None):
            raise InvalidValueError(
                f"expected a decision for step {known.step} and one of the sites, got step {one.step} and {one.site!r}"
            )
        if site is not None and site.unknown and one.action is not Action.NONE:
            raise InvalidValueError(f"{one.action} at {one.site}, whose weights are not confirmed: {site.unknown}")
        if site is not None and one.heads and max(one.heads) >= site.n_heads:
            raise InvalidValueError(f"{one.site} has {site.n_heads} heads, and the policy names {max(one.heads)}")

    def _effect(self, one: Decision, history: History) -> Effect:
        series = history.series("max_logit")
        assert series is not None
        rows = [i for i, site in enumerate(self.sites) if one.site in (None, site.name)]
        own = np.asarray(series, dtype=np.float64)[:, rows]
        own = own[:, :, list(one.heads)] if one.heads else own
        then = int(np.searchsorted(history.steps, one.step, side="right")) - 1
        tops = [float(np.fmax.reduce(own[k].ravel(), initial=np.nan)) for k in (max(then, 0), -1)]
        return Effect(
            step=int(history.steps[-1]),
            of_step=one.step,
            action=one.action,
            site=one.site,
            heads=one.heads,
            before=tops[0],
            after=tops[1],
            expected=one.expected,
        )
