"""A study against another baseline, and every pair of its remedies with intervals."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_study import grid, make_study

import qkeel.report
from qkeel.cli.app import main
from qkeel.errors import UnknownNameError
from qkeel.metrics import paired_effects
from qkeel.report.study.collect import collect
from qkeel.report.study.compare import MARGIN, losses, standings
from qkeel.report.study.page import pairs

THREE = ("none", "qk_norm", "lalr:tau=0.1")


def made(folder: Path) -> Path:
    return make_study(folder / "study", grid(THREE, (0.01, 0.1), (0, 1, 2)))


def test_every_pair_is_judged_once_at_each_rate_by_holm_over_all(tmp_path: Path) -> None:
    study = collect(made(tmp_path))
    found = pairs(study)
    named = {(gain.remedy, gain.baseline, gain.lr) for gain in found}
    assert named == {(a, b, lr) for lr in (0.01, 0.1) for a, b in (THREE[:2], THREE[1:], (THREE[0], THREE[2]))}
    by_hand = []
    for gain in found:
        mine, theirs = (losses(study.rows(), name, gain.lr) for name in (gain.remedy, gain.baseline))
        by_hand.append([theirs[seed] - mine[seed] for seed in sorted(mine)])
    for gain, effect in zip(found, paired_effects(by_hand, MARGIN), strict=True):
        assert gain.effect == effect


def test_the_mirror_image_of_a_gain_has_the_mirrored_interval(tmp_path: Path) -> None:
    gain = pairs(collect(made(tmp_path)))[0]
    other = gain.reversed()
    assert gain.effect is not None
    assert other.effect is not None
    assert (other.remedy, other.baseline, other.mean) == (gain.baseline, gain.remedy, -gain.mean)
    assert (other.effect.low, other.effect.high) == (-gain.effect.high, -gain.effect.low)
    assert other.reversed() == gain


def test_a_page_against_another_baseline_has_it_first_and_gains_over_it(tmp_path: Path) -> None:
    place = made(tmp_path)
    study = collect(place, "qk_norm")
    assert study.remedies[0] == "qk_norm"
    lines = {line.remedy: line for line in standings(study)}
    assert not lines["qk_norm"].gains
    assert lines["qk_norm"].cpu_ratio == pytest.approx(1.0)
    gain = lines["none"].gains[0.1]
    assert gain.baseline == "qk_norm"
    assert gain.mean == pytest.approx(-standings(collect(place))[0].gains[0.1].mean, abs=1.0)
    html = qkeel.report.write(place, tmp_path / "page.html", baseline="qk_norm").read_text(encoding="utf-8")
    assert "Against qk_norm" in html
    assert "Against none" not in html
    assert "CPU, ×\u00a0qk_norm" in html
    assert 'id="section-pairs"' in html
    assert main(["report", str(place), "-o", str(tmp_path / "b.html"), "--baseline", "qk_norm"]) == 0
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == html


def test_a_baseline_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown baseline 'qknorm'"):
        collect(made(tmp_path), "qknorm")


def test_two_remedies_need_no_matrix(tmp_path: Path) -> None:
    place = make_study(tmp_path / "two", grid(THREE[:2], (0.01, 0.1), (0, 1, 2)))
    html = qkeel.report.write(place, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "section-pairs" not in html
