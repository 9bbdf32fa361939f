"""Steps that are measured besides the cadence's: asked for, the last of a plan, and after one that was skipped."""

import json

import pytest
import torch
from tests.contract.watch.small import batch, small, train
from tests.training import adamw

from qkeel import watch
from qkeel.errors import QkeelWarning
from qkeel.monitor import PlannedRates


def test_the_last_step_of_a_plan_is_measured_and_one_that_is_asked_for():
    def ask(step, monitor):
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


def test_a_step_that_was_skipped_counts_for_the_next_one():
    """As a GradScaler skips it: the optimizer is not called, and the trainer's own count goes on."""
    model = small()
    optimizer = adamw(model)
    with watch(model, optimizer, every=3) as monitor:
        for step in range(5):
            monitor.steps = max(monitor.steps, step)
            model(batch(step)).square().mean().backward()
            if step != 3:
                optimizer.step()
            optimizer.zero_grad()
        assert monitor.history.steps.tolist() == [0, 4]
        assert monitor.steps == 5
        calls = {
            site: int(stats.n_queries[0]) for site, stats in monitor.read().items()
        }
        assert set(calls.values()) == {3 * 2 * 5}  # of steps 0, 3 and 4


class StepsInBackward(torch.optim.Optimizer):
    """As transformers' dummy: every weight has an optimizer, which steps in the backward pass; this one counts."""

    def __init__(self, optimizer_dict):
        self.optimizer_dict = optimizer_dict
        super().__init__([torch.randn(1, 1)], {"lr": 1e-2})

    def step(self, closure=None):
        pass


def test_an_optimizer_that_only_counts_the_steps_of_others_counts_them_here_too():
    model = small()
    each = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
    for p in each:
        p.register_post_accumulate_grad_hook(lambda p: each[p].step())
    optimizer = StepsInBackward(each)
    with pytest.warns(QkeelWarning, match="updated in the backward pass"):
        monitor = watch(model, optimizer)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    assert monitor.history.steps.tolist() == [0, 1, 2]
    monitor.remove()


def test_a_resumed_run_goes_on_at_the_step_that_any_of_its_optimizers_counts(
    tmp_path,
):
    """Muon keeps no count in its state; AdamW does."""

    def trained(steps, loaded, path):
        model = small()
        optimizers = [
            torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01),
            torch.optim.AdamW(p for p in model.parameters() if p.ndim != 2),
        ]
        with watch(model, optimizers, sinks=path) as monitor:
            for optimizer, state in zip(optimizers, loaded):
                optimizer.load_state_dict(state)
            for step in steps:
                model(batch(step)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            states = [optimizer.state_dict() for optimizer in optimizers]
            return monitor.history.steps.tolist(), states

    _, states = trained(range(3), [], tmp_path / "first")
    assert trained(range(3, 5), states, tmp_path / "resumed")[0] == [3, 4]
    config = json.loads((tmp_path / "resumed" / "config.json").read_text())
    assert config["optimizer"] == "Muon, AdamW"
