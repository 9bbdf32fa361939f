"""Promises of an autopilot: bits before the first action, a resume, undoing, faults, ways of training."""

import copy
import functools

import pytest
import torch
from tests.autopilot.runs import (
    EAGER,
    EXAMPLE,
    Run,
    batches,
    equal,
    foreign,
    plain,
    run,
)
from tests.training import sgd, warned
from torch.nn import functional as F
from torch.optim import optimizer as optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import qkeel
from qkeel.autopilot import PACKED_BYTES, Action, Decision, Ladder
from qkeel.errors import AlarmWarning, InvalidValueError
from qkeel.monitor import PlannedRates

ABOUT = {"rule": "", "reason": ""}


def acted(one):
    return [d for d in one.pilot.decisions if d.action is not Action.WATCH]


def test_until_its_first_action_training_is_plain_to_the_bit_and_then_it_holds_the_logits():
    without, within = plain().train(), run().train()
    first = acted(within)[0].step
    # What is decided on the measurement of step s takes effect in step s + 2, which the loss after it shows.
    assert within.losses[: first + 3] == without.losses[: first + 3]
    assert within.losses != without.losses
    with qkeel.watch(without.model) as tops:
        without.model(EXAMPLE)
        free = max(float(s.max_logit.max()) for s in tops.read().values())
    assert within.pilot.monitor.history.values["max_logit"][-1] < 60 < free


def test_factors_on_steps_outlast_a_change_of_heads():
    # A clip of more heads is a new remedy, which goes on with the state of the old one.
    spec = "qk_clip:threshold=2,steps=matched"
    one = run(policy="ladder:threshold=20,limit=1e9", rate=0.05, every=1).train(0, 4)
    factors = []
    for heads, steps in (((0, 2), (4, 8)), ((1,), (8, 12))):
        clip = {"action": Action.CLIP, "site": "", "heads": heads, "remedy": spec}
        step = one.pilot.monitor.steps
        one.pilot.decisions.append(Decision(step=step, **clip, **ABOUT))
        one.train(*steps)
        ((handle, _),) = one.pilot.remedies.handles.values()
        factors.append(handle.state()["0.steps.q.weight:0/4x8"].clone())
    before, after = factors
    assert (before[[0, 2]] < 1).all()
    assert (before[[1, 3]] == 1).all()
    assert (after <= before).all()
    assert after[1] < 1
    assert after[3] == 1


def test_a_healthy_run_is_never_touched():
    without, within = plain(1e-3).train(), plain(1e-3)
    within.pilot = qkeel.autopilot(within.model, within.optimizer, policy=EAGER)
    within.train()
    assert not acted(within)
    # Every second step during the first four records, then every tenth, where nothing else is said.
    steps = within.pilot.recording.history.steps.tolist()
    assert steps == [0, 2, 4, 6, 8, 10, 20]
    assert equal(without.bits(), within.bits())


def test_a_checkpoint_of_the_optimizer_stays_small_and_the_run_goes_on(monkeypatch):
    """Records of many heads are thinned: a state may be written once for every parameter."""
    assert 2 * PACKED_BYTES <= 1 << 20  # with the monitor's, a megabyte at most
    monkeypatch.setattr("qkeel.autopilot.PACKED_BYTES", 1000)
    first, second = run(batch=EXAMPLE).train(0, 16), run(foreign(1), batch=EXAMPLE)
    saved = first.optimizer.state_dict()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(saved)
    packed = saved["param_groups"][0]["qkeel"]["autopilot"]
    assert len(packed) < 4 / 3 * len(first.pilot.state_dict()["about"]) + 4 * 8000
    assert acted(second) == acted(first)
    assert len(second.pilot.recording.history) < len(first.pilot.recording.history)
    assert second.train(16).pilot.remedies.handles


def test_each_decision_is_a_warning_and_an_event():
    within = run()
    with warned(AlarmWarning) as caught:
        for tokens in batches(0, 6):
            gradients = functools.partial(within._gradients, tokens, None)
            within.optimizer.step(gradients)
    decisions = [str(decision) for decision in within.pilot.decisions]
    assert decisions
    assert {*decisions} <= {*caught}
    first, *others = within.pilot.events
    assert first["event"] == "autopilot"
    assert [event["text"] for event in others] == decisions


