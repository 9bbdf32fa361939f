"""The search of a split model: a fault at any instant of it, and processes that come to it late, on all processes."""

import pytest
from tests.forked import spawn

from .searching import (
    a_fault_after_the_search,
    faults_with_fully_shard,
    faults_with_split_heads,
    late_processes,
    some_faults,
)


@pytest.mark.timeout(900)
def test_a_fault_of_one_process_and_a_late_one_leave_nobody_waiting():
    spawn(2, a_fault_after_the_search, some_faults, late_processes, seconds=800)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [faults_with_fully_shard, faults_with_split_heads])
def test_a_fault_at_every_instant(case):
    spawn(2, case, seconds=800)
