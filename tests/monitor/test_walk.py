"""The walk of one watched number through the objects of the monitor: calls, step, processes, record, rules, sinks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from tests.monitor.small import batch, small
from torch import Tensor

from qkeel import watch
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.monitor import Sample, Sink
from qkeel.monitor.measure import call_statistics

MARK = 12345.0  # the largest logit that the measured calls are made to report
ROOMS = ("qkeel.monitor", "qkeel.sites.tap", __name__)


def holds(value: object, depth: int = 5) -> bool:
    """Whether the marked number is in a value, in a container of values, or in a frozen dataclass of them."""
    if isinstance(value, (Tensor, np.ndarray)):
        return bool((torch.as_tensor(value).double() == MARK).any())
    if isinstance(value, float):
        return value == MARK
    if not depth:
        return False
    if isinstance(value, Mapping):
        return any(holds(each, depth - 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds(each, depth - 1) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value))
    return False


class Keep(Sink):
    """A sink at the end of the walk."""

    def open(self, about: Mapping[str, Any]) -> None:
        pass

    def write(self, sample: Sample) -> None:
        pass

    def alarm(self, alarm: object) -> None:
        pass

    def close(self, complete: bool) -> None:
        pass


class Walk:
    """The objects, in order, whose methods had the number: each call counts once, when it first has it.

    A call has it as an argument, or as what another call returned to it. Values such as LogitStats are no objects here.
    """

    def __init__(self) -> None:
        self.passed: list[object] = []
        self._counted: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        if event == "call" and in_rooms(frame) and holds(list(frame.f_locals.values())):
            self._pass(frame)
        if event == "return" and holds(result):
            for one in (frame, frame.f_back):
                if one is not None and in_rooms(one):
                    self._pass(one)

    def _pass(self, frame: FrameType) -> None:
        owner = frame.f_locals.get("self")
        if owner is None or dataclasses.is_dataclass(owner) or frame in self._counted:
            return
        self._counted.append(frame)
        if not self.passed or self.passed[-1] is not owner:
            self.passed.append(owner)


def in_rooms(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith(ROOMS) and not isinstance(frame.f_locals.get("self"), Walk)


def walked(monkeypatch: Any, **options: Any) -> list[object]:
    """The walk of the number in the second measured step: in the first the sites are found."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original, calls = call_statistics.statistics, []

    def marked(*args: Any) -> LogitStats:
        stats = original(*args)
        calls.append(args)
        top = torch.full_like(stats.max_logit, MARK)
        return dataclasses.replace(stats, max_logit=top) if len(calls) == 1 else stats

    walk = Walk()
    with watch(model, optimizer, sinks=Keep(), **options) as monitor:
        for step in range(2):
            if step:
                monkeypatch.setattr(call_statistics, "statistics", marked)
                sys.setprofile(walk)
            model(batch(step)).sum().backward()
            optimizer.step()
        sys.setprofile(None)
        assert monitor.active
        assert monitor.sample is not None
        assert monitor.sample.overall("max_logit") == MARK
    return walk.passed


def test_one_watched_number_passes_no_object_twice(monkeypatch: Any) -> None:
    passed = walked(monkeypatch, rules=[])
    names = [type(each).__name__ for each in passed]
    assert len({*map(id, passed)}) == len(passed), names
    assert names == [
        "CallStatistics",
        "_Pass",
        "Tap",
        "WatchedModels",
        "StepEnd",
        "ProcessGroup",
        "Transfer",
        "Arrivals",
        "Journal",
        "Keep",
        "Recording",
        "AlarmLog",
    ]


def test_the_monitor_holds_its_stages_and_little_else() -> None:
    model = small()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        assert len(vars(monitor)) <= 12
