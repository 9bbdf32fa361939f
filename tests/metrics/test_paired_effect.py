"""The judgement of paired differences: against tables, by simulation, and at its edges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.metrics import bootstrap_interval, paired_effect, paired_effects
from qkeel.metrics.paired_effect import common_level, exact_interval, nominal, power, quantile, two_sided


def test_quantiles_and_tails_are_those_of_the_tables() -> None:
    # Abramowitz & Stegun, table 26.10, and closed forms: t(1) is Cauchy's, t(2) is t / √(2 + t²).
    for level, freedom, t in ((0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.99, 5, 4.03214), (0.999, 30, 3.64596)):
        assert quantile(level, freedom) == pytest.approx(t, abs=5e-5)
        assert two_sided(quantile(level, freedom), freedom) == pytest.approx(1 - level, rel=1e-10)
    for t in (1e-9, 0.3, 1.0, 40.0, 1e6):
        assert two_sided(t, 1) == pytest.approx(2 / math.pi * math.atan(1 / t), rel=1e-12)
        assert two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9, abs=1e-15)
    assert two_sided(0.0, 3) == 1.0
    assert two_sided(math.inf, 3) == two_sided(1e200, 3) < 1e-200
    # t-tables of power: 80 % at n = 10 takes 0.9960 standard deviations, two-sided 5 % (Cohen 1988, section 2.4).
    assert power(0.9960 * math.sqrt(10), 9, 0.95) == pytest.approx(0.8, abs=2e-3)


def test_one_study_by_hand_and_what_is_equal_undecided_or_the_same() -> None:
    found = paired_effect([1.0, 2.0, 3.0, 4.0])
    error = math.sqrt(5 / 3 / 4)
    assert found.mean == 2.5
    assert found.high - found.mean == pytest.approx(3.182446 * error, rel=1e-6)
    assert (found.verdict, found.seeds, found.n) == ("better", 4, 4)
    assert paired_effect([-1.0, -2.0, -3.0, -4.0]).verdict == "worse"
    tight = [0.001, -0.002, 0.0005, 0.001]
    assert paired_effect(tight).verdict == "undecided"
    assert paired_effect(tight, margin=0.01).verdict == "equal"
    sure = [0.001, 0.0011, 0.0009]
    assert (paired_effect(sure).verdict, paired_effect(sure, margin=0.01).verdict) == ("better", "equal")
    assert paired_effect([0.012, 0.009, 0.013], margin=0.01).verdict == "undecided", "above 0, but across the margin"
    beyond = paired_effect([-0.12, -0.11, -0.13], margin=0.01)
    # t = (0.12 - 0.01) / (0.01 / √3) with 2 degrees of freedom: p = 1 - t / √(2 + t²).
    assert (beyond.verdict, beyond.p) == ("worse", pytest.approx(1 - math.sqrt(363 / 365)))
    assert beyond.detectable == pytest.approx(0.01 + paired_effect([-0.12, -0.11, -0.13]).detectable)
    assert (paired_effect([0.0, 0.0], margin=0.01).verdict, paired_effect([0, 0]).verdict) == ("equal", "undecided")
    same = [paired_effect([x] * 6, margin=0.01) for x in (0.005, -0.05)]
    assert [(one.verdict, one.p) for one in same] == [("equal", 1.0), ("worse", 2**-5)]
    wide = paired_effect([0.03, -0.02], margin=0.01)
    assert wide.verdict == "undecided"
    # Inside by 0.005 at a spread of 0.025·√2, each of two tests with a power of 0.9: (1.960 + 1.282)² · 50 = 525.
    assert wide.seeds == pytest.approx(525, abs=4)
    # One number again and again is no continuous quantity: signs decide, 2^(1 - n).
    assert [paired_effect([0.3] * n).verdict for n in (2, 5, 6)] == ["undecided", "undecided", "better"]
    assert paired_effect([0.1, 0.1 + 1e-16]).seeds == 6


@pytest.mark.parametrize(
    "bad", [[], [1.0], [1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]], 3.0, ["a", "b"], [1.0, None]], ids=str
)
def test_what_cannot_be_judged_is_refused_in_one_sentence(bad: list[float]) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError), match="expected"):
        paired_effect(bad)


def test_margin_and_level_are_checked() -> None:
    for margin in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidValueError, match="margin"):
            paired_effect([1.0, 2.0], margin=margin)
    for level in (0.0, 1.0, 95.0, math.nan):
        with pytest.raises(InvalidValueError, match="level"):
            paired_effect([1.0, 2.0], level=level)


def simulate(n: int, shift: float = 0.0, studies: int = 2000) -> np.ndarray:
    """[studies 3]: covered, a verdict that leaves 0, detectable."""
    rng = np.random.default_rng(n)
    found = []
    for values in rng.normal(shift, 1.0, (studies, n)):
        one = paired_effect(values)
        found.append((one.low <= shift <= one.high, one.verdict != "undecided", one.p))
    return np.array(found, dtype=float)


def test_coverage_false_positives_and_power_in_a_small_simulation() -> None:
    error = 3 * math.sqrt(0.05 * 0.95 / 2000)
    seen = []
    for n in (2, 3, 8):
        covered, decided, p = simulate(n).mean(0)
        assert covered == pytest.approx(0.95, abs=error), n
        assert decided <= 0.05 + error, n
        assert p == pytest.approx(0.5, abs=0.03), n
        seen.append(simulate(n, 1.0, 500)[:, 1].mean())
    assert seen == sorted(seen), "power grows with n"
    assert seen[-1] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 50])
def test_coverage_false_positives_and_power_in_a_large_simulation(n: int) -> None:
    covered, decided, _ = simulate(n, studies=40_000).mean(0)
    assert 0.94 <= covered <= 0.96
    assert decided <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 40_000)
    # A true mean of the detectable size, at the true spread, is seen in 80 % of studies.
    values = np.arange(n) - (n - 1) / 2
    size = paired_effect(values / values.std(ddof=1)).detectable
    assert simulate(n, size, 20_000)[:, 1].mean() == pytest.approx(0.8, abs=0.012)


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


def test_verdicts_are_those_of_scipys_tests_at_the_margins() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is in the dev extra")
    rng, margin, seen = np.random.default_rng(4), 0.5, set()
    for values in rng.normal(rng.uniform(-1, 1, (300, 1)), rng.uniform(0.05, 1, (300, 1)), (300, 6)):
        found = paired_effect(values, margin)
        less, more = (
            [stats.ttest_1samp(values, centre, alternative=side).pvalue <= 0.025 for centre in (-margin, margin)]
            for side in ("less", "greater")
        )
        verdict = "worse" if less[0] else "better" if more[1] else "equal" if more[0] and less[1] else "undecided"
        assert found.verdict == verdict
        assert found.p == pytest.approx(stats.ttest_1samp(values, math.copysign(margin, found.mean)).pvalue) or (
            abs(found.mean) <= margin and found.p == 1
        )
        seen.add(verdict)
    assert len(seen) == 4


def test_holm_with_a_margin_errs_at_the_level_where_every_true_mean_is_on_the_margin() -> None:
    rng, margin = np.random.default_rng(3), 0.5
    studies = [paired_effects(rng.normal(margin, 1.0, (6, 8)), margin) for _ in range(400)]
    assert sum(any(e.verdict == "better" for e in one) for one in studies) / 400 <= 0.05 + 3 * math.sqrt(0.0475 / 400)
    for one in (e for study in studies for e in study):
        assert (one.verdict in ("better", "worse")) == (one.p <= 1 - one.level)
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
        with pytest.raises(InvalidValueError, match="at least 2 numbers"):
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
    with pytest.raises(InvalidValueError, match="differences without NaN or infinity"):
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
