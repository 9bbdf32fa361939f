"""Scalars of runs, against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st

from qkeel.metrics import alarm_step, collapsed, spike_score

LOSSES = st.lists(st.floats(0.1, 20), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("entropy", "loss", "expected"),
    [
        (1.0, 3.0, False),
        (0.1, 3.0, False),
        (0.0999, 3.0, True),
        (math.nan, 3.0, True),
        (1.0, 5.0, True),
        (1.0, 4.9999, False),
        (1.0, math.nan, True),
        (1.0, math.inf, True),
    ],
)
def test_collapse_is_low_entropy_or_no_progress(
    entropy: float, loss: float, expected: bool
) -> None:
    assert collapsed(entropy, loss, init_loss=5.0) is expected


def test_the_alarm_fires_at_the_first_step_above_the_threshold() -> None:
    records = [
        {"step": s, "max_logit": x}
        for s, x in ((0, 5.0), (10, 100.0), (20, 100.5), (30, 90.0))
    ]
    assert alarm_step(records) == 20
    assert alarm_step(records, 4.0) == 0
    assert alarm_step(records, 1e9) is None
    assert alarm_step([]) is None
    assert alarm_step([{"step": 7, "max_logit": math.nan}]) == 7
    assert alarm_step([{"step": 1}, {"step": 2, "max_logit": 3.0}], 1.0) == 2


def test_spikes_are_far_above_the_window_before() -> None:
    calm = [1.0, 1.1] * 10
    assert spike_score(calm) == 0
    assert spike_score([*calm, 9.0]) == pytest.approx(1 / 21)
    assert spike_score([*calm, -9.0]) == 0
    assert spike_score([*calm, math.nan]) == pytest.approx(1 / 21)
    assert spike_score([*calm, math.inf]) == pytest.approx(1 / 21)
    assert spike_score([9.0, *calm]) == 0  # the first window is never judged
    assert spike_score([]) == 0
