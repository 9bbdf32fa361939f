"""A recording reads like the records appended; thinned, it keeps the ends, an even spacing and the clock."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from qkeel.errors import ShapeError
from qkeel.monitor import Recording
from qkeel.monitor.forecast import clock
from qkeel.monitor.history import thinned

LAYERS = ("a", "b")


def heads_at(i):
    return np.array([[i, -1.0, math.nan], [2.0, i / 2, 1.0]])


def record(n, *, most=512):
    recording = Recording(LAYERS, most=most)
    for i in range(n):
        recording.append(
            {"step": 3 * i, "lr": 0.1 + 0.01 * (i % 7)}, {"max_logit": heads_at(i)}
        )
    return recording


@pytest.mark.parametrize("most", [4, 5, 8, 64])
def test_a_long_recording_keeps_both_ends_an_even_spacing_and_the_clock(
    most,
):
    recording = Recording(LAYERS, most=most)
    steps, rates = np.zeros(0), np.zeros(0)
    for i in range(300):
        steps, rates = (
            np.append(steps, 3.0 * i + 5),
            np.append(rates, 0.1 + 0.01 * (i % 7)),
        )
        recording.append(
            {"step": steps[-1], "lr": rates[-1]}, {"max_logit": heads_at(i)}
        )
        seen = recording.history
        kept = np.searchsorted(steps, seen.steps)
        assert len(seen) <= most + 1
        assert kept[0] == 0
        assert list(kept[-2:]) == list(range(max(0, i - 1), i + 1))
        assert len(set(np.diff(kept[:-2]))) <= 1  # every 2^k-th
        assert seen.rates is not None
        assert_allclose(
            clock(seen.steps, seen.rates), clock(steps, rates)[kept], rtol=1e-12
        )
        np.testing.assert_array_equal(seen.heads["max_logit"][:, 0, 0], kept)
    assert len(recording) == 300
    assert len(recording.history) > most // 2


def test_a_state_of_few_bytes_continues_with_both_ends_and_the_clock():
    whole = Recording(LAYERS)
    for i in range(300):
        whole.append(
            {"step": 3 * i, "lr": 0.1 + 0.01 * (i % 7)},
            {"max_logit": heads_at(i), "entropy": heads_at(-i)},
        )
    few = Recording(LAYERS)
    few.load(thinned(whole.state(), ["max_logit"], 4096))
    before, after = whole.history, few.history
    assert after.heads.keys() == {"max_logit"}
    assert 4096 / 2 < sum(x.nbytes for x in few.state().values()) < 1.1 * 4096
    assert [*after.steps[:1], *after.steps[-2:]] == [0, 3 * 298, 3 * 299]
    assert len(few) == len(whole)
    kept = np.searchsorted(before.steps, after.steps)
    assert_allclose(
        clock(after.steps, after.rates),
        clock(before.steps, before.rates)[kept],
        rtol=1e-12,
    )
    np.testing.assert_array_equal(after.heads["max_logit"][:, 0, 0], kept)


def test_records_that_do_not_fit_are_refused_and_leave_no_trace():
    recording = record(3)
    for values, heads, what in [
        ({"step": 6}, {}, "after 6"),
        ({}, {}, "after 6"),
    ]:
        with pytest.raises(ShapeError, match=what):
            recording.append(values, heads)
    assert len(recording) == len(recording.history) == 3
    recording.append({"step": 9, "lr": 0.1}, {"max_logit": heads_at(3)})
    assert recording.history.steps[-1] == 9


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3,), (2, 4)])
def test_numbers_of_another_shape_are_refused_and_do_not_stand_for_all(shape):
    recording = record(2)
    with pytest.raises(ShapeError, match="max_logit"):
        recording.append({"step": 9}, {"max_logit": np.ones(shape)})
