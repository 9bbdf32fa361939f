"""Each rule fires on what it is for, names the place, is silent otherwise, and warns once."""

import numpy as np
import pytest

from qkeel.errors import ShapeError
from qkeel.monitor import (
    DEFAULT,
    AlarmLog,
    Approach,
    Ceiling,
    EntropyCollapse,
    Growth,
    History,
    Outlook,
    PlannedRates,
    Severity,
    replay,
)
from qkeel.records import Heads

STEPS = np.arange(0, 101, 5)


def history(
    max_logit=None,
    entropy=None,
    *,
    layers=(),
    planned=None,
):
    """Two layers of three heads, logits 5 and entropies 2 unless said for (layer 1, head 2)."""
    n = len(STEPS)
    values = {"max_logit": np.full((n, 2, 3), 5.0), "entropy": np.full((n, 2, 3), 2.0)}
    if max_logit is not None:
        values["max_logit"][:, 1, 2] = max_logit
    if entropy is not None:
        values["entropy"][:, 1, :] = entropy[:, None]
    metrics = [{"step": int(s), "lr": 0.01} for s in STEPS]
    return History.of(
        metrics, Heads(steps=STEPS, values=values), layers, planned=planned
    )


def power(exponent, end):
    return end * (np.maximum(STEPS, 1) / STEPS[-1]) ** exponent


@pytest.mark.parametrize(
    ("threshold", "severity"), [(100, "notice"), (1e3, "alarm"), (1e4, "critical")]
)
def test_a_ceiling_names_the_head_and_step_that_passed_it(threshold, severity):
    logits = np.full(len(STEPS), 0.9 * threshold)
    logits[13:] = 1.1 * threshold
    rule = next(
        r for r in DEFAULT if isinstance(r, Ceiling) and r.threshold == threshold
    )
    (alarm,) = replay(history(logits), [rule])
    assert (alarm.step, alarm.layer, alarm.head, alarm.severity) == (
        65,
        "layer 1",
        2,
        severity,
    )
    assert alarm.value == pytest.approx(1.1 * threshold)
    assert "2" in alarm.source
    assert replay(history(np.full(len(STEPS), 0.9 * threshold)), [rule]) == []


def test_growth_fires_on_a_power_law_and_not_on_a_logit_that_has_settled():
    (alarm,) = replay(history(power(1.5, 800.0)), [Growth()])
    assert alarm.head == 2
    assert 100 < alarm.value < 400
    settled = np.minimum(power(0.5, 150.0) * 2, 120.0)
    assert replay(history(settled), [Growth()]) == []


def test_one_odd_batch_raises_no_growth_alarm():
    logits = power(0.3, 90.0)
    logits[12] = 900.0
    assert replay(history(logits), [Growth()]) == []


def test_a_forecast_alarm_says_threshold_step_and_interval():
    (alarm,) = replay(history(power(1.0, 700.0)), [Approach(threshold=1e3)])
    assert "will pass 1,000 at step 14" in str(alarm)
    assert "90 % interval" in str(alarm)
    assert alarm.step < 100
    assert replay(history(power(0.2, 60.0)), [Approach(threshold=1e3)]) == []


def test_outlook_continues_the_growth_to_the_end_of_the_schedule():
    linear = (
        5 + 0.1 * STEPS
    )  # grows by 0.1 a step; ends at 105 after 1,000 steps, at 1,005 after 10,000
    short, long = (PlannedRates.of(np.full(n, 0.01)) for n in (1000, 10_000))
    assert replay(history(linear, planned=short), [Outlook()]) == []
    assert replay(history(linear), [Outlook()]) == []  # no schedule, no outlook
    (alarm,) = replay(history(linear, planned=long), [Outlook()])
    assert (alarm.layer, alarm.head, alarm.step) == (
        "layer 1",
        2,
        55,
    )  # the first record over twice the start
    assert "will end over 500" in str(alarm)
    assert (
        replay(history(5 + 0.04 * STEPS, planned=long), [Outlook()]) == []
    )  # has not doubled
    assert (
        replay(
            history(linear, planned=PlannedRates.of(np.full(10_000, 0.02))), [Outlook()]
        )
        == []
    )  # not followed


