"""Every verdict of the page again, from the committed results, by other code: scipy's permutation test by signs."""

import itertools
import math

import numpy as np
import pytest
from experiments.claims.claim import Cell
from experiments.claims.judge import ERROR, HERE, LOOKS, judge
from experiments.claims.table import EVERY

from qkeel.records import read_json

stats = pytest.importorskip("scipy.stats", reason="scipy is in the dev extra")
RESULTS = read_json(HERE / "results.json")


def column_by_seed(claim, side):
    """One side of a claim, read from the rows without the project's reader."""
    rows = RESULTS[
        claim.study if not isinstance(side, Cell) or not side.study else side.study
    ]["rows"]
    if not isinstance(side, Cell):
        return {row["seed"]: float(side) for row in rows}
    mine = [row for row in rows if all(row.get(k) == v for k, v in side.where.items())]
    if side.column == "largest_stable_lr":
        found = {}
        for seed in {row["seed"] for row in mine}:
            ordered = sorted(
                (row["lr"], row["collapsed"]) for row in mine if row["seed"] == seed
            )
            stable = list(itertools.takewhile(lambda pair: not pair[1], ordered))
            found[seed] = stable[-1][0]
    elif side.column == "lr_sensitivity":
        found = {}
        for seed in {row["seed"] for row in mine}:
            own = [row for row in mine if row["seed"] == seed]
            start = np.mean([row["init_loss"] for row in own])
            losses = np.minimum(
                [
                    row["val_loss"] if math.isfinite(row["val_loss"]) else start
                    for row in own
                ],
                start,
            )
            found[seed] = float((losses - losses.min()).mean())
    else:
        found = {row["seed"]: row[side.column] for row in mine}
    return {seed: side.times * value for seed, value in found.items()}


def differences(claim):
    left, right = column_by_seed(claim, claim.left), column_by_seed(claim, claim.right)
    pairs = [(left[s], right[s]) for s in sorted(left.keys() & right.keys())]
    return np.array([math.log(a / b) if claim.ratio else a - b for a, b in pairs])


def p_value(values, centre):
    """Two-sided, of all 2ⁿ signs, by scipy."""

    def total(x, axis):
        return x.mean(axis=axis)

    test = stats.permutation_test(
        (values - centre,),
        total,
        permutation_type="samples",
        n_resamples=np.inf,
        vectorized=True,
        batch=1 << 14,
    )
    return float(test.pvalue)


def pocock(each, looks):
    """How often looks of this two-sided error err together: by scipy's multivariate normal distribution."""
    bound = stats.norm.isf(each / 2)
    k = np.arange(1, looks + 1)
    covariance = np.sqrt(np.minimum.outer(k, k) / np.maximum.outer(k, k))
    normal = stats.multivariate_normal(
        np.zeros(looks), covariance, abseps=1e-6, maxpts=10**6
    )
    return 1 - float(
        normal.cdf(np.full(looks, bound), lower_limit=np.full(looks, -bound))
    )


@pytest.fixture(scope="module")
def judged():
    return judge(RESULTS)


def test_differences_are_those_that_the_judge_takes(judged):
    for one in judged:
        assert differences(one.claim) == pytest.approx(
            list(one.differences), rel=1e-12, abs=1e-15
        ), one.claim.text


@pytest.mark.parametrize(
    "seeds", [range(14), pytest.param(range(14, 64), marks=pytest.mark.slow)]
)
def test_each_verdict_is_that_of_permutation_tests_at_the_margins(judged, seeds):
    """An interval lies beyond a point where the test of that point rejects and the mean is on that side."""
    allowed = 1 - judged[0].level
    some = [one for one in judged if len(one.differences) in seeds]
    assert some
    for one in some:
        values, margin = differences(one.claim), one.claim.margin.size
        beyond = {}
        for name, point in (("above", margin), ("over -", -margin)):
            rejects = p_value(values, point) <= allowed + 1e-12
            beyond[name] = (
                rejects and values.mean() > point,
                rejects and values.mean() < point,
            )
        (larger, below), (over, against) = beyond["above"], beyond["over -"]
        if one.claim.equal:
            expected = (
                "reproduced"
                if below and over
                else "contradicted"
                if larger or against
                else "undecided"
            )
        else:
            expected = (
                "reproduced" if larger else "contradicted" if below else "undecided"
            )
        assert one.verdict.strip("*") == expected, one.claim.text


def test_the_level_is_that_of_the_rows_it_decides_and_no_looser_one_would_do(
    judged,
):
    decided = sum(one.verdict.startswith("**") for one in judged)
    each = 1 - judged[0].level
    rows = pocock(each, LOOKS) / (ERROR / len(EVERY))
    assert decided >= rows - 0.01
    assert rows == pytest.approx(round(rows), abs=0.02)
