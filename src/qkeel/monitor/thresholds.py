"""The thresholds of alarms, and where each comes from. Logits and entropies are in nats.

Those that the report needs too are numbers of `metrics.run_scalars`.
"""

from __future__ import annotations

from qkeel.metrics import ALARM_THRESHOLD, HARMFUL_LOGIT, LAYER_ENTROPY

CLIPS = ALARM_THRESHOLD
HARMS = HARMFUL_LOGIT
DIVERGES = 1e4
SOURCES = {
    CLIPS: "Kimi K2, arXiv 2507.20534, section 2.1: the threshold of QK-Clip",
    HARMS: "Wortsman et al. 2023, arXiv 2309.14322: with transplanted logits of 1e3 the loss degrades",
    DIVERGES: "Wortsman et al. 2023, arXiv 2309.14322: every run with a max logit over 1e4 diverged",
}

# Chosen on the tuning seeds of experiments/notes/alarms.md, and measured on other seeds.
GROWTH_FLOOR, GROWTH_FACTOR = ALARM_THRESHOLD, 3.0
APPROACH_FLOOR = 30.0
# Times the training so far.
HORIZON = 4.0
OUTLOOK, OUTLOOK_FLOOR, OUTLOOK_FACTOR = 500.0, 8.0, 2.0
ENTROPY = LAYER_ENTROPY

# Nats by which rounding changes the logits of the top keys.
ROUNDING = 0.25
