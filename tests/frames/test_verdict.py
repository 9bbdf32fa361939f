"""The verdict on a run, from the logits of all its records."""

import numpy as np
import pytest

from qkeel.frames.run_verdict import judge_run
from qkeel.metrics import Status
from qkeel.records import OVER
from qkeel.records.file_formats import Heads
from qkeel.records.recorded_fields import NON_FINITE

MENDED = [{"event": "decision", "remedy": "qk_clip"}]


def heads(*records):
    """Records of one layer with two heads."""
    logits = np.array([[record] for record in records])
    return Heads(
        steps=np.arange(len(records)), values={"max_logit": logits}, layers=("a",)
    )


@pytest.mark.parametrize(
    ("last", "largest"),
    [([5.0, 7.0], 7.0), ([5.0, 200.0], 2000.0)],
)
def test_only_an_autopilot_that_has_mended_every_head_is_judged_by_the_last_record(
    last, largest
):
    run = heads([2000.0, 1.0], last)
    assert judge_run(run, MENDED).largest == largest
    assert judge_run(run, []).largest == 2000.0


@pytest.mark.parametrize(
    ("last", "over", "status"),
    [
        (50.0, ["forecast 1000"], Status.HEALTHY),
        (50.0, [], Status.NOT_HEALTHY),
        (50.0, ["growth"], Status.NOT_HEALTHY),
        (200.0, ["forecast 1000"], Status.HEALTHY),
        (1200.0, ["forecast 1000"], Status.NOT_HEALTHY),
    ],
)
def test_a_forecast_that_was_taken_back_does_not_count(last, over, status):
    alarm = {"event": "alarm", "severity": "alarm", "rule": "forecast 1000", "step": 1}
    ends = [{"event": OVER, "rule": rule, "step": 2} for rule in over]
    run = heads([80.0, 1.0], [150.0, 1.0], [last, 1.0])
    assert judge_run(run, [alarm, *ends]).status is status


def test_a_forecast_that_is_made_again_counts():
    alarm = {"event": "alarm", "severity": "alarm", "rule": "forecast 1000", "step": 1}
    end = {"event": OVER, "rule": "forecast 1000", "step": 2}
    run = heads([80.0, 1.0], [20.0, 1.0], [600.0, 1.0])
    assert judge_run(run, [alarm, end]).healthy
    assert not judge_run(run, [alarm, end, {**alarm, "step": 3}]).healthy


def test_a_run_without_a_number_is_not_known():
    health = judge_run(heads([np.nan, np.nan]), [])
    assert health.status is not Status.HEALTHY
    assert np.isnan(health.largest)


def test_gaps_between_records_and_layers_without_a_name_are_said():
    values = {"max_logit": np.array([[[1.0, 2], [1, 5]], [[1.0, 2], [3, 1]]])}
    sparse, dense = (Heads(np.array([4, last]), values) for last in (6, 5))
    assert "(layer 1 head 1, step 4, the largest of 2 measured)" in str(
        judge_run(sparse, [])
    )
    assert "of 2 measured" not in str(judge_run(dense, []))
    values[NON_FINITE] = np.array([[[0.0, 0]] * 2, [[0.0, 0], [0, 1]]])
    values["entropy"] = np.array([[[1.0, 1]] * 2, [[2.0, 3.0], [0.5, 0.5]]])
    broken = judge_run(sparse, [])
    assert broken.status is Status.NOT_HEALTHY
    assert "NaN or infinite in layer 1" in str(broken)
    rows = ("layer 0", "2", "2", "2.5"), ("layer 1", "5", "3", "0.5")
    assert broken.rows == rows
