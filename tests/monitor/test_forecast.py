"""A power law is continued exactly; its clock takes out the learning rate's course."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.monitor import PlannedRates
from qkeel.monitor.forecast import clock, forecast

STEPS = np.arange(1.0, 201.0)


@pytest.mark.parametrize("exponent", [0.3, 1.0, 2.5])
def test_an_exact_power_law_is_forecast_exactly(exponent):
    ahead = forecast(STEPS, 7 * STEPS**exponent, 7 * 400.0**exponent)
    assert ahead.exponent == pytest.approx(exponent)
    assert ahead.step == pytest.approx(400)
    assert 200 <= ahead.low < 400 < ahead.high


def test_the_clock_takes_out_a_warm_up():
    rates = np.minimum(STEPS / 100, 1.0)
    ticks = clock(STEPS, rates)
    ahead = forecast(STEPS, 3 * ticks**0.8, 3 * (ticks[-1] + 150) ** 0.8, rates=rates)
    bent = forecast(STEPS, 3 * ticks**0.8, 3 * (ticks[-1] + 150) ** 0.8)
    assert ahead.step == pytest.approx(350)
    assert abs(bent.step - 350) > 20


def test_there_is_no_forecast_without_growth_points_or_a_threshold_ahead():
    assert forecast(STEPS, 50 / STEPS, 100.0) is None
    assert forecast(STEPS, np.full(200, 5.0), 100.0) is None
    assert forecast(STEPS[:5], STEPS[:5], 100.0) is None
    assert forecast(STEPS, STEPS, 150.0) is None
    assert forecast(STEPS, np.append(STEPS[:-1], np.nan), 1e3) is None
    assert forecast(STEPS, -STEPS, 1e3) is None
    assert forecast(STEPS, STEPS, 1e3, rates=np.zeros(200)) is None


def test_a_hole_in_the_record_is_left_out():
    values = STEPS.copy()
    values[50:60] = np.nan
    ahead = forecast(STEPS, values, 400.0)
    assert ahead.step == pytest.approx(400)


def test_rates_and_steps_must_pair():
    with pytest.raises(ShapeError, match="one learning rate per step"):
        clock(STEPS, STEPS[:3])


COSINE = 0.5 * (1 + np.cos(np.pi * np.arange(500) / 500))


def test_a_schedule_is_followed_to_the_step_and_to_its_end():
    planned = PlannedRates.of(COSINE)
    value = 4 * planned.clock[1:] ** 1.3
    seen = slice(0, 200)
    given = {"rates": COSINE[seen], "planned": planned}
    ahead = forecast(STEPS, value[seen], value[299], **given)
    assert ahead.step == pytest.approx(300)
    assert 200 <= ahead.low < 300 < ahead.high
    assert ahead.end == 500
    late = forecast(STEPS, value[seen], value[-1] * 1.01, **given)
    assert late.step == late.high == math.inf
    assert 200 <= late.low < 500
    never = forecast(STEPS, value[seen], value[-1] * 1000, **given)
    assert never.low == math.inf
    blind = forecast(STEPS, value[seen], value[299], rates=COSINE[seen])
    assert blind.end is None
    assert blind.step < 290  # the rate falls, and it did not know


def test_a_plan_the_run_does_not_follow_is_left_aside():
    values = STEPS**1.2
    steady = forecast(STEPS, values, 1e3, rates=np.full(200, 0.1))
    for planned in (
        PlannedRates.of(np.full(150, 0.1)),
        PlannedRates.of(np.full(900, 0.3)),
    ):
        assert (
            forecast(STEPS, values, 1e3, rates=np.full(200, 0.1), planned=planned)
            == steady
        )
    agreed = forecast(
        STEPS,
        values,
        1e3,
        rates=np.full(200, 0.1),
        planned=PlannedRates.of(np.full(900, 0.1)),
    )
    assert agreed.step == pytest.approx(steady.step)
    assert agreed.high == pytest.approx(steady.high)


def test_a_rate_read_before_or_after_the_scheduler_moved_is_of_the_plan():
    planned = PlannedRates.of(np.minimum(np.arange(1, 101) / 20, 1.0))
    rates = np.diff(planned.clock)
    for step in (1, 2, 10, 20, 99, 100):
        for read in (step - 1, step, step + 1):
            if 1 <= read <= 100:
                assert planned.followed(np.array([step]), rates[read - 1 : read])
    assert not planned.followed(np.array([10]), rates[13:14])
    assert not planned.followed(np.array([101]), rates[-1:])
    assert not planned.followed(np.array([2.5]), None)
    assert not planned.followed(np.zeros(0), None)
    assert planned.followed(np.array([0]), None)


def test_the_clock_of_a_plan_is_read_both_ways():
    planned = PlannedRates.of([0.1, 0.2, 0.3, 0.4])
    assert_allclose(planned.clock, [0, 0.1, 0.3, 0.6, 1.0])
    assert [planned.when(tick) for tick in (0.0, 0.1, 0.45, 1.0)] == pytest.approx(
        [0, 1, 2.5, 4]
    )
    assert planned.when(1.01) == math.inf
    idle = PlannedRates.of([0.0, 1.0, 0.0, 0.0])
    assert idle.when(1.0) == 2
    assert idle.when(0.5) == 1.5


@pytest.mark.parametrize("rates", [[], [0.1, -0.1], [0.1, math.nan], [[0.1]]])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises((InvalidValueError, ShapeError), match="rate"):
        PlannedRates.of(rates)
