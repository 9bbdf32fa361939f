"""SEE: the monitor of a training run, what it records, and the rules that raise alarms based on the records.

The files in the order in which a number passes through them:

    watch, monitor      `qkeel.watch`; what happens at the end of each step and of the run
    cadence             which steps are measured
    watched_sites       the attention sites, found in the first measured pass; first_look: what its queries see
    measure             a step's measurements: call_statistics, token_classes, weight_norms, hidden_states, logit_changes,
                        sparse_attention, finite_stages, kept_logits; numbers: those beside the calls'
    step_vector         the numbers of a step on their way to the host; processes: the exchange between processes
    recorder, history   the records as arrays, in bounded memory; sample: one step, and its table
    rules, forecast     conditions on records that raise an alarm; thresholds: each with its source
    alarms              which rules a run has, and which remedy an alarm recommends
    sinks               where records go, and the names of `--sink`
    nan_origin          what made the first NaN, from passes that are made again
"""

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
