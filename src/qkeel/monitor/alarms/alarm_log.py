"""The alarms that a run has raised, live or replayed from its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from qkeel.monitor.alarms.history import History
from qkeel.monitor.alarms.recording import Recording
from qkeel.monitor.alarms.rule import Alarm, Rule
from qkeel.monitor.alarms.rules import DEFAULT


@final
class AlarmLog:
    """The alarms of `rules` that have gone off: each rule warns once."""

    def __init__(self, rules: Sequence[Rule] = DEFAULT) -> None:
        self.rules = tuple(rules)
        self.alarms: list[Alarm] = []

    def update(self, history: History) -> list[Alarm]:
        """The alarms that the last record raises for the first time."""
        said = {alarm.rule for alarm in self.alarms}
        fresh = [rule for rule in self.rules if rule.name not in said] if len(history) else []
        new = [alarm for rule in fresh if (alarm := rule.check(history)) is not None]
        self.alarms += new
        return new


def replay(history: History, rules: Sequence[Rule] = DEFAULT) -> list[Alarm]:
    """Every alarm of a run, in the order they would have been raised while it went on.

    >>> import numpy as np
    >>> [alarm.rule for alarm in replay(History(steps=np.arange(2), values={"train_loss": np.ones(2)}, heads={}))]
    []
    """
    log, recording = AlarmLog(rules), Recording(history.layers, planned=history.planned)
    for n in range(len(history)):
        values = {name: v[n] for name, v in history.values.items()} | {"step": history.steps[n]}
        recording.append(values, {name: v[n] for name, v in history.heads.items()})
        log.update(recording.history)
    return log.alarms
