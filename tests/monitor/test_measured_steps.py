"""Steps that are measured besides the cadence's: asked for, the last of a plan, and after one that was skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qkeel import watch
from qkeel.errors import RefusedError
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


def test_the_end_of_a_training_is_measured_once_by_a_pass_that_changes_nothing() -> None:
    model, weights = small(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = small()
    with watch(model, optimizer, every=4) as monitor, pytest.raises(RefusedError, match="no step of an optimizer"):
        monitor.measure_end()
    with watch(model, optimizer, every=4) as monitor:
        for step in range(8):
            with torch.autocast("cpu", enabled=step > 5):
                model(batch(step)).float().square().mean().backward()
            optimizer.step()
            weights.append([p.clone() for p in model.parameters()])
            if step == 4:
                monitor.measure_end()  # step 4 was measured
            if step == 5:
                monitor.measure_end()  # and so step 6, which begins with these weights, is not measured again
            optimizer.zero_grad()
        model.eval()
        state = torch.get_rng_state()
        monitor.measure_end()
        monitor.measure_end()
        assert not model.training
        assert torch.equal(torch.get_rng_state(), state)
        assert monitor.history.steps.tolist() == [0, 4, 6, 8]
        end = monitor.sample
    plain.load_state_dict(model.state_dict())
    with watch(plain, every=1) as others, torch.autocast("cpu"):
        plain(batch(7))
    assert end is not None
    assert others.sample is not None
    assert end.overall("max_logit") == others.sample.overall("max_logit")
    assert "query_grad_rms" not in end.heads
    assert "query_weight_norm" in end.heads
    assert all(map(torch.equal, weights[-1], model.parameters()))


def test_a_model_that_fails_in_the_pass_at_the_end_is_watched_on() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.closed = small(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.closed:
                raise KeyError("closed")
            return self.inner(x)

    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, optimizer, every=4) as monitor:
        for step in range(3):
            model.closed = False
            model(batch(step)).square().mean().backward()
            optimizer.step()
            model.closed = True
            if step == 1:
                with pytest.raises(RefusedError, match="KeyError: 'closed'"):
                    monitor.measure_end()
        model.closed = False
        monitor.measure_end()
        assert monitor.history.steps.tolist() == [0, 3]
