"""Scalars of runs, against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkeel.errors import InvalidValueError
from qkeel.metrics import (
    alarm_step,
    collapsed,
    growth_exponent,
    largest_stable_lr,
    lr_sensitivity,
    paired_gain,
    spike_score,
)

LOSSES = st.lists(st.floats(0.1, 20), min_size=1, max_size=8)


def test_lr_sensitivity_of_the_golden_case() -> None:
    # minima 3.2; clipped at ln 32101: (0.3+0.1+0+0.05+0.4+5.8+7.176642)/7
    losses = [3.5, 3.3, 3.2, 3.25, 3.6, 9.0, math.inf]
    assert lr_sensitivity(losses, math.log(32101)) == pytest.approx(1.975235, abs=1e-6)
    assert lr_sensitivity([*losses[:-1], math.nan], math.log(32101)) == pytest.approx(1.975235, abs=1e-6)
    assert lr_sensitivity([2.0, 3.0, 5.0]) == pytest.approx(4 / 3)


@given(LOSSES, st.floats(0, 5))
def test_lr_sensitivity_is_at_least_zero_and_blind_to_a_shift(losses: list[float], shift: float) -> None:
    assert lr_sensitivity(losses) >= 0
    assert lr_sensitivity([x + shift for x in losses]) == pytest.approx(lr_sensitivity(losses), abs=1e-9)
    assert lr_sensitivity([losses[0]] * 3) == pytest.approx(0, abs=1e-12)


def test_lr_sensitivity_of_nothing_or_of_only_diverged_runs() -> None:
    with pytest.raises(InvalidValueError, match="at least one loss"):
        lr_sensitivity([])
    assert math.isnan(lr_sensitivity([math.inf, math.nan]))
    assert lr_sensitivity([math.inf, math.nan], 5.0) == 0


@pytest.mark.parametrize(
    ("entropy", "loss", "expected"),
    [
        (1.0, 3.0, False),
        (0.1, 3.0, False),
        (0.0999, 3.0, True),
        (math.nan, 3.0, True),
        (1.0, 5.0, True),
        (1.0, 4.9999, False),
        (1.0, math.nan, True),
        (1.0, math.inf, True),
    ],
)
def test_collapse_is_low_entropy_or_no_progress(entropy: float, loss: float, expected: bool) -> None:
    assert collapsed(entropy, loss, init_loss=5.0) is expected


def test_the_alarm_fires_at_the_first_step_above_the_threshold() -> None:
    records = [{"step": s, "max_logit": x} for s, x in ((0, 5.0), (10, 100.0), (20, 100.5), (30, 90.0))]
    assert alarm_step(records) == 20
    assert alarm_step(records, 4.0) == 0
    assert alarm_step(records, 1e9) is None
    assert alarm_step([]) is None
    assert alarm_step([{"step": 7, "max_logit": math.nan}]) == 7
    assert alarm_step([{"step": 1}, {"step": 2, "max_logit": 3.0}], 1.0) == 2


def test_spikes_are_far_above_the_window_before() -> None:
    calm = [1.0, 1.1] * 10
    assert spike_score(calm) == 0
    assert spike_score([*calm, 9.0]) == pytest.approx(1 / 21)
    assert spike_score([*calm, -9.0]) == 0
    assert spike_score([*calm, math.nan]) == pytest.approx(1 / 21)
    assert spike_score([*calm, math.inf]) == pytest.approx(1 / 21)
    assert spike_score([9.0, *calm]) == 0  # the first window is never judged
    assert spike_score([]) == 0


def test_the_largest_stable_rate_is_below_the_first_that_collapsed() -> None:
    runs = ((0.1, False), (0.01, False), (0.3, True), (1.0, False), (0.1, False))
    rows = [{"lr": lr, "collapsed": c} for lr, c in runs]
    assert largest_stable_lr(rows) == 0.1
    assert largest_stable_lr([{"lr": 0.1, "collapsed": False}, {"lr": 0.1, "collapsed": True}]) is None
    assert largest_stable_lr([]) is None


def test_gains_are_paired_by_seed_and_positive_when_the_remedy_is_better() -> None:
    rows = [
        {"remedy": r, "seed": s, "lr": lr, "val_loss": x}
        for r, s, lr, x in (
            ("none", 0, 0.1, 3.0),
            ("none", 1, 0.1, 4.0),
            ("qk_norm", 1, 0.1, 3.5),
            ("qk_norm", 0, 0.1, 3.2),
            ("qk_norm", 2, 0.1, 1.0),
            ("qk_norm", 0, 0.3, 0.0),
        )
    ]
    assert paired_gain(rows, "qk_norm", "none", 0.1) == pytest.approx([-0.2, 0.5])
    assert paired_gain(rows, "qk_norm", "none", 0.3) == []


def test_the_exponent_of_a_power_law_is_found_and_few_points_give_none() -> None:
    steps = [0, 1, 2, 4, 8, 16, 32]
    values = [5.0, *(3.0 * step**0.25 for step in steps[1:])]
    assert growth_exponent(steps, values) == pytest.approx(0.25, abs=1e-12)  # step 0 has no logarithm and is left out
    assert math.isnan(growth_exponent(steps[:6], values[:6]))
    assert math.isnan(growth_exponent([3] * 7, values))
    assert growth_exponent([*steps, 64, 128], [*values, math.nan, -1.0]) == pytest.approx(0.25, abs=1e-12)
