"""Steps that are measured besides the cadence's: asked for, the last of a plan, and after one that was skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.watch.small import batch, small, train
from torch import nn

from qkeel import watch
from qkeel.autopilot import attach
from qkeel.errors import QkeelWarning, RefusedError
from qkeel.monitor import PlannedRates
from qkeel.monitor.monitor import Monitor


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
        calls = {
            site: int(stats.n_queries[0]) for site, stats in monitor.read().items()
        }
        assert set(calls.values()) == {3 * 2 * 5}  # of steps 0, 3 and 4


def test_the_numbers_of_steps_go_on_in_a_run_that_is_resumed() -> None:
    """The script loads its checkpoint after `watch`, as late as it can: before the first pass."""

    def trained(
        steps: Iterable[int], loaded: dict[str, Any] | None
    ) -> tuple[list[int], dict[str, Any]]:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        with watch(model, optimizer, every=2) as monitor:
            if loaded is not None:
                optimizer.load_state_dict(loaded)
            for step in steps:
                model(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return monitor.history.steps.tolist(), optimizer.state_dict()

    found, state = trained(range(3), None)
    assert found == [0, 2]
    assert trained(range(3, 7), state)[0] == [4, 6]
    assert trained(range(3), None)[0] == [
        0,
        2,
    ]  # no checkpoint was there: from the beginning


def test_the_numbers_of_steps_go_on_where_watching_begins_late_unless_they_are_set() -> (
    None
):
    for own in (None, 100):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(5):
            model(batch(step)).square().mean().backward()
            optimizer.step()
        with watch(model, optimizer, every=1) as monitor:
            if own is not None:
                monitor.steps = own
            loop(monitor, optimizer, range(3))
            assert monitor.history.steps.tolist() == (
                [5, 6, 7] if own is None else [100, 101, 102]
            )


def test_the_end_of_a_training_is_measured_once_by_a_pass_that_changes_nothing() -> (
    None
):
    model, weights = small(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = small()
    with (
        watch(model, optimizer, every=4) as monitor,
        pytest.raises(RefusedError, match="no finished step"),
    ):
        monitor.measure_end()
    with watch(model, optimizer, every=4) as monitor:
        for step in range(8):
            with torch.autocast("cpu", enabled=step > 5):
                model(batch(step)).float().square().mean().backward()
            optimizer.step()
            weights.append([p.clone() for p in model.parameters()])
            if step == 4:
                monitor.measure_end()  # the state after five steps, although the fifth was measured from its beginning
            if step == 5:
                monitor.measure_end()  # and so step 6, which begins with these weights, is not measured again
            optimizer.zero_grad()
        model.eval()
        state = torch.get_rng_state()
        monitor.measure_end()
        monitor.measure_end()
        assert not model.training
        assert torch.equal(torch.get_rng_state(), state)
        assert monitor.history.steps.tolist() == [0, 4, 5, 6, 8]
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


def loop(
    monitor: Monitor,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[int] = range(6),
) -> None:
    for seed in batches:
        monitor.model(batch(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watched(**how: Any) -> tuple[Any, torch.optim.Optimizer, Monitor]:
    """The small model, with a hook behind the step that was put on later than the monitor, as a clip may be."""

    def shrink(*_: object) -> None:
        with torch.no_grad():
            model.blocks[0].q.weight.mul_(0.9)
            model.norm.bias.add_(0.1)

    model: Any = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer, **how)
    optimizer.register_step_post_hook(shrink)
    return model, optimizer, monitor


def test_a_plain_loop_ends_with_the_record_that_a_cadence_would_make() -> None:
    """By the end of `with`, by close() and by an autopilot; it changes nothing, and the last batch is let go."""
    model, optimizer, cadence = watched(every=6)
    loop(cadence, optimizer, [*range(6), 5])
    expected = cadence.sample
    for way in ("with", "close", "autopilot", "with autopilot"):
        model, optimizer, monitor = watched(every=4)
        with ExitStack() as around:
            if way == "with":
                around.enter_context(monitor)
            elif "autopilot" in way:
                pilot = attach(monitor, optimizer)
                around.callback(
                    pilot.close
                ) if way == "autopilot" else around.enter_context(pilot)
            else:
                around.callback(monitor.close)
            loop(monitor, optimizer)
            before, state = (
                [p.clone() for p in model.parameters()],
                torch.get_rng_state(),
            )
            model.eval()
            (tap,) = monitor._models.taps
            assert tap.latest is not None
        monitor.close()
        assert tap.latest is None
        assert not model.training
        assert torch.equal(torch.get_rng_state(), state)
        assert all(map(torch.equal, before, model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        assert monitor.history.steps.tolist()[-2:] == [4, 6]
        assert monitor.sample is not None
        assert expected is not None
        assert monitor.sample.heads.keys() == {
            name for name in expected.heads if "grad" not in name
        }
        for name, values in monitor.sample.heads.items():
            assert np.array_equal(values, expected.heads[name], equal_nan=True), (
                way,
                name,
            )


def test_where_the_end_is_not_measured_one_sentence_says_so() -> None:
    def interrupted(monitor: Monitor, model: Any) -> None:
        with pytest.raises(KeyboardInterrupt), monitor:
            raise KeyboardInterrupt

    def handled(monitor: Monitor, model: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            monitor.close()

    def averaged(monitor: Monitor, model: Any) -> None:
        for p in model.parameters():
            p.data.mul_(0.5)
        monitor.close()
        monitor.close()

    def no_more_passes(monitor: Monitor, model: Any) -> None:
        model.forward = None
        monitor.close()

    def in_a_step(monitor: Monitor, model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: monitor.close())
        optimizer.step()

    def removed(monitor: Monitor, model: Any) -> None:
        monitor.remove()

    ends = {
        interrupted: None,
        handled: "an exception is being handled",
        averaged: "its weights were changed after its last step",
        no_more_passes: "the model failed in an extra pass: TypeError",
        in_a_step: "no finished step",
        removed: None,
    }
    for end, reason in ends.items():
        model, optimizer, monitor = watched(every=4)
        loop(monitor, optimizer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            end(monitor, model)
        assert monitor.history.steps.tolist() == [0, 4], end
        expected = (
            [] if reason is None else [f"Small is measured up to step 4 of 6: {reason}"]
        )
        assert [
            str(one.message)[: len(expected[0])] if expected else str(one.message)
            for one in said
        ] == expected, end


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


class StepsInBackward(torch.optim.Optimizer):
    """As transformers' dummy: every weight has an optimizer, which steps in the backward pass; this one counts."""

    def __init__(
        self, optimizer_dict: dict[torch.Tensor, torch.optim.Optimizer]
    ) -> None:
        self.optimizer_dict = optimizer_dict
        super().__init__([torch.randn(1, 1)], {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:
        pass


def test_an_optimizer_that_only_counts_the_steps_of_others_counts_them_here_too() -> (
    None
):
    model = small()
    each = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
    for p in each:
        p.register_post_accumulate_grad_hook(lambda p: each[p].step())
    optimizer = StepsInBackward(each)  # type: ignore[arg-type]
    with pytest.warns(QkeelWarning, match="updated in the backward pass"):
        monitor = watch(model, optimizer)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    assert monitor.history.steps.tolist() == [0, 1, 2]
    monitor.remove()
