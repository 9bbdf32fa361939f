"""The page of a run that had an autopilot: what it did, why, and what came of it."""

from __future__ import annotations

from pathlib import Path

from tests.autopilot.runs import run

from qkeel.report import write


def test_the_page_shows_interventions_with_reasons(tmp_path: Path) -> None:
    within = run(sinks=tmp_path / "run").train()
    within.pilot.close()
    write([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    decision = next(d for d in within.pilot.decisions if d.action == "qk_clip")
    assert "What the autopilot did" in page
    assert decision.reason in page
    assert '"interventions":[{"step":2,' in page.replace(", ", ",").replace(": ", ":")
