"""The timing of all benchmarks: turns, ratios, and the clock."""

import time

from benchmarks.timing import interleave, processor_ms


def test_every_case_is_called_once_a_round_in_an_order_that_turns_round():
    called = []
    cases = {name: (lambda name=name: called.append(name)) for name in "abc"}
    interleave(cases, "a", rounds=2, calls=2, warmup=1)
    assert "".join(called) == "abc" + "aabbcc" + "ccbbaa"


def test_a_ratio_is_that_of_its_own_round():
    ticks = iter([1.0, 3.0, 8.0, 2.0])  # a and b, then b and a

    def clock(case, calls):
        return next(ticks)

    a, b = interleave(
        {"a": lambda: None, "b": lambda: None}, "a", rounds=2, warmup=0, clock=clock
    )
    assert (a.times, a.ratios) == ([1.0, 2.0], [1.0, 1.0])
    assert (b.times, b.ratios) == ([3.0, 8.0], [3.0, 4.0])
    assert b.as_dict() == {
        "case": "b",
        "cpu_ms": [3.0, 5.5, 8.0],
        "ratio": [3.0, 3.5, 4.0],
    }


def test_the_clock_of_a_processor_counts_per_call(
    monkeypatch,
):
    seconds = iter([1.0, 1.5])
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    assert processor_ms(lambda: None, calls=5) == 100.0
