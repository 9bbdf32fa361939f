"""What the benchmark of host time concludes from its figures, and that a step without hooks is not seen. No time is
looked at."""

from benchmarks.host_time import STEPS, WARM, Case, Own, verdict, watched
from benchmarks.measure import median_interval


def test_the_interval_of_a_median_is_made_of_order_statistics():
    # Fewer than 6 of 20 values are below the median with probability 21,700 / 2^20 = 0.0207, fewer than 7 with 0.0577.
    assert median_interval([float(x) for x in reversed(range(1, 21))]) == (6.0, 15.0)
    # Too few for any.
    assert median_interval([float("nan")] * 5) == (
        float("-inf"),
        float("inf"),
    )


def test_a_goal_is_decided_by_a_whole_interval():
    assert [
        verdict(low, high, 0.15)
        for low, high in ((0.1, 0.15), (0.15, 0.2), (0.16, 0.2))
    ] == [
        "holds",
        "undecided",
        "missed",
    ]


def test_a_step_without_the_hooks_is_not_seen_and_counts_are_the_same_each_time():
    case = Case(Own, 1, watched(stats="max"))
    monitor = case._handle
    assert monitor.steps == WARM
    case.milliseconds(watched=False)
    assert monitor.steps == WARM
    case.milliseconds(watched=True)
    assert monitor.steps == WARM + STEPS + 1
    plain, seen = (case.operators(1, watched=on) for on in (False, True))
    assert 0 < plain < seen
    assert case.operators(1, watched=False) == plain
