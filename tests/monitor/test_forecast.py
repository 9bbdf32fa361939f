"""A power law is continued exactly; its clock takes out the learning rate's course."""

from __future__ import annotations

import numpy as np
import pytest

from qkeel.errors import ShapeError
from qkeel.monitor.forecast import Forecast, clock, forecast

STEPS = np.arange(1.0, 201.0)


@pytest.mark.parametrize("exponent", [0.3, 1.0, 2.5])
def test_an_exact_power_law_is_forecast_exactly(exponent: float) -> None:
    ahead = forecast(STEPS, 7 * STEPS**exponent, 7 * 400.0**exponent)
    assert ahead is not None
    assert ahead.exponent == pytest.approx(exponent)
    assert ahead.step == pytest.approx(400)
    assert 200 <= ahead.low < 400 < ahead.high


def test_a_constant_rate_changes_nothing_and_its_size_neither() -> None:
    plain = forecast(STEPS, STEPS**1.2, 1e4)
    for rate in (1e-5, 0.3):
        timed = forecast(STEPS, STEPS**1.2, 1e4, rates=np.full(200, rate))
        assert plain is not None
        assert timed is not None
        assert timed.step == pytest.approx(plain.step)


def test_the_clock_takes_out_a_warm_up() -> None:
    rates = np.minimum(STEPS / 100, 1.0)
    ticks = clock(STEPS, rates)
    ahead = forecast(STEPS, 3 * ticks**0.8, 3 * (ticks[-1] + 150) ** 0.8, rates=rates)
    bent = forecast(STEPS, 3 * ticks**0.8, 3 * (ticks[-1] + 150) ** 0.8)
    assert ahead is not None
    assert bent is not None
    assert ahead.step == pytest.approx(350)
    assert abs(bent.step - 350) > 20


def test_there_is_no_forecast_without_growth_points_or_a_threshold_ahead() -> None:
    assert forecast(STEPS, 50 / STEPS, 100.0) is None
    assert forecast(STEPS, np.full(200, 5.0), 100.0) is None
    assert forecast(STEPS[:5], STEPS[:5], 100.0) is None
    assert forecast(STEPS, STEPS, 150.0) is None
    assert forecast(STEPS, np.append(STEPS[:-1], np.nan), 1e3) is None
    assert forecast(STEPS, -STEPS, 1e3) is None
    assert forecast(STEPS, STEPS, 1e3, rates=np.zeros(200)) is None


def test_a_hole_in_the_record_is_left_out() -> None:
    values = STEPS.copy()
    values[50:60] = np.nan
    ahead = forecast(STEPS, values, 400.0)
    assert ahead is not None
    assert ahead.step == pytest.approx(400)


def test_a_farther_threshold_has_a_wider_interval() -> None:
    near, far = (forecast(STEPS, STEPS, threshold) for threshold in (250.0, 1000.0))
    assert near is not None
    assert far is not None
    assert (near.high - near.low) / near.step < (far.high - far.low) / far.step


def test_it_reads_like_a_sentence() -> None:
    text = str(Forecast(threshold=1e4, value=500.0, exponent=1.0, step=2143.2, low=1950.0, high=2340.0))
    assert text == "passes 1e4 at step 2,140 ± 197 if the learning rate stays"


def test_rates_and_steps_must_pair() -> None:
    with pytest.raises(ShapeError, match="one learning rate per step"):
        clock(STEPS, STEPS[:3])
