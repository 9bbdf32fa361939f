"""Several processes measure as one, and none ever waits for another that has stopped."""

import pytest
from tests.forked import spawn
from tests.monitor.processes import FAST, SLOW


def test_two_processes_measure_as_one_and_stop_as_one():
    spawn(2, *FAST, seconds=500)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_two_processes_with_sharded_or_split_weights(case):
    spawn(2, case, seconds=500)
