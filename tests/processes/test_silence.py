"""What a monitor records of itself covers all processes: one that sees nothing is seen on every one of them."""

import functools
import json

import pytest
from tests.forked import spawn

import qkeel
from qkeel.monitor import Over, replay
from qkeel.records import MONITOR_EXTREMES, MONITOR_FIELDS

from .silence import trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("silence")
    spawn(2, functools.partial(trained, folder))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """By process and step."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_process_has_the_smallest_and_the_largest_number_of_all(
    found,
):
    for steps in zip(*found, strict=True):
        owns = [step["own"] for step in steps]
        for own in owns:
            assert set(own) == {*MONITOR_FIELDS, *MONITOR_EXTREMES}
            for name in MONITOR_FIELDS:
                every = [one[name] for one in owns]
                assert (own[f"{name}_min"], own[f"{name}_max"]) == pytest.approx(
                    (min(every), max(every)), rel=1e-6
                )


def test_a_process_that_sees_no_attention_is_seen_on_the_other_one(
    found,
):
    first, second = found
    for steps in found:
        assert [(x["own"]["calls_min"], x["own"]["calls_max"]) for x in steps] == [
            (4, 6),
            (0, 4),
            (4, 4),
        ]
        assert [(x["own"]["silent_min"], x["own"]["silent_max"]) for x in steps] == [
            (0, 0),
            (0, 2),
            (0, 0),
        ]
        assert steps[1]["keys"]["monitor/silent_max"] == 2
    assert [x["own"]["calls"] for x in first] == [4, 4, 4]
    assert [x["own"]["calls"] for x in second] == [6, 0, 4]


def test_a_step_reduces_two_vectors_in_a_group_of_its_own(found):
    assert {step["collectives"] for steps in found for step in steps} == {
        0
    }  # none in the training's groups
    assert {step["vectors"] for steps in found for step in steps} == {2}


def test_the_numbers_are_in_the_files_on_the_page_and_in_rules(folder):
    lines = [
        json.loads(line)
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["monitor_silent_max"] for line in lines] == [0, 2, 0]
    run = qkeel.load(folder / "run")
    assert run.history.frame("steps")["monitor_calls_min"].tolist() == [4, 0, 4]
    (alarm,) = replay(run.history, [Over(field="monitor_silent_max", threshold=0.5)])
    assert alarm.step == 1
