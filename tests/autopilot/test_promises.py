"""Promises of an autopilot: bits before the first action, a resume, undoing, faults, ways of training."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from tests.autopilot.runs import (
    EAGER,
    Run,
    batches,
    decoder,
    equal,
    foreign,
    plain,
    run,
)
from torch.nn import functional as F

import qkeel
from qkeel.autopilot import Action, Decision, Ladder, Records
from qkeel.errors import InvalidValueError
from qkeel.monitor import PlannedRates

ACTING = (Action.CLIP, Action.RATES)


def acted(one: Run) -> list[Decision]:
    return [d for d in one.pilot.decisions if d.action in ACTING]


@pytest.mark.parametrize(
    "make", [pytest.param(decoder, marks=pytest.mark.slow), foreign]
)
def test_until_its_first_action_training_is_plain_to_the_bit_and_then_it_holds_the_logits(
    make: Any,
) -> None:
    without, within = plain(make()), run(make())
    without.train()
    within.train()
    first = acted(within)[0].step
    # What is decided on the measurement of step s takes effect in step s + 2, which the loss after it shows.
    assert within.losses[: first + 3] == without.losses[: first + 3]
    assert within.losses != without.losses
    tops = qkeel.watch(without.model)
    without.model(next(batches())[:, :-1])
    free = max(float(s.max_logit.max()) for s in tops.read().values())
    tops.remove()
    assert within.pilot.monitor.history.top("max_logit")[-1] < 60 < free


def test_factors_on_steps_outlast_a_change_of_heads() -> None:
    # A clip of more heads is a new remedy, which goes on with the state of the old one.
    one, spec = (
        run(policy="ladder:threshold=20,limit=1e9", rate=0.05, every=1),
        "qk_clip:threshold=2,steps=matched",
    )
    one.train(0, 4)

    def clip(*heads: int) -> None:
        about = {"rule": "", "reason": ""}
        step = one.pilot.monitor.steps
        one.pilot.decisions.append(
            Decision(
                step=step,
                action=Action.CLIP,
                site="",
                heads=heads,
                remedy=spec,
                **about,
            )
        )

    def factors() -> torch.Tensor:
        return one.pilot.remedies.handles[spec, 0][0].state()["0.steps.q.weight:0/4x8"]

    clip(0, 2)
    one.train(4, 8)
    before = factors().clone()
    assert (before[[0, 2]] < 1).all()
    assert (before[[1, 3]] == 1).all()
    clip(1)
    one.train(8, 12)
    assert (factors()[[0, 1, 2]] < before[[0, 1, 2]]).all()
    assert factors()[3] == 1
    one.pilot.remove()


def test_a_healthy_run_is_never_touched() -> None:
    without, within = plain(rate=1e-3).train(), run(rate=1e-3).train()
    assert not acted(within)
    assert equal(without.bits(), within.bits())


@pytest.mark.parametrize(
    "make", [pytest.param(decoder, marks=pytest.mark.slow), foreign]
)
def test_a_resumed_run_goes_on_to_equal_bits_and_equal_events(make: Any) -> None:
    example = next(batches())[:, :-1]
    whole = run(make(), batch=example).train()
    steps = sorted({d.step for d in acted(whole)})
    for stop in (
        1,
        steps[0] + 1,
        steps[-1] + 2,
    ):  # before the first action, right after it, with all in force
        first = run(make(), batch=example).train(0, stop)
        file = io.BytesIO()
        torch.save(
            [
                first.model.state_dict(),
                first.optimizer.state_dict(),
                first.pilot.state_dict(),
            ],
            file,
        )
        file.seek(0)
        model, optimizer, pilot = torch.load(file)
        second = run(make(1), batch=example)
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        second.pilot.load_state_dict(pilot)
        second.train(stop)
        assert first.losses + second.losses == whole.losses
        assert equal(second.bits(), whole.bits())
        assert second.pilot.decisions == whole.pilot.decisions
        assert second.pilot.events == whole.pilot.events


def test_one_line_undoes_all_bit_for_bit() -> None:
    within = run().train(0, 14)
    assert within.pilot.remedies.handles
    without = plain()
    without.model.load_state_dict(within.model.state_dict())
    without.optimizer.load_state_dict(copy.deepcopy(within.optimizer.state_dict()))
    within.pilot.remove()
    hooks = [
        within.optimizer._optimizer_step_pre_hooks,
        within.optimizer._optimizer_step_post_hooks,
    ]
    hooks += [module._forward_pre_hooks for module in within.model.modules()]
    assert not any(hooks)
    assert not any(
        "_qkeel_applied" in vars(module) for module in within.model.modules()
    )
    assert within.train(14).losses[14:] == without.train(14).losses
    assert equal(within.bits(), without.bits())


class Faulty(Ladder):
    """Acts once, then fails."""

    def decide(self, records: Records) -> tuple[Decision, ...]:
        if len(records.history) == 3:
            site = records.sites[0].name
            return (Decision(step=records.step, action=Action.RATES, site=site, remedy="lalr", rule="r",
                             reason="r"),)  # fmt: skip
        if len(records.history) == 6:
            raise ZeroDivisionError("a fault")
        return ()


def test_a_fault_in_the_policy_changes_nothing_further_and_says_so_once() -> None:
    within = run(policy=Faulty())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(20):
            _step(within, step)
    assert len([w for w in said if "changes nothing further" in str(w.message)]) == 1
    assert [d.action for d in within.pilot.decisions] == [Action.RATES]
    assert len(within.pilot.remedies.handles) == 1
    within.pilot.remove()
    assert not within.optimizer._optimizer_step_post_hooks


def _step(one: Run, step: int) -> None:
    tokens = next(batches(step, step + 1))
    F.cross_entropy(
        one.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def test_a_step_that_a_grad_scaler_skips_is_no_step() -> None:
    within = run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qkeel.errors.QkeelWarning)
        for step, tokens in enumerate(batches(0, 16)):
            loss = F.cross_entropy(
                within.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            scaler.scale(loss * (float("inf") if step in (5, 6) else 1.0)).backward()
            scaler.step(within.optimizer)
            scaler.update()
            within.optimizer.zero_grad()
    assert within.pilot.monitor.steps == 14
    assert acted(within)
    assert within.pilot.remedies.handles


def apart() -> Run:
    """A model whose queries and keys have an optimizer of their own, which steps before the first one."""
    model = foreign()
    own = [*model.q.parameters(), *model.k.parameters()]
    ids = {id(p) for p in own}
    first = torch.optim.SGD(
        [p for p in model.parameters() if id(p) not in ids], lr=1e-3
    )
    second = torch.optim.AdamW(own, lr=0.5)
    return Run(model, _Both([second, first]))


def pilot_of(one: Run, *optimizers: torch.optim.Optimizer) -> Any:
    planned = PlannedRates.of([1e-3] * 24)
    return qkeel.autopilot(
        one.model,
        optimizers,
        policy=EAGER,
        every=2,
        planned=planned,
        batch=next(batches())[:, :-1],
    )


def test_an_optimizer_that_is_added_before_the_first_record_is_acted_on() -> None:
    one = apart()
    second, first = one.optimizer.optimizers
    one.pilot = pilot_of(one, first)
    one.pilot.add_optimizer(second)
    one.pilot.add_optimizer(second)  # it is there already
    one.train(0, 12)
    assert {number for _, number in one.pilot.remedies.handles} == {1}
    with pytest.raises(
        InvalidValueError, match="pass all optimizers to the autopilot at once"
    ):
        one.pilot.add_optimizer(torch.optim.SGD(one.model.parameters(), lr=0.1))
    one.pilot.remove()
    assert not any(o._optimizer_step_post_hooks for o in (first, second))


class _Both:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
