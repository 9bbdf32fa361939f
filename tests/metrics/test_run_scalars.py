"""Scalars of runs, against hand-worked numbers."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st

from qkeel.metrics import Status, alarm_step, collapsed
from qkeel.metrics.run_scalars import slope, stored_logit_error
from qkeel.metrics.verdict import judged

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
def test_collapse_is_low_entropy_or_no_progress(entropy, loss, expected):
    assert collapsed(entropy, loss, init_loss=5.0) is expected


def test_the_alarm_fires_at_the_first_step_above_the_threshold():
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


def test_the_error_of_a_stored_logit_is_its_spacing_over_the_root_of_twelve():
    root = math.sqrt(12)
    for dtype, bits in (("fp8", 3), ("bf16", 7), ("fp16", 10), ("fp32", 23)):
        # 100 lies between 64 and 128.
        assert stored_logit_error(-100.0, dtype) == 2.0 ** (6 - bits) / root
    assert stored_logit_error(0.0, "bf16") == 0.0
    assert stored_logit_error(math.inf, "bf16") == math.inf


def test_no_slope_goes_through_points_of_one_x():
    assert slope(np.array([0.0, 2.0]), np.array([1.0, 2.0])) == 0.5
    assert math.isnan(slope(np.array([1.0, 1.0]), np.array([1.0, 2.0])))


def test_an_alarm_decides_and_its_cause_step_and_head_are_said():
    alarm = {"step": 1200, "layer": "h.1", "head": 0, "meaning": "1,500 nats"}
    status, sentence = judged(1500.0, alarms=[{**alarm, "cause": "weights broke"}])
    assert status is Status.NOT_HEALTHY
    assert "weights broke since step 1,200: 1,500 nats, h.1 head 0;" in sentence
    assert "grown too large since step 1,200" in judged(1500.0, alarms=[alarm])[1]
    assert judged(50.0, alarms=[alarm], threshold=100.0)[0] is Status.HEALTHY
