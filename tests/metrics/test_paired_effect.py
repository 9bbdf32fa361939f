"""The judgement of paired differences: against tables and scipy, by simulation, and at its edges."""

import math

import numpy as np
import pytest
import scipy.stats

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.metrics import paired_effect
from qkeel.metrics.paired_effect import coverage, quantile


def test_quantiles_and_tails_are_those_of_the_tables():
    # Abramowitz & Stegun, table 26.10, and closed forms: t(1) is Cauchy's, t(2) is t / √(2 + t²).
    for level, freedom, t in (
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.99, 5, 4.03214),
        (0.999, 30, 3.64596),
    ):
        assert quantile(level, freedom) == pytest.approx(t, abs=5e-5)
        assert coverage(quantile(level, freedom), freedom) == pytest.approx(
            level, rel=1e-12
        )
    for freedom in range(1, 40):
        for t in (0.0, 1e-9, 0.3, 1.0, 40.0):
            expected = 1 - 2 * scipy.stats.t.sf(t, freedom)
            assert coverage(t, freedom) == pytest.approx(expected, rel=1e-10, abs=1e-15)


def test_one_study_by_hand_and_what_is_equal_undecided_or_the_same():
    found = paired_effect([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    half = 3.182446 * math.sqrt(5 / 3 / 4)
    assert (found.low, found.high) == pytest.approx((2.5 - half, 2.5 + half), rel=1e-6)
    assert (found.verdict, found.n, found.level, found.margin) == (
        "better",
        4,
        0.95,
        None,
    )
    assert paired_effect([-1.0, -2.0, -3.0, -4.0]).verdict == "worse"
    tight = [0.001, -0.002, 0.0005, 0.001]
    assert (
        paired_effect(tight).verdict,
        paired_effect(tight, margin=0.01).verdict,
    ) == ("undecided", "equal")
    sure = [0.001, 0.0011, 0.0009]
    assert (paired_effect(sure).verdict, paired_effect(sure, margin=0.01).verdict) == (
        "better",
        "equal",
    )
    assert paired_effect([0.012, 0.009, 0.013], margin=0.01).verdict == "undecided", (
        "above 0, but across the margin"
    )
    # One number again and again is no continuous quantity: signs decide, 2^(1 - n).
    assert [paired_effect([0.3] * n).verdict for n in (2, 5, 6)] == [
        "undecided",
        "undecided",
        "better",
    ]
    assert [paired_effect([x] * 6, margin=0.01).verdict for x in (0.005, -0.05)] == [
        "equal",
        "worse",
    ]
    assert (
        paired_effect([0.0, 0.0], margin=0.01).verdict,
        paired_effect([0, 0]).verdict,
    ) == ("equal", "undecided")
    assert paired_effect([0.1, 0.1 + 1e-16]).high == math.inf


def test_the_interval_is_scipys_at_every_level():
    values = np.array([0.3, -0.1, 0.25, 0.6, 0.02])
    for level in (0.5, 0.9, 0.95, 0.999):
        found = paired_effect(values, level=level)
        ends = scipy.stats.t.interval(level, 4, values.mean(), scipy.stats.sem(values))
        assert (found.low, found.high) == pytest.approx(ends)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [1.0],
        [1.0, math.nan],
        [1.0, math.inf],
        [[1.0, 2.0]],
        3.0,
        ["a", "b"],
        [1.0, None],
    ],
    ids=str,
)
def test_what_cannot_be_judged_is_refused_in_one_sentence(bad):
    with pytest.raises((InvalidValueError, InvalidTypeError), match="expected"):
        paired_effect(bad)


def test_margin_and_level_are_checked():
    for margin in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidValueError, match="margin"):
            paired_effect([1.0, 2.0], margin=margin)
    for level in (0.0, 1.0, 95.0, math.nan):
        with pytest.raises(InvalidValueError, match="level"):
            paired_effect([1.0, 2.0], level=level)
