"""Steps that are measured besides the cadence's: asked for, the last of a plan, and after one that was skipped."""

from __future__ import annotations

import torch

from qkeel import watch
from qkeel.monitor import PlannedRates
from qkeel.monitor.monitor import Monitor

from .small import batch, small, train


def test_the_last_step_of_a_plan_is_measured_and_one_that_is_asked_for() -> None:
    def ask(step: int, monitor: Monitor) -> None:
        if step == 1:
            monitor.measure_next()  # too late for step 1, whose forward pass is over: nothing of it is recorded

    plan = PlannedRates.of([1e-2] * 6)
    _, _, monitor = train(lambda m, o: watch(m, o, every=4, planned=plan), steps=6)
    assert monitor.history.steps.tolist() == [0, 4, 5]
    _, _, monitor = train(lambda m, o: watch(m, o, every=4), steps=6, during=ask)
    assert monitor.history.steps.tolist() == [0, 4]
    model = small()
    with watch(model, every=4) as monitor:
        for step in range(6):
            if step == 2:
                monitor.measure_next()
            model(batch(step)).square().mean().backward()
        assert monitor.history.steps.tolist() == [0, 2, 4]


def test_a_step_that_was_skipped_counts_for_the_next_one() -> None:
    """As a GradScaler skips it: the optimizer is not called, and the trainer's own count goes on."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer, every=3) as monitor:
        for step in range(5):
            monitor.steps = max(monitor.steps, step)
            model(batch(step)).square().mean().backward()
            if step != 3:
                optimizer.step()
            optimizer.zero_grad()
        assert monitor.history.steps.tolist() == [0, 4]
        assert monitor.steps == 5
        calls = {site: int(stats.n_queries[0]) for site, stats in monitor.read().items()}
        assert set(calls.values()) == {3 * 2 * 5}  # of steps 0, 3 and 4
