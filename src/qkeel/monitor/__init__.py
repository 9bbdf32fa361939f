"""SEE: who watches, and rules on what was recorded that say when to worry."""

from qkeel.monitor.alarms import (
    DEFAULT,
    AlarmLog,
    Approach,
    Ceiling,
    EntropyCollapse,
    EntropyDrop,
    Growth,
    Outlook,
    replay,
)
from qkeel.monitor.forecast import Forecast, forecast
from qkeel.monitor.history import History
from qkeel.monitor.plan import Plan
from qkeel.monitor.recording import Recording
from qkeel.monitor.rule import Alarm, Rule, Severity
from qkeel.monitor.setup_rules import GainGrowth, IdleNorm, Resolution, Setting, VanishingGradient, rules_for

__all__ = [
    "DEFAULT",
    "Alarm",
    "AlarmLog",
    "Approach",
    "Ceiling",
    "EntropyCollapse",
    "EntropyDrop",
    "Forecast",
    "GainGrowth",
    "Growth",
    "History",
    "IdleNorm",
    "Outlook",
    "Plan",
    "Recording",
    "Resolution",
    "Rule",
    "Setting",
    "Severity",
    "VanishingGradient",
    "forecast",
    "replay",
    "rules_for",
]
