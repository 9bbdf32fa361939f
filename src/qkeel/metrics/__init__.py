"""Scalars of recorded runs and the interval of their differences; torch is not needed, so the report can use the same
functions."""

from qkeel.metrics.paired_effect import PairedEffect, Verdict, paired_effect
from qkeel.metrics.run_scalars import (
    ALARM_THRESHOLD,
    COLLAPSE_ENTROPY,
    HARMFUL_LOGIT,
    Row,
    alarm_step,
    collapsed,
    fused_logit_error,
    lr_sensitivity,
    slope,
    stored_logit_error,
)
from qkeel.metrics.verdict import LAYER_ENTROPY, Health, Status, judged, text_table

__all__ = [
    "ALARM_THRESHOLD",
    "COLLAPSE_ENTROPY",
    "HARMFUL_LOGIT",
    "Health",
    "LAYER_ENTROPY",
    "PairedEffect",
    "Row",
    "Status",
    "Verdict",
    "alarm_step",
    "collapsed",
    "fused_logit_error",
    "judged",
    "lr_sensitivity",
    "paired_effect",
    "slope",
    "stored_logit_error",
    "text_table",
]
