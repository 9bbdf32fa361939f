"""The judgement of what a step adds to the weights, on courses made up by hand and on the committed table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from experiments.predictions import step_spectra as study


def row(ahead: list[float], **more: Any) -> dict[str, Any]:
    return {"ahead": ahead, "steps": [2 * i for i in range(len(ahead))], **more}


def test_the_threshold_is_the_lowest_with_few_false_alarms() -> None:
    healthy = [row([1.0, float(top)]) for top in range(40)]
    wrong = [row([1.0, 500.0])]
    found = study.chosen([*healthy, *wrong], [False] * 40 + [True])
    assert found == 37.0  # two of forty are over it: 5 %
    assert sum(study.fires(one, found) is not None for one in healthy) == 2
    assert study.fires(wrong[0], found) == 2


def test_a_run_is_wrong_where_its_loss_stays_behind_or_it_collapsed() -> None:
    reference = {"losses": {str(s): 2.0 for s in range(0, 50, 5)}, "collapsed": False}
    behind = {"losses": {str(s): 2.0 + 0.2 * (s > 20) for s in range(0, 50, 5)}, "collapsed": False}
    assert study.is_wrong(behind, reference)
    assert not study.is_wrong(reference, reference)
    assert study.is_wrong({**reference, "collapsed": True}, reference)


def test_the_stored_rows_give_the_stored_verdicts() -> None:
    verdicts = study.judge(study.stored_rows())
    stored = json.loads(study.TABLE.read_text(encoding="utf-8"))["verdicts"]
    assert verdicts["lead"] == pytest.approx(stored["lead"])
    assert [verdict for *_, verdict in study.verdicts(verdicts)] == ["refuted", "refuted", "refuted", "refuted", "held"]
