"""The intervals of the experiments: against tables, by simulation, and at their edges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from experiments.intervals import (
    bootstrap_interval,
    common_level,
    exact_interval,
    largest_stable_lr,
    nominal,
    p_value,
    paired_effects,
)


def test_holm_over_many_comparisons_errs_at_the_level_of_one() -> None:
    rng = np.random.default_rng(1)
    studies = [paired_effects(rng.normal(0.0, 1.0, (8, 4))) for _ in range(400)]
    wrong = sum(any(e.verdict != "undecided" for e in study) for study in studies) / 400
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    # Step by step: the smallest p at 0.05 / 3, the next at 0.05 / 2; from the first that fails on, no further.
    clear, nearly, none = [5.0, 5.1, 4.9, 5.0], [1.0, 1.6, 0.9, 2.0], [1.0, -1.0, 0.5, -0.4]
    found = paired_effects([none, clear, nearly])
    assert [round(1 - e.level, 6) for e in found] == [0.05, 0.016667, 0.025]
    assert [e.verdict for e in found] == ["undecided", "better", "better"]
    assert [e.verdict for e in paired_effects([none] * 5 + [nearly])] == ["undecided"] * 6
    assert all((e.low > 0) == (e.verdict == "better") for e in found)
    assert paired_effects([]) == []


def test_holm_with_a_margin_errs_at_the_level_where_every_true_mean_is_on_the_margin() -> None:
    rng, margin = np.random.default_rng(3), 0.5
    drawn = [rng.normal(margin, 1.0, (6, 8)) for _ in range(400)]
    studies = [paired_effects(study, margin) for study in drawn]
    each = [pair for study, effects in zip(drawn, studies) for pair in zip(study, effects)]
    assert sum(any(e.verdict == "better" for e in one) for one in studies) / 400 <= 0.05 + 3 * math.sqrt(0.0475 / 400)
    for values, one in each:
        p = p_value(values, margin)
        assert (one.verdict in ("better", "worse")) == (p <= 1 - one.level)
        assert (one.verdict == "equal") == (abs(one.low) < margin and abs(one.high) < margin)


def test_the_bootstrap_covers_a_mean_and_says_the_same_again() -> None:
    rng = np.random.default_rng(2)
    inside = 0
    for values in rng.normal(0.0, 1.0, (60, 8)):
        low, high = bootstrap_interval(values.tolist())
        inside += low <= 0 <= high
    assert inside >= 51  # 95 % of 60 less 3 standard errors
    values = [0.1, 0.3, 0.03, 0.1]
    assert bootstrap_interval(values, np.min) == bootstrap_interval(values, np.min)
    low, high = bootstrap_interval(values, np.min)
    assert low == 0.03
    assert high <= 0.3
    assert bootstrap_interval([-math.inf, 0.1, 0.1], np.min) == (-math.inf, 0.1)
    for bad in ([0.1], [0.1, math.nan]):
        with pytest.raises(ValueError, match="at least 2 numbers"):
            bootstrap_interval(bad)


def sign_p(values: np.ndarray, centre: float) -> float:
    """The two-sided p value of a permutation test by signs."""
    d = values - centre
    signs = np.array(list(itertools.product((-1, 1), repeat=len(d))))
    return float((np.abs(signs @ d) >= abs(d.sum()) - 1e-12).mean())


def test_the_ends_are_those_at_which_a_permutation_test_by_signs_turns() -> None:
    rng = np.random.default_rng(0)
    for n in (6, 8, 9):
        values = rng.normal(0.3, 1.0, n)
        for level in (0.9, 0.95, 0.97):
            low, high = exact_interval(values, level)
            if math.isinf(low):
                continue
            for end, inwards in ((low, 1), (high, -1)):
                assert sign_p(values, end + inwards * 1e-6) > 1 - level
                assert sign_p(values, end - inwards * 1e-6) <= 1 - level + 1e-12


def test_of_eight_the_widest_interval_is_the_range_and_no_level_above_is_reached() -> None:
    values = [0.1, 0.4, 0.2, 0.3, 0.25, 0.15, 0.35, 0.45]
    assert exact_interval(values, 1 - 2 / 256) == (0.1, 0.45)
    assert exact_interval(values, 0.9922) == (-math.inf, math.inf)


@pytest.mark.parametrize("draw", ["normal", "laplace", "uniform", "standard_cauchy"])
def test_coverage_is_exact_for_every_symmetric_distribution(draw: str) -> None:
    rng, n, level, trials = np.random.default_rng(1), 6, 1 - 2 * 3 / 64, 4000
    samples = getattr(rng, draw)(size=(trials, n)) + (-0.5 if draw == "uniform" else 0.0)
    ends = np.array([exact_interval(own, level) for own in samples])
    covered = ((ends[:, 0] < 0) & (ends[:, 1] > 0)).mean()
    assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) / trials)


def test_many_differences_have_an_interval_near_that_of_student() -> None:
    values = np.random.default_rng(2).normal(1.0, 1.0, 40)
    low, high = exact_interval(values, 0.95)
    half = 2.0227 * values.std(ddof=1) / math.sqrt(40)
    assert low == pytest.approx(values.mean() - half, abs=0.05)
    assert high == pytest.approx(values.mean() + half, abs=0.05)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [[1.0]]])
def test_bad_differences_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="differences without NaN or infinity"):
        exact_interval(bad, 0.9)


# Pocock 1977, table 1, two-sided 0.05 and 0.01.
@pytest.mark.parametrize(
    ("error", "looks", "each"),
    [(0.05, 2, 0.0294), (0.05, 3, 0.0221), (0.05, 4, 0.0182), (0.05, 5, 0.0158), (0.01, 5, 0.0028)],
)
def test_nominal_errors_are_those_of_the_published_table(error: float, looks: int, each: float) -> None:
    assert nominal(error, looks) == pytest.approx(each, abs=6e-5)


def test_five_looks_at_growing_data_err_as_often_as_promised() -> None:
    steps = np.random.default_rng(3).normal(size=(40_000, 5))
    z = np.abs(steps.cumsum(1) / np.sqrt(np.arange(1, 6)))
    wrong = (z > 2.413).any(1).mean()  # the boundary of a nominal error of 0.0158
    assert abs(wrong - 0.05) < 0.004


def test_on_a_page_of_rows_the_share_of_wrong_verdicts_is_kept() -> None:
    rng, wrong = np.random.default_rng(4), []
    for _ in range(60):
        centres = np.array([0.0] * 15 + [1.5] * 10)
        rows = rng.normal(centres[:, None], 1.0, (25, 9))

        def decided(level: float, rows: np.ndarray = rows) -> int:
            ends = [exact_interval(own, level) for own in rows]
            return sum(low > 0 or high < 0 for low, high in ends)

        level = common_level(decided, 25, 0.1)
        ends = np.array([exact_interval(own, level) for own in rows])
        called = (ends[:, 0] > 0) | (ends[:, 1] < 0)
        wrong.append(called[:15].sum() / max(1, called.sum()))
        assert called.sum() >= 5
    assert np.mean(wrong) < 0.1


def test_where_nothing_is_decided_the_level_is_that_of_one_row() -> None:
    assert common_level(lambda _: 0, 20, 0.05) == pytest.approx(1 - 0.05 / 20, rel=1e-6)


def test_the_largest_stable_rate_is_below_the_first_that_collapsed() -> None:
    runs = ((0.1, False), (0.01, False), (0.3, True), (1.0, False), (0.1, False))
    assert largest_stable_lr([{"lr": lr, "collapsed": c} for lr, c in runs]) == 0.1
    assert largest_stable_lr([{"lr": 0.1, "collapsed": False}, {"lr": 0.1, "collapsed": True}]) is None
    assert largest_stable_lr([]) is None
