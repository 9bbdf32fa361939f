"""No constant on the logits moves a verdict, by whatever way it comes, at either level of statistics."""

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.attention import Attention
from tests.training import sgd, step
from torch import nn

import qkeel
from qkeel.autopilot import Action, Ladder, Records, SiteFacts
from qkeel.frames.run_verdict import judge_run
from qkeel.metrics.verdict import bound_signs
from qkeel.monitor import Ceiling, History, replay
from qkeel.records import Heads
from qkeel.spec import ALiBi, AttentionSpec, LogN, RMSNorm, Rope, SlidingWindow, Softcap

WAYS = ("channel", "biases", "mask")


class Shifted(Attention):
    """Attention, of a kernel or by hand, whose logits have a constant: joined to q and k, made of biases, or in the mask
    beside a bias of the positions."""

    def __init__(self, draw):
        heads = draw.choice([2, 4])
        m, groups = heads * draw.choice([8, 12, 16]), draw.choice([1, heads])
        super().__init__(self.attended, m, heads, groups=groups)
        self.way, self.is_fused = draw.choice(WAYS), draw.random() < 0.5
        self.window, self.constant = draw.choice([None, 3]), 0.0
        size = draw.choice([1, 5, 20])
        for projection in (self.q, self.k):
            projection.weight.data.mul_(size)

    def operands(self, q, k):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scale, t = q.shape[-1] ** -0.5, q.shape[2]
        if self.way == "channel":
            q = F.pad(F.pad(q, (0, 1), value=1.0), (0, 7))
            k = F.pad(F.pad(k, (0, 1), value=self.constant / scale), (0, 7))
        elif self.way == "biases":
            q = F.pad(q[..., 1:], (1, 0), value=1.0)
            k = F.pad(k[..., 1:], (1, 0), value=self.constant / scale)
        apart = torch.arange(t)[:, None] - torch.arange(t)
        visible = (apart >= 0) & (apart < (self.window or len(apart)))
        bias = torch.zeros_like(apart, dtype=q.dtype)
        if self.way == "mask":
            bias = self.constant - 0.3 * apart.to(q.dtype)
        return q, k, scale, visible, bias

    def attended(self, q, k, v):
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        q, k, scale, visible, bias = self.operands(q, k)
        mask = bias.masked_fill(~visible, -torch.inf)
        if self.is_fused:
            mask = mask if self.way == "mask" else visible
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return (q @ k.mT * scale + mask).softmax(-1) @ v

    @torch.no_grad()
    def spread(self, x):
        """The largest distance of a row's largest q·k from the row's mean, in float64."""
        q, k, _ = copy.deepcopy(self).double().heads(x.double())
        q, k, scale, visible, _ = self.operands(q, k)
        z = q @ k.mT * scale
        mean = z.masked_fill(~visible, 0.0).sum(-1) / visible.sum(-1)
        return float((z.masked_fill(~visible, -torch.inf).amax(-1) - mean).max())


def alarms_of(model, x, stats):
    optimizer = sgd(model, 0.0)
    with qkeel.watch(model, optimizer, stats=stats) as monitor:
        for _ in range(2):
            step(model, optimizer, x)
    spread = float(monitor.sample.heads["logit_spread"].max())
    return spread, sorted(alarm.rule for alarm in monitor.alarms)


