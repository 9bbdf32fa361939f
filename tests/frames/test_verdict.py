"""The verdict on a run, from the logits of all its records."""

import numpy as np
import pytest

from qkeel.frames.run_verdict import judge_run
from qkeel.metrics import Status
from qkeel.records.file_formats import Heads

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


def test_a_run_without_a_number_is_not_known():
    health = judge_run(heads([np.nan, np.nan]), [])
    assert health.status is not Status.HEALTHY
    assert np.isnan(health.largest)
