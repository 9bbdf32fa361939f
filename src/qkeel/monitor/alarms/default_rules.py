"""The rules that every watched run is checked by; their numbers are in thresholds.py."""

from __future__ import annotations

from qkeel.monitor.alarms.rule import Rule, Severity
from qkeel.monitor.alarms.rules import Approach, Ceiling, EntropyCollapse, Growth, NonFinite, Outlook
from qkeel.monitor.alarms.thresholds import CLIPS, DIVERGES, HARMS, SOURCES

DEFAULT: tuple[Rule, ...] = (
    Ceiling(threshold=CLIPS, severity=Severity.NOTICE, source=SOURCES[CLIPS]),
    Ceiling(threshold=HARMS, source=SOURCES[HARMS]),
    Ceiling(threshold=DIVERGES, severity=Severity.CRITICAL, source=SOURCES[DIVERGES]),
    Growth(),
    Outlook(),
    Approach(threshold=HARMS, source=SOURCES[HARMS]),
    Approach(threshold=DIVERGES, severity=Severity.CRITICAL, source=SOURCES[DIVERGES]),
    EntropyCollapse(),
    NonFinite(),
)
