"""Promises of an autopilot: bits before the first action, a resume, undoing, faults, ways of training."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from typing import Any

import pytest
import torch
from tests.autopilot.runs import EAGER, STEPS, Run, batches, decoder, equal, foreign, plain, run
from torch.nn import functional as F

import qkeel
from qkeel.autopilot import Action, Decision, Policy, Records
from qkeel.autopilot.policy import active_actions
from qkeel.errors import InvalidValueError
from qkeel.monitor import PlannedRates
from qkeel.monitor.gather import Transfer

ACTING = (Action.CLIP, Action.RATES)


def acted(one: Run) -> list[Decision]:
    return [d for d in one.pilot.decisions if d.action in ACTING]


@pytest.mark.parametrize("make", [pytest.param(decoder, marks=pytest.mark.slow), foreign])
def test_until_its_first_action_training_is_plain_to_the_bit_and_then_it_holds_the_logits(make: Any) -> None:
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
    effects = [event for event in within.pilot.events if event["event"] == "effect"]
    assert effects
    assert effects[0]["after"] < effects[0]["before"]


def test_factors_on_steps_outlast_a_change_of_heads() -> None:
    # A clip of more heads is a new remedy, which goes on with the state of the old one.
    one, spec = run(policy="ladder:threshold=20,limit=1e9", rate=0.05), "qk_clip:threshold=2,steps=matched"
    one.train(0, 4)
    actuator = one.pilot.actuator

    def factors() -> torch.Tensor:
        return actuator.handles[spec, 0][0].state()["0.steps.q.weight:0/4x8"]

    assert not actuator.set({(spec, ""): (Action.CLIP, (0, 2))}, 0)
    one.train(4, 8)
    before = factors().clone()
    assert (before[[0, 2]] < 1).all()
    assert (before[[1, 3]] == 1).all()
    assert not actuator.set({(spec, ""): (Action.CLIP, (0, 1, 2))}, 0)
    assert torch.equal(factors(), before)
    one.train(8, 12)
    assert (factors()[[0, 1, 2]] < before[[0, 1, 2]]).all()
    one.pilot.remove()


def test_decisions_do_not_depend_on_when_numbers_arrive_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU they are there at once; here none is until it is waited for, as on a device that is a step behind.
    at_once, often = run().train(), run(every=1).train()
    waited: list[int] = []
    result = Transfer.result
    monkeypatch.setattr(Transfer, "arrived", property(lambda _: False))
    monkeypatch.setattr(Transfer, "result", lambda one: (waited.append(1), result(one))[1])
    late, late_often = run().train(), run(every=1).train()
    assert len(waited) >= 12
    for one, other in ((at_once, late), (often, late_often)):
        assert acted(one)
        assert one.losses == other.losses
        assert one.pilot.decisions == other.pilot.decisions
    late.pilot.remove()
    assert late.pilot.recording.history.steps[-1] == STEPS - 1  # of the last record too


def test_a_healthy_run_is_never_touched() -> None:
    without, within = plain(rate=1e-3).train(), run(rate=1e-3).train()
    assert not acted(within)
    assert equal(without.bits(), within.bits())


@pytest.mark.parametrize("make", [pytest.param(decoder, marks=pytest.mark.slow), foreign])
def test_a_resumed_run_goes_on_to_equal_bits_and_equal_events(make: Any) -> None:
    example = next(batches())[:, :-1]
    whole = run(make(), batch=example).train()
    steps = sorted({d.step for d in acted(whole)})
    for stop in (1, steps[0] + 1, steps[-1] + 2):  # before the first action, right after it, with all in force
        first = run(make(), batch=example).train(0, stop)
        file = io.BytesIO()
        torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.pilot.state_dict()], file)
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
    assert within.pilot.actuator.handles
    without = plain()
    without.model.load_state_dict(within.model.state_dict())
    without.optimizer.load_state_dict(copy.deepcopy(within.optimizer.state_dict()))
    within.pilot.remove()
    hooks = [within.optimizer._optimizer_step_pre_hooks, within.optimizer._optimizer_step_post_hooks]
    hooks += [module._forward_pre_hooks for module in within.model.modules()]
    assert not any(hooks)
    assert not any("_qkeel_applied" in vars(module) for module in within.model.modules())
    assert within.train(14).losses[14:] == without.train(14).losses
    assert equal(within.bits(), without.bits())


class Faulty(Policy):
    """Acts once, then fails."""

    name, line = "faulty", "fails at the sixth record"

    def decide(self, records: Records) -> tuple[Decision, ...]:
        if len(records.history) == 3:
            site = records.sites[0].name
            return (Decision(step=records.step, action=Action.RATES, site=site, remedy="lalr", rule="r", expected="e",
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
    assert len(within.pilot.actuator.handles) == 1
    within.pilot.remove()
    assert not within.optimizer._optimizer_step_post_hooks


def _step(one: Run, step: int) -> None:
    tokens = next(batches(step, step + 1))
    F.cross_entropy(one.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def test_gradient_accumulation_counts_steps_and_measures_over_their_parts() -> None:
    without, within = plain().train(parts=2), run().train(parts=2)
    first = acted(within)[0].step
    assert within.losses[: 2 * first + 6] == without.losses[: 2 * first + 6]
    assert within.losses != without.losses
    assert within.pilot.monitor.steps == 24


def test_a_step_that_a_grad_scaler_skips_is_no_step() -> None:
    within = run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qkeel.errors.QkeelWarning)
        for step, tokens in enumerate(batches(0, 16)):
            loss = F.cross_entropy(within.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss * (float("inf") if step in (5, 6) else 1.0)).backward()
            scaler.step(within.optimizer)
            scaler.update()
            within.optimizer.zero_grad()
    assert within.pilot.monitor.steps == 14
    assert acted(within)
    assert within.pilot.actuator.handles


@pytest.mark.slow
def test_each_optimizer_gets_what_acts_on_its_own_weights() -> None:
    model = decoder()
    second = [p for name, p in model.named_parameters() if name.startswith("blocks.1.")]
    ids = {id(p) for p in second}
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if id(p) not in ids], lr=1e-3),
        torch.optim.AdamW(second, lr=0.5),
    ]
    pilot = qkeel.autopilot(model, optimizers, policy=EAGER, every=2, planned=PlannedRates.of([1e-3] * 24))
    both = Run(model, None, pilot)
    both.optimizer = _Both(optimizers)
    both.train()
    assert {d.site for d in acted(both)} == {"blocks.1.attention"}
    assert {number for _, number in both.pilot.actuator.handles} == {1}


def apart() -> Run:
    """A model whose queries and keys have an optimizer of their own, which steps before the first one."""
    model = foreign()
    own = [*model.q.parameters(), *model.k.parameters()]
    ids = {id(p) for p in own}
    first = torch.optim.SGD([p for p in model.parameters() if id(p) not in ids], lr=1e-3)
    second = torch.optim.AdamW(own, lr=0.5)
    return Run(model, _Both([second, first]))


def pilot_of(one: Run, *optimizers: torch.optim.Optimizer) -> Any:
    planned = PlannedRates.of([1e-3] * 24)
    return qkeel.autopilot(one.model, optimizers, policy=EAGER, every=2, planned=planned, batch=next(batches())[:, :-1])


def test_a_decision_that_waits_for_the_step_of_another_optimizer_is_saved() -> None:
    def fresh() -> Run:
        one = apart()
        one.pilot = pilot_of(one, *reversed(one.optimizer.optimizers))
        return one

    one, saved = fresh(), None
    for step in range(16):
        one.train(step, step + 1)
        acts = [d for d in one.pilot.decisions[min(one.pilot.carried_out) :] if d.action in ACTING]
        if saved is None and acts:
            parts = [one.model, *one.optimizer.optimizers, one.pilot]
            saved = step + 1, copy.deepcopy([part.state_dict() for part in parts])
    assert saved is not None
    stop, states = saved
    again = fresh()
    for part, state in zip([again.model, *again.optimizer.optimizers, again.pilot], states):
        part.load_state_dict(state)
    again.train(stop, 16)
    for p, q in zip(again.model.parameters(), one.model.parameters()):
        assert torch.equal(p, q)
    other = apart()
    with pytest.raises(InvalidValueError, match="an autopilot of 1 optimizers, got one of 2"):
        pilot_of(other, other.optimizer.optimizers[0]).load_state_dict(states[-1])


def test_an_optimizer_that_is_added_before_the_first_record_is_acted_on() -> None:
    one = apart()
    second, first = one.optimizer.optimizers
    one.pilot = pilot_of(one, first)
    one.pilot.add_optimizer(second)
    one.pilot.add_optimizer(second)  # it is there already
    one.train(0, 12)
    assert {number for _, number in one.pilot.actuator.handles} == {1}
    with pytest.raises(InvalidValueError, match="pass all optimizers to the autopilot at once"):
        one.pilot.add_optimizer(torch.optim.SGD(one.model.parameters(), lr=0.1))
    one.pilot.remove()
    assert not any(o._optimizer_step_post_hooks for o in (first, second))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ByPlan(Policy):
    """Clips one head of a site at the fifth record, another one at the sixth, and another site at the eighth."""

    name, line = "by_plan", "clips by plan"

    def decide(self, records: Records) -> tuple[Decision, ...]:
        plan = {5: ("blocks.1.attention", (0,)), 6: ("blocks.1.attention", (1,)), 8: ("blocks.0.attention", ())}
        site, heads = plan.get(len(records.history), (None, ()))
        spec = "qk_clip:threshold=15,steps=matched"
        about = {"action": Action.CLIP, "remedy": spec, "rule": "", "expected": "", "reason": ""}
        return () if site is None else (Decision(step=records.step, site=site, heads=heads, **about),)


def test_a_state_that_lacks_a_factor_of_a_clip_is_refused() -> None:
    one = run(policy="ladder:threshold=20,limit=1e9", batch=next(batches())[:, :-1]).train()
    state = one.pilot.state_dict()
    factors = [name for name in state if "steps." in name]
    assert factors
    del state[factors[0]]
    again = run(policy="ladder:threshold=20,limit=1e9", batch=next(batches())[:, :-1])
    with pytest.raises(InvalidValueError, match="expected the factors of 4 heads for the steps of"):
        again.pilot.load_state_dict(state)


def test_a_refusal_belongs_to_the_decision_that_was_refused() -> None:
    # The second optimizer steps late, when the policy has decided on another site, and then refuses.
    model = decoder()
    second = [p for name, p in model.named_parameters() if name.startswith("blocks.1.")]
    ids = {id(p) for p in second}
    first = torch.optim.SGD([p for p in model.parameters() if id(p) not in ids], lr=1e-3)
    late = torch.optim.SGD(second, lr=1e-3)
    sites = qkeel.find_sites(model)
    pilot = qkeel.autopilot(model, [first, late], policy=ByPlan(), every=1)
    one = Run(model, first, pilot).train(0, 10)
    with qkeel.apply(model, qkeel.remedies.lalr.LALR(heads=(("blocks.1.attention", ()),)), late, sites=sites):
        late.step()
    refused = [(r.site, r.step) for r in pilot.runner.refused if r.step >= 0]
    assert refused == [(d.site, d.step) for d in pilot.decisions if d.site == "blocks.1.attention"]
    assert len(refused) == 2
    assert {site for _, site in active_actions(pilot.decisions, pilot.runner.refused)} == {"blocks.0.attention"}
    assert [set(heads) for _, heads in one.pilot.actuator.handles.values()] == [{"blocks.0.attention"}]


class _Both:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
