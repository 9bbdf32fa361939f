"""What an active clip or a cap holds is not growing, and is judged as it enters the softmax."""

import dataclasses

import numpy as np
import torch
from tests.training import sgd, step

import qkeel
from qkeel.frames.run_verdict import judge_run
from qkeel.metrics import Status
from qkeel.monitor import History, replay
from qkeel.monitor.alarms import LOWER_RATE, hold, logit_limits
from qkeel.records import Heads

STEPS = np.arange(0, 400, 10)
# It grows in proportion to the step, and ends at 1,170.
RISING = 3.0 * STEPS
# A clip takes hold at step 120.
CLIPPED = np.where(STEPS < 120, 1.0 * STEPS, 120 + 20 * np.sin(STEPS))
CLIP = {"a": "qk_clip:threshold=100"}


def history(*layers, limits=None):
    values = np.stack(layers, 1)[..., None]
    return History(
        steps=STEPS,
        values={},
        heads={"max_logit": values, "capped_max_logit": values},
        layers=("a", "b")[: len(layers)],
        limits=limits or {},
    )


def raised(records):
    return {alarm.rule: f"{alarm.layer}: {alarm.meaning}" for alarm in replay(records)}


def test_a_head_that_a_clip_holds_at_its_bound_is_not_growing():
    assert "growth" in raised(history(CLIPPED))
    held = raised(history(CLIPPED, limits=CLIP))
    assert list(held) == ["ceiling 100"]
    assert held["ceiling 100"].endswith("with qk_clip:threshold=100 active")


def test_a_head_that_outgrows_its_clip_is_told_with_the_clip():
    assert {"growth", "forecast 1000"} <= set(raised(history(RISING)))
    escaping = raised(history(RISING, limits=CLIP))
    assert list(escaping) == ["ceiling 100", "ceiling 1000"]
    assert "with qk_clip:threshold=100 active" in escaping["ceiling 1000"]


def test_a_cap_bounds_what_enters_the_softmax_and_how_far_it_may_grow():
    records = history(RISING)
    for cap, expected in ((20.0, []), (300.0, ["ceiling 100"])):
        heads = dict(records.heads)
        heads["capped_max_logit"] = cap * np.tanh(heads["max_logit"] / cap)
        limits = {"a": f"a cap of {cap:g}"}
        capped = dataclasses.replace(records, heads=heads, limits=limits)
        assert list(raised(capped)) == expected
        health = judge_run(Heads(steps=STEPS, values=heads, layers=("a",)), [])
        assert health.status is Status.HEALTHY
        assert health.largest <= cap
        assert "after a cap; " in health.sentence


def test_the_active_remedy_is_named_in_advice_and_description(tmp_path):
    model = qkeel.nn.Attention(d_model=8, n_heads=2)
    optimizer = sgd(model)
    handle = qkeel.apply(model, "qk_clip:threshold=100,steps=matched", optimizer)
    with qkeel.watch(model, optimizer, sinks=tmp_path / "run") as monitor:
        step(model, optimizer, torch.randn(2, 5, 8))
        text = "qk_clip:steps=matched,threshold=100"
        assert logit_limits(monitor.sites) == {"": text}
        advice = hold(model, monitor.sites)
        assert advice == f"{LOWER_RATE}  # {text} is active"
    config = qkeel.records.RunDirectory(tmp_path / "run").config()
    assert config["remedies"] == [text]
    handle.remove()
    assert not logit_limits(monitor.sites)
