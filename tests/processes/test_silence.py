"""A process that sees no attention in a step is seen on every other one."""

import functools
import json

import pytest
from tests.forked import spawn

from .silence import trained


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """By process and step."""
    folder = tmp_path_factory.mktemp("silence")
    spawn(2, functools.partial(trained, folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_process_that_sees_no_attention_is_seen_on_the_other_one(recorded):
    for steps in recorded:
        assert [step["own"]["processes"] for step in steps] == [2, 1, 2]
    calls = [[step["own"]["calls"] for step in steps] for steps in recorded]
    assert calls == [[4, 4, 4], [6, 0, 4]]


def test_a_step_reduces_two_vectors_in_a_group_of_its_own(recorded):
    steps = [step for of_process in recorded for step in of_process]
    # None in the training's groups.
    assert {step["collectives"] for step in steps} == {0}
    assert {step["vectors"] for step in steps} == {2}
