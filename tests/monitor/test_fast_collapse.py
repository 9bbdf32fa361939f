"""Logits that go from 0.05 to 500 within 40 steps: the cadence of `qkeel watch` sees them on their way."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qkeel
from qkeel.errors import AlarmWarning
from qkeel.monitor import Cadence, Severity
from qkeel.monitor.cadence import WHILE_LOGITS_MOVE

STEPS = 40
START, END = 0.05, 500.0


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (
            nn.Linear(16, 16, bias=False) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )

    def scale(self, factor: float) -> None:
        with torch.no_grad():
            self.query.weight.mul_(factor)


def steps_of_alarms(
    every: Cadence,
) -> tuple[list[int], dict[int, float], dict[Severity, int]]:
    """The steps that were measured, the largest logit at each, and the first step of each severity."""
    model, x = (
        OneLayer(),
        torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(1)),
    )
    with qkeel.watch(model) as seen:
        model(x)
    assert seen.sample is not None
    model.scale(START / float(seen.sample.values["max_logit"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with (
        warnings.catch_warnings(),
        qkeel.watch(model, optimizer, every=every) as monitor,
    ):
        warnings.simplefilter("ignore", AlarmWarning)
        for _ in range(STEPS):
            model(x).sum().backward()
            optimizer.step()
            model.scale((END / START) ** (1 / STEPS))
        logits = dict(
            zip(
                map(int, monitor.history.steps),
                monitor.history.values["max_logit"].tolist(),
            )
        )
        first: dict[Severity, int] = {}
        for alarm in monitor.alarms:
            first.setdefault(alarm.severity, alarm.step)
        monitor.remove()
    return sorted(logits), logits, first


def test_the_cadence_of_the_command_line_alarms_before_a_fifth_of_the_end_is_reached() -> (
    None
):
    steps, logits, first = steps_of_alarms(WHILE_LOGITS_MOVE)
    assert logits[0] == pytest.approx(START)
    assert logits[first[Severity.ALARM]] < END / 5
    assert len(steps) <= STEPS // 2 + 1  # never more than every second step
