"""SEE: who watches, and rules on what was recorded that say when to worry."""

from qkeel.monitor.alarms import DEFAULT, AlarmLog, Approach, Ceiling, EntropyCollapse, EntropyDrop, Growth, replay
from qkeel.monitor.cadence import Adaptive, Cadence, Every, LogSpaced
from qkeel.monitor.forecast import Forecast, forecast
from qkeel.monitor.history import History
from qkeel.monitor.recording import Recording
from qkeel.monitor.rule import Alarm, Rule, Severity
from qkeel.monitor.sample import Sample, fold_heads, pad_layers, repeat_groups
from qkeel.monitor.setup_rules import GainGrowth, IdleNorm, Resolution
from qkeel.monitor.sinks import LoggingSink, RunDirectorySink, Sink
from qkeel.monitor.table import sample_html, sample_line, sample_table

__all__ = [
    "LogSpaced",
    "Every",
    "Cadence",
    "Adaptive",
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
    "LoggingSink",
    "Recording",
    "Resolution",
    "Rule",
    "RunDirectorySink",
    "Sample",
    "Severity",
    "Sink",
    "fold_heads",
    "forecast",
    "pad_layers",
    "repeat_groups",
    "replay",
    "sample_html",
    "sample_line",
    "sample_table",
]
