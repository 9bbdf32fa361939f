"""The page of a run that had an autopilot: what it did, why, and what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.autopilot.runs import run

from qkeel.cli.app import main
from qkeel.report import write


def test_the_page_and_the_command_show_interventions_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    within = run(sinks=tmp_path / "run").train()
    within.pilot.close()
    write([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    decision = next(d for d in within.pilot.decisions if d.action == "qk_clip")
    assert "What the autopilot did" in page
    assert decision.reason in page
    assert '"interventions":[{"step":2,' in page.replace(", ", ",").replace(": ", ":")
    assert "the max logit went from" in page
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run"), "--policy", within.pilot.spec]) == 0
    said = capsys.readouterr().out
    assert all(str(d) in said for d in within.pilot.decisions)
    assert main(["replay", str(tmp_path / "run"), "--policy", "lader"]) == 2
    assert "Did you mean 'ladder'" in capsys.readouterr().err
