"""SEE: who watches, and rules on what was recorded that say when to worry."""

from qkeel.monitor.alarms import (
    DEFAULT,
    AlarmLog,
    Approach,
    Ceiling,
    EntropyCollapse,
    EntropyDrop,
    Growth,
    NonFinite,
    Outlook,
    replay,
)
from qkeel.monitor.cadence import Adaptive, Cadence, Every, LogSpaced
from qkeel.monitor.classes import Classes
from qkeel.monitor.forecast import Forecast, forecast
from qkeel.monitor.history import History
from qkeel.monitor.planned import PlannedRates
from qkeel.monitor.recording import Recording
from qkeel.monitor.rule import Alarm, Rule, Severity
from qkeel.monitor.sample import Sample, pad_layers, repeat_groups
from qkeel.monitor.setup_rules import GainGrowth, IdleNorm, Resolution, Setting, VanishingGradient, rules_for
from qkeel.monitor.sinks import LoggingSink, RunDirectorySink, Sink
from qkeel.monitor.table import sample_html, sample_line, sample_table

__all__ = [
    "Adaptive",
    "Alarm",
    "AlarmLog",
    "Approach",
    "Cadence",
    "Ceiling",
    "Classes",
    "DEFAULT",
    "EntropyCollapse",
    "EntropyDrop",
    "Every",
    "Forecast",
    "GainGrowth",
    "Growth",
    "History",
    "IdleNorm",
    "LogSpaced",
    "LoggingSink",
    "NonFinite",
    "Outlook",
    "PlannedRates",
    "Recording",
    "Resolution",
    "Rule",
    "RunDirectorySink",
    "Sample",
    "Setting",
    "Severity",
    "Sink",
    "VanishingGradient",
    "forecast",
    "pad_layers",
    "repeat_groups",
    "replay",
    "rules_for",
    "sample_html",
    "sample_line",
    "sample_table",
]
