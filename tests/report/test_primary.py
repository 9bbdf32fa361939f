"""The page of a study that names its primary comparison: counts, then that comparison alone, then the rest, folded."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path

import pytest
from synthetic_study import FEW, REMEDIES, grid, make_study, planned

import qkeel.report
from qkeel.metrics import paired_effect, paired_gain, planned_power
from qkeel.report.study.collect import StudyData, collect
from qkeel.report.study.compare import MARGIN, gains, primary_gain, standings
from qkeel.report.study.findings import findings
from qkeel.report.study.provenance import advice


def text_of(markup: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", markup))).replace("\u00a0", " ")


def leads(study: StudyData) -> list[str]:
    return [found.text for found in findings(study) if found.kind == "lead"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the study that most tests read."""
    return planned(tmp_path_factory.mktemp("primary") / "study")


@pytest.fixture(scope="module")
def study(folder: Path) -> StudyData:
    return collect(folder)


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return qkeel.report.write(folder, folder.with_name("report.html")).read_text(encoding="utf-8")


def test_the_page_leads_with_counts_and_then_with_the_primary_comparison(html: str, study: StudyData) -> None:
    head = text_of(html[html.index("<h1>") : html.index("</header>")])
    said = [
        "At LR 0.1 attention collapsed in 8 of 8 runs with none; in 0 of 8 runs with qk_norm",
        "The largest attention logit of these runs was 18,000 with none, 42 with qk_norm",
        "Primary comparison, named before the runs: held-out loss of qk_norm against none at LR 0.1. "
        "qk_norm is better by 0.287 nats (+0.257 to +0.316, 8 seeds).",
        "Planned: 8 seeds. A true difference of 0.1 nats is shown to be beyond ±0.01 with a probability of 95 %, "
        "if the differences of pairs have a standard deviation of 0.06 (as on seeds 1000 to 1015).",
        "Every other comparison is secondary",
    ]
    places = [head.index(text) for text in said]
    assert places == sorted(places)
    assert [lead.split(" ")[0] for lead in leads(study)] == ["At", "The", "Primary"]


def test_the_rest_is_folded_and_no_verdict_is_drawn_from_it(html: str) -> None:
    counts = text_of(html[html.index('id="section-verdict"') : html.index('id="section-charts"')])
    assert "Collapsed at LR 0.1" in counts
    assert "8 of 8" in counts
    assert not re.search(r"better|worse|equal|undecided|Holm", counts)
    ranking = html[html.index('id="section-ranking"') : html.index('id="section-remedies"')]
    told, folded = ranking.split("<details>")
    assert "secondary: each has a separate, uncorrected 95 % interval" in text_of(told)
    assert folded.count("<table") == 1
    grey = re.findall(r'<td class="[^"]*faint[^"]*"[^>]*>([+−0-9.]+)', folded)
    assert len(grey) == 3 * (len(REMEDIES) - 1) - 1
    assert "+0.287" not in grey
    assert "Holm" not in text_of(html[html.index("<header") : html.index('id="section-definitions"')])


def test_the_primary_interval_is_the_one_of_its_own_differences_however_much_else_is_compared(
    tmp_path: Path, study: StudyData
) -> None:
    for one in (collect(planned(tmp_path / "few", ("none", "qk_norm"))), study):
        gain = primary_gain(one)
        assert gain is not None
        differences = paired_gain(one.rows(), "qk_norm", "none", 0.1)
        assert gain.effect == paired_effect(differences, MARGIN, 0.95)
        assert gain.effect is not None
        assert (gain.effect.n, gain.verdict, gain.secondary) == (8, "better", False)
    holm = {g.lr: g for g in gains(study.rows(), study.remedies) if g.remedy == "qk_norm"}[0.1]
    assert holm.effect is not None
    assert holm.effect.level > 0.95  # what the family would have made of it
    others = [g for line in standings(study) for g in line.gains.values() if g != gain]
    assert len(others) == 3 * (len(REMEDIES) - 1) - 1
    assert all(g.secondary and g.verdict == "undecided" and g.effect.level == 0.95 for g in others if g.effect)
    assert not any(g.praised for g in others)