def test_one_line_undoes_all_bit_for_bit():
    within, without = run().train(0, 14), plain()
    assert within.pilot.remedies.handles
    without.model.load_state_dict(within.model.state_dict())
    without.optimizer.load_state_dict(copy.deepcopy(within.optimizer.state_dict()))
    within.pilot.remove()
    assert not any(within.left())
    assert within.train(14).losses[14:] == without.train(14).losses
    assert equal(within.bits(), without.bits())


@pytest.mark.parametrize("steps", [3, 4])  # one of them ends with a decision
def test_a_program_that_adds_hooks_in_each_step_finds_none_of_an_autopilots_left(steps):
    within, added = run(), []

    def add(*_):
        added.append(register_optimizer_step_post_hook(lambda *_: None))

    within.optimizer.register_step_post_hook(add)
    before = len(optim._global_optimizer_post_hooks)
    within.train(0, steps)
    within.pilot.close()
    for hook in added:
        hook.remove()
    assert len(added) == steps
    assert len(optim._global_optimizer_post_hooks) == before


class Faulty(Ladder):
    """Acts once, then fails."""

    def decide(self, records):
        if len(records.history) == 6:
            raise ZeroDivisionError("a fault")
        if len(records.history) != 3:
            return ()
        lalr = {"action": Action.RATES, "site": records.sites[0].name, "remedy": "lalr"}
        return (Decision(step=records.step, **lalr, **ABOUT),)


def test_a_fault_in_the_policy_changes_nothing_further_and_says_so_once():
    within = run(policy=Faulty())
    with warned() as said:
        for tokens in batches(0, 20):
            within._gradients(tokens, None)
            within.optimizer.step()
    assert len([text for text in said if "changes nothing further" in text]) == 1
    assert [d.action for d in within.pilot.decisions] == [Action.RATES]
    assert len(within.pilot.remedies.handles) == 1
    within.pilot.remove()
    assert not any(within.left())


@pytest.mark.filterwarnings("ignore::qkeel.errors.QkeelWarning")
def test_a_step_that_a_grad_scaler_skips_is_no_step():
    within, scaler = run(), torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, tokens in enumerate(batches(0, 16)):
        logits = within.model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        scaler.scale(loss * (torch.inf if step in (5, 6) else 1.0)).backward()
        scaler.step(within.optimizer)
        scaler.update()
        within.optimizer.zero_grad()
    assert within.pilot.monitor.steps == 14
    assert acted(within)
    assert within.pilot.remedies.handles


class Both:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self, closure):
        closure()
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def test_an_optimizer_that_is_added_before_the_first_record_is_acted_on():
    """Queries and keys have an optimizer of their own, which steps before the first one."""
    model = foreign()
    own = {p for name, p in model.named_parameters() if name[:2] in ("q.", "k.")}
    first = torch.optim.SGD([p for p in model.parameters() if p not in own], lr=1e-3)
    second = torch.optim.AdamW(list(own), lr=0.5)
    planned = PlannedRates.of([1e-3] * 24)
    pilot = qkeel.autopilot(
        model, first, policy=EAGER, every=2, planned=planned, batch=EXAMPLE
    )
    pilot.add_optimizer(second)
    pilot.add_optimizer(second)  # it is there already
    Run(model, Both(second, first), pilot).train(0, 12)
    assert pilot.remedies.handles
    # The entries are the same whichever optimizer holds queries and keys.
    states = [o.state_dict()["param_groups"][0]["qkeel"] for o in (first, second)]
    names = [{name for name, state in x.items() if state} for x in states]
    assert names == [{"autopilot"}, {"qk_clip"}]
    assert states[0].keys() == states[1].keys()
    with pytest.raises(InvalidValueError):
        pilot.add_optimizer(sgd(model))
    pilot.remove()
    assert not any(o._optimizer_step_post_hooks for o in (first, second))
