"""What a Monitor is to do."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.metrics import ALARM_THRESHOLD
from qkeel.monitor.cadence import Cadence, Every
from qkeel.monitor.classes import Classes
from qkeel.monitor.measuring import Wanted
from qkeel.monitor.planned import PlannedRates
from qkeel.monitor.queries import QueryMask
from qkeel.monitor.rule import Rule
from qkeel.monitor.sinks import Sink
from qkeel.sites.example import Arguments


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a Monitor is to do; see `qkeel.watch`. rules: None for those that fit what is seen."""

    cadence: Cadence = dataclasses.field(default_factory=Every)
    stats: Wanted = True
    sinks: tuple[Sink, ...] = ()
    rules: tuple[Rule, ...] | None = None
    query_mask: QueryMask | None = None
    classes: Classes | None = None
    probe: Arguments | None = None
    planned: PlannedRates | None = None
    threshold: float = ALARM_THRESHOLD