@pytest.mark.parametrize(("seeds", "said"), [(1, "One seed is not enough to decide."), (3, ", 3 seeds).")])
def test_few_seeds_are_said(tmp_path: Path, seeds: int, said: str) -> None:
    assert said in leads(collect(planned(tmp_path / "study", seeds=seeds)))[-1]


def test_without_a_known_spread_no_power_is_stated(tmp_path: Path) -> None:
    study = collect(planned(tmp_path / "study", expected=None, spread=None, source=""))
    cautions = [found.text for found in findings(study) if found.kind == "caution"]
    assert cautions[0].startswith("8 seeds; no power analysis was made for these settings.")


def test_a_worse_an_equal_and_an_undecided_primary_comparison_are_called_so(study: StudyData) -> None:

    def with_gains(*differences: float) -> str:
        mine = dict(enumerate(differences))
        base = {run.seed: run.row["val_loss"] for run in study.runs if _is(run, "none") and run.row}
        runs = []
        for run in study.runs:
            if _is(run, "qk_norm") and run.row:
                row = {**run.row, "val_loss": base[run.seed] - mine.get(run.seed, 0.0)}
                runs += [dataclasses.replace(run, row=row)] if run.seed in mine else []
            else:
                runs.append(run)
        return leads(dataclasses.replace(study, runs=runs))[-1]

    assert "qk_norm is worse by 0.201 nats (" in with_gains(-0.2, -0.21, -0.19, -0.205)
    assert "equal to within 0.01 nats (difference " in with_gains(0.0001, -0.0002, 0.0001, -0.0001)
    assert "Undecided; about" in with_gains(0.2, -0.1, 0.1, 0.05)
    assert "not finite" in with_gains(0.2, float("nan"))


def _is(run: object, remedy: str) -> bool:
    return (run.remedy, run.lr, run.role) == (remedy, 0.1, "grid")  # type: ignore[attr-defined]


def test_before_any_seed_has_both_nothing_is_compared(study: StudyData) -> None:
    none = dataclasses.replace(study, runs=[run for run in study.runs if run.remedy != "qk_norm"])
    assert leads(none)[-1].endswith("No seed has finished both.")
    empty = dataclasses.replace(study, runs=[dataclasses.replace(run, row=None) for run in study.runs])
    assert len(leads(empty)) == 1
    assert "86" not in str(findings(empty))


def test_a_watched_page_takes_the_primary_comparison_as_its_advice(study: StudyData) -> None:
    said = text_of(advice(study))
    assert "qk_norm gains most, +0.287" in said


def test_two_studies_on_one_page_are_judged_together(tmp_path: Path, folder: Path) -> None:
    other = make_study(tmp_path / "other", grid(("none", "qk_norm"), (0.1,), FEW))
    assert collect([folder, other]).primary is None


def test_the_largest_stable_rate_counts_seeds_that_ran_at_every_rate_only(study: StudyData) -> None:
    line = next(line for line in standings(study) if line.remedy == "none")
    # At 0.1 all collapse: of the seeds that ran there alone none has a stable rate, which says nothing about 0.03.
    assert (line.stable_lr, line.stable_lrs) == (0.03, (0.03, 0.03))


def test_planned_power_is_the_share_of_studies_that_show_the_difference() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    studies = rng.normal(0.1, 0.12, (4000, 8))
    shown = np.mean([paired_effect(differences).low > 0 for differences in studies])
    assert planned_power(0.1, 0.12, 8) == pytest.approx(shown, abs=0.02)
    beyond = np.mean([paired_effect(differences, 0.03).verdict == "better" for differences in studies])
    assert planned_power(0.1, 0.12, 8, margin=0.03) == pytest.approx(beyond, abs=0.02)
    assert planned_power(0.0, 0.12, 8) == pytest.approx(0.025, abs=1e-3)
