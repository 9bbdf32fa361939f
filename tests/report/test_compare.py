"""The comparison of a study: paired by seed, with Student's interval, and one comparison that leads the page."""

import math

import numpy as np
import pytest
import scipy.stats
from synthetic_study import Made, grid, make_run, make_study, planned

from qkeel.records import append_line, read_json, write_json
from qkeel.report.compare import difference, long_cells, primary_cell
from qkeel.report.study_runs import read_study


def test_a_difference_is_paired_by_seed_with_students_interval():
    above, below = {0: 2.5, 1: 2.6, 2: 2.7, 9: 5.0}, {0: 2.4, 1: 2.48, 2: 2.59, 7: 1.0}
    found = difference(above, below)
    values = np.array([0.1, 0.12, 0.11])
    low, high = scipy.stats.t.interval(0.95, 2, values.mean(), scipy.stats.sem(values))
    assert (found.mean, found.effect.low, found.effect.high) == pytest.approx(
        (0.11, low, high)
    )
    assert (found.n, found.clear) == (3, True)
    assert difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("above", "words"),
    [
        ((2.0,), "one seed, no interval"),
        ((2.0, math.nan), "a value is not finite"),
        ((2.0, 2.0), "the same in each of 2 seeds"),
        ((2.0, 2.1), "+0.415 to +1.685, 2 seeds"),  # 1.05 ± 12.706 · 0.0707 / √2
    ],
)
def test_what_has_no_interval_says_why(above, words):
    found = difference(dict(enumerate(above)), dict.fromkeys(range(len(above)), 1.0))
    assert found.interval() == words
    assert found.clear == (words[0] == "+")


def test_the_page_leads_with_what_the_study_named_or_else_with_the_baseline_at_its_best_rate(
    tmp_path,
):
    named = primary_cell(read_study(planned(tmp_path / "named")))
    assert named is not None
    cell, baseline = named
    assert (cell.remedy, cell.lr, baseline.remedy, len(cell.runs)) == (
        "qk_norm",
        0.1,
        "none",
        8,
    )
    free = primary_cell(read_study(make_study(tmp_path / "free", grid())))
    assert (free[0].remedy, free[0].lr) == ("qk_norm", 0.01)
    other = primary_cell(read_study(tmp_path / "free", "softcap:cap=50"))
    assert (other[0].remedy, other[1].remedy, other[0].lr) == (
        "none",
        "softcap:cap=50",
        0.01,
    )
    alone = make_study(tmp_path / "alone", grid(("none",)))
    assert primary_cell(read_study(alone)) is None


# Kept by each of two seeds.
KEPT = {
    ("kna", "none"): (0.98, 0.94),
    ("baseline", "none"): (0.80, 0.70),
    ("baseline", "rerope"): (0.95, 0.93),
}


def long_study(path):
    """A study of two forms, tested at 8 times their training length."""
    entries = []
    for form in ("baseline", "kna"):
        for seed in (0, 1):
            made = Made(remedy=form, lr=0.01, seed=seed, max_logit=20.0, entropy=1.0)
            run = make_run(path / "runs" / made.run_id, made)
            config = read_json(run / "config.json")
            config["data"]["context"] = 64
            write_json(run / "config.json", config)
            entries.append(
                {
                    "run_id": made.run_id,
                    "remedy": form,
                    "lr": 0.01,
                    "seed": seed,
                    "role": "gau",
                }
            )
            for (name, method), kept in KEPT.items():
                if name == form:
                    shares = {
                        "accuracy_train": 0.5,
                        "accuracy_nonrepeat": 0.5 * kept[seed],
                    }
                    line = {
                        "posthoc": method,
                        "test_length": 512,
                        **shares,
                        "kept_nonrepeat": kept[seed],
                    }
                    append_line(
                        run / "extrapolation.jsonl",
                        {**line, "segments": [0.5, kept[seed] / 2]},
                    )
            append_line(
                run / "extrapolation.jsonl",
                {"posthoc": "log_n", "test_length": 512, "refused": "no"},
            )
    write_json(
        path / "study.json",
        {"study": "extrapolation", "remedies": ["baseline", "kna"], "runs": entries},
    )
    return path


def test_what_is_kept_of_the_accuracy_is_compared_with_the_first_form(
    tmp_path,
):
    table = {
        (cell.form, cell.method): cell
        for cell in long_cells(read_study(long_study(tmp_path / "s")))
    }
    assert set(table) == set(KEPT)  # what was refused is left out
    assert {key: cell.kept for key, cell in table.items()} == pytest.approx(
        {k: sum(v) / 2 for k, v in KEPT.items()}
    )
    gain = table["kna", "none"].gain
    assert gain.mean == pytest.approx(0.21)