def test_entropy_collapse_is_of_a_layer_and_a_fall_of_the_entropy_is_none():
    falling = np.linspace(2.0, 0.02, len(STEPS))
    (alarm,) = replay(history(entropy=falling), [EntropyCollapse()])
    assert (alarm.layer, alarm.head) == ("layer 1", None)
    assert alarm.value < 0.1
    one_head = history()
    one_head.heads["entropy"][:, 0, 0] = 0.0  # a head that looks at one key is healthy
    assert replay(one_head, [EntropyCollapse()]) == []
    dropped = np.full(len(STEPS), 0.5)
    dropped[:3] = 4.0
    both = history(entropy=dropped)
    both.heads["entropy"][3:, 0, :] = 0.5
    assert replay(both, [EntropyCollapse()]) == []


def test_replay_knows_only_the_past():
    full = history(power(1.5, 3000.0), np.linspace(2.0, 0.01, len(STEPS)))
    alarms = replay(full)
    assert {a.severity for a in alarms} == set(Severity)
    for n in range(1, len(full) + 1):
        known = [a for a in alarms if a.step <= full.steps[n - 1]]
        assert replay(full.upto(n)) == known


def test_records_out_of_order_are_refused_and_an_empty_run_is_quiet():
    with pytest.raises(ShapeError, match="order"):
        History.of([{"step": 2, "max_logit": 1.0}, {"step": 1, "max_logit": 1.0}])
    assert replay(History.of([])) == []
    assert replay(History.of([{"step": 0}, {"step": 1}]), DEFAULT) == []


def test_an_alarm_of_the_first_record_compares_it_with_nothing():
    first = History(
        steps=np.arange(1), values={}, heads={"max_logit": np.full((1, 1, 1), 2.5e5)}
    )
    alarm = Ceiling(threshold=1e4).check(first)
    assert alarm.trend == ""
    assert "it was" not in str(alarm)


def test_a_history_with_its_own_rates_is_replayed_with_them():
    steps = np.arange(0.0, 600.0, 10.0)
    rates = 1e-3 * 0.97 ** np.arange(
        60
    )  # the clock all but stops, so growth in steps is none to be continued
    logits = 2.0 + 30.0 * np.cumsum(rates) / rates[0]
    by_hand = History(steps=steps, values={"max_logit": logits}, heads={}, rates=rates)
    records = [
        {"step": int(s), "lr": r, "max_logit": z}
        for s, r, z in zip(steps, rates, logits)
    ]
    assert [(a.rule, a.step, a.line) for a in replay(by_hand)] == [
        (a.rule, a.step, a.line) for a in replay(History.of(records))
    ]


def log_of(logits, rules):
    """The alarms of a run, and those that were over with the step of the record that ended them."""
    log, over = AlarmLog(rules), []
    for n, step in enumerate(STEPS, start=1):
        records = history(logits).upto(n)
        log.update(records)
        over += [(int(step), alarm) for alarm in log.over(records)]
    return log.alarms, over


def test_a_forecast_that_does_not_come_true_is_over():
    logits = power(1.0, 700.0)
    logits[14:] = 20.0
    alarms, over = log_of(logits, [Approach(threshold=1000.0)])
    assert over == [(70, alarm) for alarm in alarms]
    assert over


def test_a_forecast_that_came_true_is_not_over():
    rules = [Approach(threshold=1000.0), Ceiling(threshold=1000.0)]
    alarms, over = log_of(power(1.0, 1990.0), rules)
    assert len(alarms) == 2
    assert not over


def test_a_forecast_that_was_over_is_made_again_of_a_number_twice_as_large():
    logits = power(1.0, 900.0)
    logits[10:12] = 20.0
    (first, again), over = log_of(logits, [Approach(threshold=1000.0)])
    assert over == [(50, first)]
    assert again.value >= 2 * first.value


def test_a_notice_that_holds_no_longer_is_over_once_and_an_alarm_stays():
    logits = np.full(len(STEPS), 5.0)
    logits[3:6] = logits[9:11] = 1500.0
    rules = [rule for rule in DEFAULT if isinstance(rule, Ceiling)]
    alarms, over = log_of(logits, rules)
    notices = [x for x in alarms if x.severity is Severity.NOTICE]
    assert len(alarms) > len(notices) == 1
    assert over == [(int(STEPS[6]), notices[0])]
