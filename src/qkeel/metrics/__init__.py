"""Scalars of recorded runs and the judgement of their differences; no torch, so the report reads the same numbers."""

from qkeel.metrics.bootstrap import bootstrap_interval
from qkeel.metrics.divergence import distance, divergence_rate
from qkeel.metrics.exact_interval import common_level, exact_interval, nominal
from qkeel.metrics.health import LAYER_ENTROPY, Health, Status, judged
from qkeel.metrics.logit_errors import FRACTION_BITS, fused_logit_error, stored_logit_error
from qkeel.metrics.paired_effect import PairedEffect, Verdict, paired_effect, paired_effects, planned_power
from qkeel.metrics.run_scalars import (
    ALARM_THRESHOLD,
    COLLAPSE_ENTROPY,
    HARMFUL_LOGIT,
    Row,
    alarm_step,
    collapsed,
    drift,
    growth_exponent,
    largest_stable_lr,
    lr_sensitivity,
    paired_gain,
    slope,
    spike_score,
)

__all__ = [
    "ALARM_THRESHOLD",
    "COLLAPSE_ENTROPY",
    "FRACTION_BITS",
    "HARMFUL_LOGIT",
    "Health",
    "LAYER_ENTROPY",
    "PairedEffect",
    "Row",
    "Status",
    "Verdict",
    "alarm_step",
    "bootstrap_interval",
    "collapsed",
    "common_level",
    "distance",
    "divergence_rate",
    "drift",
    "exact_interval",
    "fused_logit_error",
    "growth_exponent",
    "judged",
    "largest_stable_lr",
    "lr_sensitivity",
    "nominal",
    "paired_effect",
    "paired_effects",
    "paired_gain",
    "planned_power",
    "slope",
    "spike_score",
    "stored_logit_error",
]
