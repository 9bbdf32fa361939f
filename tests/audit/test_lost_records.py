"""A run whose records of heads are lost is judged by what is left, and says so."""

import json

import pytest
from tests.contract.audit.test_check import run

import qkeel
from qkeel.metrics import Status


@pytest.mark.parametrize(
    ("logits", "alarms", "status"),
    [
        ([1.0, 7.0, 3.0], [], Status.HEALTHY),
        ([1.0, 1340.0], [], Status.NOT_HEALTHY),
        ([1.0, 863.0], [("alarm", 1)], Status.NOT_HEALTHY),
    ],
)
def test_lost_heads_are_said(logits, alarms, status, tmp_path):
    folder = run(tmp_path / "r", logits, alarms=alarms)
    rows = [{"step": i, "max_logit": logit} for i, logit in enumerate(logits)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "heads.json").unlink()
    found = qkeel.check(folder)
    assert found.status is status
    assert found.largest == max(logits)
    assert "heads.json is missing" in str(found)
