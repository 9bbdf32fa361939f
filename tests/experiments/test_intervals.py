"""The intervals of the experiments: against tables, by simulation, and at their edges."""

import itertools
import math

import numpy as np
import pytest
from experiments.intervals import (
    common_level,
    exact_interval,
    largest_stable_lr,
    nominal,
)


def sign_p(values, centre):
    """The two-sided p value of a permutation test by signs."""
    d = values - centre
    signs = np.array(list(itertools.product((-1, 1), repeat=len(d))))
    return float((np.abs(signs @ d) >= abs(d.sum()) - 1e-12).mean())


def test_the_ends_are_those_at_which_a_permutation_test_by_signs_turns():
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


def test_of_eight_the_widest_interval_is_the_range_and_no_level_above_is_reached():
    values = [0.1, 0.4, 0.2, 0.3, 0.25, 0.15, 0.35, 0.45]
    assert exact_interval(values, 1 - 2 / 256) == (0.1, 0.45)
    assert exact_interval(values, 0.9922) == (-math.inf, math.inf)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [[1.0]]])
def test_bad_differences_are_refused(bad):
    with pytest.raises(ValueError, match="differences without NaN or infinity"):
        exact_interval(bad, 0.9)


# Pocock 1977, table 1, two-sided 0.05 and 0.01.
@pytest.mark.parametrize(
    ("error", "looks", "each"),
    [
        (0.05, 2, 0.0294),
        (0.05, 3, 0.0221),
        (0.05, 4, 0.0182),
        (0.05, 5, 0.0158),
        (0.01, 5, 0.0028),
    ],
)
def test_nominal_errors_are_those_of_the_published_table(error, looks, each):
    assert nominal(error, looks) == pytest.approx(each, abs=6e-5)


def test_where_nothing_is_decided_the_level_is_that_of_one_row():
    assert common_level(lambda _: 0, 20, 0.05) == pytest.approx(1 - 0.05 / 20, rel=1e-6)


def test_the_largest_stable_rate_is_below_the_first_that_collapsed():
    runs = ((0.1, False), (0.01, False), (0.3, True), (1.0, False), (0.1, False))
    assert largest_stable_lr([{"lr": lr, "collapsed": c} for lr, c in runs]) == 0.1
    assert (
        largest_stable_lr(
            [{"lr": 0.1, "collapsed": False}, {"lr": 0.1, "collapsed": True}]
        )
        is None
    )
    assert largest_stable_lr([]) is None
