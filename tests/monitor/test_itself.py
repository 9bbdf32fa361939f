"""What the monitor records of itself, so that its silence is seen."""

import json

import torch
from tests.training import sgd

import qkeel
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
    optimizer = sgd(model)
    found = []
    with qkeel.watch(model, optimizer, sinks=tmp_path / "run") as monitor:
        for times in (1, 3, 0):
            model.times = times
            for _ in range(2):  # micro-batches
                model(torch.randn(1, 4, 8)).sum().backward()
            optimizer.step()
            found.append(dict(monitor.sample.monitor))
        keys = monitor.sample.summaries()
    assert [one["calls"] for one in found] == [4, 8, 2]
    assert [one["silent"] for one in found] == [0, 0, 1]
    assert all(one["milliseconds"] > 0 for one in found)
    assert all(set(one) == set(MONITOR_FIELDS) for one in found)
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