@pytest.mark.parametrize("seed", [7101, 7102, 7103])
def test_a_constant_by_any_way_moves_no_verdict(seed):
    for number in range(3):
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(draw.randrange(1 << 30))
        attention = Shifted(draw)
        m = attention.q.in_features
        model = nn.Sequential(nn.LayerNorm(m), attention)
        x = torch.randn(2, draw.choice([9, 40]), m)
        constant = draw.choice([1, -1]) * 10 ** draw.uniform(1, 5)
        verdicts = []
        for attention.constant in (0.0, constant):
            true = attention.spread(model[0](x).detach())
            room = 1e-4 * (1 + true) + 1e-5 * abs(attention.constant)
            health = qkeel.check(model, x)
            assert health.largest == pytest.approx(true, abs=room)
            raised = []
            for stats in (True, "max"):
                spread, rules = alarms_of(model, x, stats)
                assert spread == pytest.approx(true, abs=room)
                raised.append(rules)
            verdicts.append((health.status, raised))
            near = any(abs(true - limit) < 9 * room for limit in (100, 1000))
        assert near or verdicts[0] == verdicts[1], (attention.way, constant)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(),
        AttentionSpec(position=Rope(), norm=RMSNorm(gain="dim")),
        AttentionSpec(position=SlidingWindow(window=5), scale=LogN(train_length=9)),
        AttentionSpec(position=ALiBi()),
        AttentionSpec(cap=Softcap(3.0)),
    ],
    ids=["plain", "normed", "window", "alibi", "cap"],
)
def test_the_spread_beside_maxima_of_a_kernel_is_that_of_all_statistics(spec):
    torch.manual_seed(0)
    model = qkeel.nn.Attention(32, 4, n_kv_heads=2, spec=spec)
    x = 3 * torch.randn(2, 20, 32) + 5
    spreads = [alarms_of(model, x, stats)[0] for stats in (True, "max")]
    assert spreads[0] == pytest.approx(spreads[1], rel=1e-4)


def records(spread, top):
    steps = np.arange(4)
    heads = {"max_logit": np.full((4, 1, 2), top), "entropy": np.ones((4, 1, 2))}
    if spread is not None:
        heads["logit_spread"] = np.full((4, 1, 2), spread)
    return History(steps=steps, values={}, heads=heads, layers=("a",))


@pytest.mark.parametrize(
    ("spread", "top", "lines"),
    [
        (1500.0, 1400.0, ["qk_clip"]),
        # A clip leaves 2 nats, and 75, although a constant makes up most of the logit or lowers it.
        (1500.0, 1e4, ["qk_clip"]),
        (1500.0, 300.0, ["qk_clip"]),
        # A clip would leave less than a nat, or nothing to do.
        (1500.0, 1e5, ["lalr"]),
        (1500.0, -1e5, ["lalr"]),
        (3.0, 1e5, []),
        # As version 0.1 recorded it.
        (None, 1500.0, ["qk_clip"]),
    ],
)
def test_the_line_and_the_autopilot_fit_a_head_with_a_constant(spread, top, lines):
    history = records(spread, top)
    alarms = [x for x in replay(history) if x.rule == "ceiling 1000"]
    assert [x.remedy.partition('"')[2].partition(":")[0] for x in alarms] == lines
    health = judge_run(Heads(history.steps, dict(history.heads), ("a",)), [])
    assert health.healthy is not bool(lines)
    assert math.isclose(health.largest, top if spread is None else spread)
    facts = SiteFacts(name="a", n_heads=2)
    decisions = Ladder().decide(Records(history=history, sites=(facts,)))
    taken = [x.action for x in decisions if x.action is not Action.WATCH]
    names = {"qk_clip": Action.CLIP, "lalr": Action.RATES}
    assert taken == [names[line] for line in lines]


@pytest.mark.parametrize(
    ("logit", "spread", "sign"),
    [
        # A spread that is small anyway is not flattened.
        (10.0, 0.5, 0),
        (40.0, 3.0, 0),
        (40.0, 2.5, 1),
        # Near the bound, growth alone brings a head over it.
        (14.0, 50.0, 0),
        (12.0, 50.0, -1),
        (math.nan, 50.0, 0),
    ],
)
def test_a_clip_to_15_leaves_a_nat_and_acts_on_what_a_constant_does_not_hold_down(
    logit, spread, sign
):
    assert bound_signs(np.array([logit]), np.array([spread]), 15.0).tolist() == [sign]


@pytest.mark.parametrize(
    ("top", "acts"), [(1400.0, True), (1550.0, True), (3e3, False), (-900.0, False)]
)
def test_a_cap_is_proposed_where_it_leaves_a_spread(top, acts):
    # From it to 1,500 nats below it, 50 tanh(z / 50) leaves 50 nats or more, or none.
    rule = Ceiling(threshold=1000.0, remedy='qkeel.apply(model, "softcap:cap=50")')
    (alarm,) = replay(records(1500.0, top), [rule])
    assert ("softcap" in alarm.remedy) is acts
    assert ('group["lr"] *= 0.1' in alarm.remedy) is not acts
