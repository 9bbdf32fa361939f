"""The options of a Monitor."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.metrics import ALARM_THRESHOLD
from qkeel.monitor.alarms.planned_rates import PlannedRates
from qkeel.monitor.alarms.rule import Rule
from qkeel.monitor.cadence import Cadence, Every
from qkeel.monitor.measure.call_statistics import Wanted
from qkeel.monitor.measure.query_mask import QueryMask
from qkeel.monitor.measure.token_classes import Classes
from qkeel.monitor.record.sinks import Sink
from qkeel.sites.example import Arguments


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a Monitor; see `qkeel.watch`. rules: None for those that fit what is seen."""

    cadence: Cadence = dataclasses.field(default_factory=Every)
    stats: Wanted = True
    sinks: tuple[Sink, ...] = ()
    rules: tuple[Rule, ...] | None = None
    query_mask: QueryMask | None = None
    classes: Classes | None = None
    probe: Arguments | None = None
    planned: PlannedRates | None = None
    threshold: float = ALARM_THRESHOLD
