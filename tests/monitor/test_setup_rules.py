"""Rounding formulas agree with rounding; heads that saturate are noticed."""

import numpy as np
import pytest
import torch

from qkeel.errors import UnknownNameError
from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.monitor import (
    DEFAULT,
    History,
    Resolution,
    Saturation,
    Setting,
    replay,
    rules_for,
)
from qkeel.records import Heads

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def history(**series):
    """Records 0, 10, … of [layers heads] series."""
    n = len(next(iter(series.values())))
    steps = np.arange(n) * 10
    values = {name: np.asarray(v, dtype=np.float64) for name, v in series.items()}
    return History.of(
        [{"step": int(s), "lr": 0.1} for s in steps], Heads(steps=steps, values=values)
    )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1.0, 5.0, 17.0])
def test_rounding_q_and_k_moves_logits_as_the_formula_says(dtype, size):
    d = 64
    q, k = size * torch.randn(2, 20_000, d, dtype=torch.float64)
    rounded = [x.to(FORMATS[dtype]).double() for x in (q, k)]
    error = (rounded[0] * rounded[1]).sum(-1) / d**0.5 - (q * k).sum(-1) / d**0.5
    expected = fused_logit_error(
        float(q.norm(dim=1).mean()), float(k.norm(dim=1).mean()), d, dtype
    )
    assert float(error.std()) == pytest.approx(expected, rel=0.1)


def test_the_errors_at_the_edges():
    assert stored_logit_error(0.0, "bf16") == 0.0
    assert stored_logit_error(-100.0, "bf16") == stored_logit_error(100.0, "bf16")
    assert stored_logit_error(float("inf"), "bf16") == float("inf")
    with pytest.raises(UnknownNameError, match="bf16"):
        fused_logit_error(1.0, 1.0, 8, "bf8")


def test_a_setting_switches_on_the_rules_it_says_enough_for():
    always = (*DEFAULT, Saturation())
    assert rules_for(Setting()) == always

    def further(**facts):
        rules = rules_for(Setting(**facts))
        names = [rule.name for rule in rules]
        assert names[: len(always)] == [rule.name for rule in always]
        return rules[len(always) :]

    # The head's width is missing.
    assert further(dtype="bf16", kernel="fused") == ()
    assert further(dtype="fp32", kernel="fused", head_dim=64) == ()
    eager = {"dtype": "fp16", "kernel": "eager", "head_dim": 64, "scale": 0.1}
    assert further(**eager) == (
        Resolution(dtype="fp16", kernel="eager", head_dim=64, scale=0.1),
    )
    assert len({rule.name for rule in always}) == len(always)


@pytest.mark.parametrize(
    ("gradient", "spread", "fires"),
    [
        ([0.8, 0.5, 0.07], [5.0, 60.0, 130.0], True),
        ([0.8, 0.5, 0.07], [5.0, 60.0, 90.0], False),  # a small spread
        ([0.05, 0.05, 0.04], [5.0, 60.0, 130.0], False),  # a head that began as a sink
        ([0.8, 0.5, 0.09], [5.0, 60.0, 130.0], False),  # not yet a tenth
        ([np.nan, 0.9, 0.05], [5.0, 60.0, 130.0], True),  # it came late
    ],
)
def test_a_head_that_fell_to_a_tenth_while_its_spread_grew_is_saturated(
    gradient, spread, fires
):
    gradients, spreads = np.full((3, 2, 2), 0.9), np.full((3, 2, 2), 8.0)
    gradients[:, 1, 0], spreads[:, 1, 0] = gradient, spread
    alarms = replay(
        history(softmax_gradient=gradients, logit_spread=spreads), [Saturation()]
    )
    places = [(alarm.step, alarm.layer, alarm.head) for alarm in alarms]
    assert places == ([(20, "layer 1", 0)] if fires else [])
    # A run that was recorded before there was the number.
    assert not replay(history(logit_spread=spreads), [Saturation()])
