"""SEE: the monitor of a training run, what it records, and the rules that raise alarms based on the records."""

from qkeel.distributed.layout import Layout
from qkeel.monitor.alarms import (
    AlarmLog,
    Resolution,
    Setting,
    replay,
    rules_for,
)
from qkeel.monitor.cadence import Adaptive, Cadence, Every, LogSpaced
from qkeel.monitor.forecast import Forecast, PlannedRates, forecast
from qkeel.monitor.history import History, Recording
from qkeel.monitor.rules import (
    DEFAULT,
    Alarm,
    Approach,
    Ceiling,
    EntropyCollapse,
    Growth,
    NonFinite,
    Outlook,
    Over,
    Rule,
    Saturation,
    Severity,
)
from qkeel.monitor.sample import Sample, sample_line, sample_table
from qkeel.monitor.sinks import LoggingSink, RunDirectorySink, Sink
from qkeel.monitor.token_classes import Classes

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
    "Growth",
    "History",
    "Layout",
    "LogSpaced",
    "LoggingSink",
    "NonFinite",
    "Outlook",
    "Over",
    "PlannedRates",
    "Recording",
    "Resolution",
    "Rule",
    "Saturation",
    "RunDirectorySink",
    "Sample",
    "Setting",
    "Severity",
    "Sink",
    "forecast",
    "replay",
    "rules_for",
    "sample_line",
    "sample_table",
]
