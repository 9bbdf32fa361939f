"""What the monitor records of itself, so that its silence is seen."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import qkeel
from qkeel.monitor import LoggingSink, Sample
from qkeel.records import MONITOR_FIELDS, explain_field


class Model(torch.nn.Module):
    """Two attentions; the second may be left out, or called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = qkeel.nn.Attention(8, 2), qkeel.nn.Attention(8, 2)
        self.times = 1

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = self.second(x)
        return x


def test_each_step_counts_its_own_calls_and_names_sites_that_stay_silent(
    tmp_path,
):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with qkeel.watch(model, optimizer, sinks=tmp_path / "run") as monitor:
        for times in (1, 3, 0):
            model.times = times
            for _ in range(2):  # micro-batches
                model(torch.randn(1, 4, 8)).sum().backward()
            optimizer.step()
            assert monitor.sample is not None
            found.append(dict(monitor.sample.monitor))
        table, keys = monitor.table(), monitor.sample.summaries()
    assert [one["calls"] for one in found] == [4, 8, 2]
    assert [one["silent"] for one in found] == [0, 0, 1]
    assert {(one["sites"], one["missed"], one["errors"]) for one in found} == {
        (2, 0, 0)
    }
    assert all(one["milliseconds"] > 0 for one in found)
    assert all(set(one) == set(MONITOR_FIELDS) for one in found)
    assert "monitor: 2 sites, 2 calls, 0 missed, 1 silent, 0 errors" in table
    assert keys["monitor/silent"] == 1
    lines = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["monitor_calls"] for line in lines][:3] == [4, 8, 2]
    assert (
        explain_field("monitor_silent")
        == "sites without a call in the step [attention layers]"
    )


def test_the_time_of_untrained_passes_is_in_the_record_of_their_step():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples: list[Sample] = []

    class Kept(LoggingSink):
        def write(self, sample):
            samples.append(sample)

    with qkeel.watch(model, optimizer, sinks=Kept()):
        for _ in range(3):
            with torch.no_grad():  # a reference
                model(torch.randn(1, 4, 8))
            model(torch.randn(1, 4, 8)).sum().backward()
            optimizer.step()
        with torch.no_grad():  # an evaluation after the last step
            model(torch.randn(1, 4, 8))
    times = [(x.phase, x.monitor.get("milliseconds", 0.0) > 0) for x in samples]
    assert times == [*[("eval", False), ("train", True)] * 3, ("eval", True)]


class Broken(LoggingSink):
    """Fails at its first sample."""

    def write(self, sample):
        raise OSError("the disk is full")


def test_a_sink_that_failed_is_an_error_of_all_later_steps():
    model = Model()
    with qkeel.watch(model, sinks=Broken()) as monitor:
        errors, said = list[float](), list[bool]()
        for _ in range(3):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                model(torch.randn(1, 4, 8))
                assert monitor.sample is not None
            said.append(any("the disk is full" in str(one.message) for one in told))
            errors.append(monitor.sample.monitor["errors"])
    assert said == [True, False, False]
    assert errors == [0, 1, 1]


def test_a_table_says_that_the_monitor_switched_itself_off():
    model = Model()
    monitor = qkeel.watch(model)
    model(torch.randn(1, 4, 8))
    assert monitor.sample is not None

    def fail():
        raise RuntimeError("broken by the test")

    with pytest.warns(UserWarning, match="switched itself off"):
        monitor._guard(fail)
    assert (
        "the monitor switched itself off after a fault: RuntimeError: broken by the test"
        in monitor.table()
    )
