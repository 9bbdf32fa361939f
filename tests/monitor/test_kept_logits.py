"""An alarm says what its line would do to the head, and that is what the line does when it is typed."""

import re

import numpy as np
import pytest
import torch
from tests.attention import Attention, fused_causal, written_causal
from tests.sites.test_logit_sample import WORDS
from torch import nn

import qkeel
from qkeel.monitor import Ceiling, History, replay
from qkeel.monitor.kept_logits import KeptLogits
from qkeel.sites.logit_sample import LogitSample
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

SIZE = 32


class Normed(Attention):
    """Its queries and keys are normed, so that no clip of weights holds their logits."""

    def __init__(self, attend):
        super().__init__(attend, SIZE, 4)
        self.norms = nn.ModuleList(nn.RMSNorm(SIZE // 4) for _ in range(2))

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.norms[0](q), self.norms[1](k), v


def raised(model, x, factor, rules):
    """The alarms of three steps that change no weight, after which the second layer's logits are multiplied."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.watch(model, optimizer, rules=rules) as monitor:
        for step in range(4):
            if step == 3:
                enlarge(model[1], factor)
            model(x).square().mean().backward()
            optimizer.step()
    return monitor


@torch.no_grad()
def enlarge(layer, factor):
    (layer.norms[0] if isinstance(layer, Normed) else layer.q).weight.mul_(factor)


def model_of(normed, attend):
    torch.manual_seed(0)
    layers = [
        Normed(attend) if normed else Attention(attend, SIZE, 4, bias=False)
        for _ in range(3)
    ]
    model = nn.Sequential(*layers)
    # The second layer is over 30 nats from the start, and the largest.
    for layer in layers:
        enlarge(layer, 10.0 if normed else 1.0)
    enlarge(model[1], 3.0 if normed else 2000.0)
    return model


@pytest.mark.parametrize("attend", [fused_causal, written_causal])
@pytest.mark.parametrize("normed", [False, True])
def test_the_line_does_what_the_alarm_says(normed, attend):
    model, x = model_of(normed, attend), torch.randn(1, 30, SIZE)
    monitor = raised(model, x, 20.0, None)
    (alarm,) = [x for x in monitor.alarms if x.rule == "ceiling 100"]
    assert (alarm.step, alarm.layer) == (3, "1")
    assert alarm.effect in str(alarm)
    name = "softcap 50 would" if normed else "a clip to 15 would"
    assert alarm.effect.startswith(name)
    entropy, capped, passed, mended = map(float, WORDS.search(alarm.effect).groups())
    heads = monitor.history.heads
    largest = heads["max_logit"][-1, 1, alarm.head]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if normed:
        spec = re.search(r'"([^"]+)"', alarm.remedy)[1]
        qkeel.apply(model, spec, optimizer, batch=x)
    else:
        enlarge(model[1], 15 / largest)
    with qkeel.watch(model, optimizer, rules=[]) as after:
        model(x).square().mean().backward()
        optimizer.step()
    for values, before, later in (
        ("entropy", entropy, capped),
        ("softmax_gradient", passed, mended),
    ):
        # The first row sees one key and counts for the entropy alone.
        share = 30 / 29 if values == "entropy" else 1.0
        for record, said in ((heads, before), (after.history.heads, later)):
            number = share * record[values][-1, 1, alarm.head]
            assert said == pytest.approx(number, rel=0.06, abs=1e-3), values


def test_a_reference_pass_between_says_nothing_of_the_trained_one():
    effects = []
    for has_reference in (False, True):
        model, x = model_of(False, fused_causal), torch.randn(1, 30, SIZE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with qkeel.watch(model, optimizer) as monitor:
            for step in range(4):
                if step == 3:
                    enlarge(model[1], 20.0)
                model(x).square().mean().backward()
                if has_reference:
                    # Its role is open until the step: it could still be trained.
                    model(x / 30).detach()
                optimizer.step()
        (alarm,) = [x for x in monitor.alarms if x.rule == "ceiling 100"]
        effects.append(alarm.effect)
    assert effects[0]
    assert effects[0] == effects[1]


def test_nothing_is_said_where_a_line_has_no_bound_or_the_layer_was_not_kept():
    model, x = model_of(False, fused_causal), torch.randn(1, 30, SIZE)
    # No record came before the alarm; and one that was under 30 nats.
    enlarge(model[1], 20.0)
    assert {a.effect for a in raised(model, x, 1.0, None).alarms} == {""}
    low = model_of(False, fused_causal)
    enlarge(low[1], 0.2)
    assert {a.effect for a in raised(low, x, 100.0, None).alarms} == {""}
    rule = Ceiling(threshold=100.0, remedy="lower the rate")
    (alarm,) = raised(model_of(False, fused_causal), x, 20.0, [rule]).alarms
    assert alarm.effect == ""


@pytest.mark.parametrize(("n_heads", "says"), [(2, True), (4, False)])
def test_heads_of_another_process_are_not_taken_for_those_of_the_call(n_heads, says):
    logits, kept = np.full((1, 1, n_heads), 200.0), KeptLogits()
    history = History(
        steps=np.arange(1), values={}, heads={"max_logit": logits}, layers=("a",)
    )
    kept.choose(history)
    q = 20 * torch.randn(1, 2, 9, 8)
    sample = LogitSample.of(make_call(AttentionSpec(), q, q, q))
    kept.keep(("b", sample))
    (alarm,) = replay(history, [Ceiling(threshold=100.0)])
    assert kept.effect(alarm, history) == ""
    kept.keep(("a", sample))
    assert bool(kept.effect(alarm, history)) is says
