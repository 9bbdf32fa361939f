"""SEE: the monitor of a training run, what it records, and the rules that raise alarms on the records."""

from qkeel.dist.layout import Layout
from qkeel.monitor.alarms.forecast import Forecast, PlannedRates, forecast
from qkeel.monitor.alarms.history import History
from qkeel.monitor.alarms.recording import AlarmLog, Recording, replay
from qkeel.monitor.alarms.rule import Alarm, Rule, Severity
from qkeel.monitor.alarms.rules import (
    DEFAULT,
    Approach,
    Ceiling,
    EntropyCollapse,
    Growth,
    NonFinite,
    Outlook,
)
from qkeel.monitor.alarms.setup_rules import GainGrowth, IdleNorm, Resolution, Setting, VanishingGradient, rules_for
from qkeel.monitor.cadence import Adaptive, Cadence, Every, LogSpaced
from qkeel.monitor.measure.token_classes import Classes
from qkeel.monitor.record.sample import Sample, pad_layers, repeat_groups
from qkeel.monitor.record.sample_table import sample_html, sample_line, sample_table
from qkeel.monitor.record.sinks import LoggingSink, RunDirectorySink, Sink

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
    "Every",
    "Forecast",
    "GainGrowth",
    "Growth",
    "History",
    "IdleNorm",
    "Layout",
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
