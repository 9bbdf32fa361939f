"""SEE: who watches, and rules on what was recorded that say when to worry."""

from qkeel.monitor.alarms import DEFAULT, AlarmLog, Approach, Ceiling, EntropyCollapse, EntropyDrop, Growth, replay
from qkeel.monitor.forecast import Forecast, forecast
from qkeel.monitor.history import History
from qkeel.monitor.recording import Recording
from qkeel.monitor.rule import Alarm, Rule, Severity
from qkeel.monitor.setup_rules import GainGrowth, IdleNorm, Resolution

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
    "Recording",
    "Resolution",
    "Rule",
    "Severity",
    "forecast",
    "replay",
]
