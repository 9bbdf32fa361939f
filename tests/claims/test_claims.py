"""The claims as code: the page is what the committed results say, and verdicts follow from numbers."""

from __future__ import annotations

import math

import pytest
from claims.__main__ import _columns, main
from claims.judge import HERE, PAGE, differences, judge, page
from claims.table import CLAIMS, STUDIES, Cell, Claim, sensitivity

from qkeel.lab import Grid
from qkeel.lab.studies import find_study
from qkeel.records import read_json
from qkeel.remedies import canonical


def test_the_page_says_what_the_committed_results_say() -> None:
    file = HERE / "results.json"
    assert page(read_json(file) if file.exists() else {}) == PAGE.read_text(encoding="utf-8"), "run make claims"


def test_every_claim_reads_runs_that_its_study_makes() -> None:
    assert {claim.study for claim in CLAIMS} == set(STUDIES)
    for claim in CLAIMS:
        study, axes = STUDIES[claim.study]
        grid = find_study(study).grid if axes is None else Grid(**{"seeds": [0], **axes})
        for cell in (side for side in (claim.left, claim.right) if isinstance(side, Cell)):
            remedy = cell.where.get("remedy", "none")
            assert canonical(str(remedy)) == remedy, "tables have remedies in their one spelling"
            assert cell.where.get("remedy", cell.where.get("form")) in grid.remedies, claim.text
            assert cell.where.get("lr", grid.lrs[0]) in grid.lrs, claim.text
            assert cell.column in (*_columns(claim.study), "lr_sensitivity")


def rows(**by_remedy: tuple[float, ...]) -> list[dict[str, object]]:
    return [
        {"remedy": remedy, "lr": 0.1, "seed": seed, "val_loss": value, "max_logit": 100 * value, "init_loss": 5.0}
        for remedy, values in by_remedy.items()
        for seed, value in enumerate(values)
    ]


def claim(**more: object) -> Claim:
    sides = {name: Cell({"remedy": remedy, "lr": 0.1}, "val_loss") for name, remedy in (("left", "a"), ("right", "b"))}
    return Claim(**{"text": "t", "source": "s", "study": "micro", **sides, **more})  # type: ignore[arg-type]


def verdict(made: Claim, **by_remedy: tuple[float, ...]) -> str:
    (judged,) = judge({"micro": {"rows": rows(**by_remedy)}}, [made])
    return judged.verdict.split(",")[0].strip("*")


def test_verdicts_follow_from_the_interval_in_the_direction_of_the_claim() -> None:
    assert verdict(claim(), a=(2.5, 2.52, 2.51), b=(2.3, 2.31, 2.3)) == "reproduced"
    assert verdict(claim(), a=(2.3, 2.31, 2.3), b=(2.5, 2.52, 2.51)) == "contradicted"
    assert verdict(claim(), a=(2.5, 2.3, 2.4), b=(2.3, 2.5, 2.41)) == "undecided"
    near = {"a": (2.5, 2.501, 2.502), "b": (2.5, 2.502, 2.501)}
    assert verdict(claim(equal=True), **near) == "reproduced"
    assert verdict(claim(equal=True), a=(2.5, 2.52, 2.51), b=(2.3, 2.31, 2.3)) == "contradicted"
    assert verdict(claim(), a=(2.5,), b=(2.3,)) == "not run yet", "one seed decides nothing"
    assert verdict(claim(), a=(2.5, math.nan), b=(2.3, 2.3)) == "not run yet", "a loss of NaN is no number"
    top = Cell({"remedy": "a", "lr": 0.1}, "max_logit")
    assert differences(claim(left=top, right=100.0, ratio=True), rows(a=(1.0, math.e))) == pytest.approx([0.0, 1.0])


def test_sensitivity_is_that_of_the_seeds_with_every_rate() -> None:
    table = [{**row, "lr": lr, "val_loss": 2.0 + lr} for lr in (0.1, 0.3) for row in rows(a=(0.0, 0.0), b=(0.0, 0.0))]
    made = claim(left=sensitivity("a"), right=0.0)
    assert differences(made, table) == pytest.approx([0.1, 0.1])
    assert differences(made, table[:-3]) == pytest.approx([0.1])


def test_another_text_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("claims.__main__.CORPUS", "0" * 64)
    assert main(["--only", "micro", "--results", "r.json", "--page", "p.md"]) == 1
    assert "use CPython 3.11.7" in capsys.readouterr().err
