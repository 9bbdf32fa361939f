"""The logit change of a fixed batch by one step: against logits by hand, and without a trace on training."""

import pytest
import torch
from tests.attention import Joint, fused_causal
from tests.training import sgd, step
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.capture.example import arguments
from qkeel.monitor.logit_changes import LogitChanges
from qkeel.sites.tap import Tap


class Attention(Joint):
    def __init__(self, dropout=0.0):
        super().__init__(fused_causal, 16, 4)
        self.out, self.drop = nn.Linear(16, 16), nn.Dropout(dropout)

    def forward(self, x):
        return self.out(super().forward(self.drop(x)))


def logits(model, x):
    q, k, _ = (y.detach().double() for y in model.heads(x))
    return q @ k.mT / 2


def test_the_root_mean_square_change_is_that_of_the_logits_by_hand():
    torch.manual_seed(0)
    model, x, probe = Attention(), torch.randn(2, 8, 16), torch.randn(3, 10, 16)
    optimizer = sgd(model)
    seen = torch.ones(10, 10, dtype=torch.bool).tril()
    with qkeel.watch(model, optimizer, probe_batch=probe) as monitor:
        for _ in range(3):
            before = logits(model, probe)
            step(model, optimizer, x)
            change = (logits(model, probe) - before)[..., seen]
            found = monitor.sample.heads
            rms = change.square().mean((0, 2)).sqrt()
            assert_close(
                torch.tensor(found["logit_change_rms"][0]), rms, rtol=1e-4, atol=1e-7
            )


def test_the_change_of_gains_counts_and_half_floats_are_read():
    torch.manual_seed(0)
    model = qkeel.nn.Attention(16, 2, spec=qkeel.preset("qwen3"))
    changes = LogitChanges(Tap(model), arguments(torch.randn(2, 8, 16), "probe batch"))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            changes.before()
            with torch.no_grad():
                dict(model.named_parameters())["q_norm"].mul_(
                    1.25
                )  # in place, as an optimizer does
            found = changes.after()
        (rms,) = [
            value for (_, name), value in found.items() if name == "logit_change_rms"
        ]
        assert (rms > 0.05).all(), dtype


def test_a_probe_that_is_no_batch_and_a_plan_that_is_none_are_refused():
    model = Attention()
    with pytest.raises(TypeError, match="probe batch as a tensor"):
        qkeel.watch(model, probe_batch=3)
    with pytest.raises(TypeError, match=r"PlannedRates.of"):
        qkeel.watch(model, planned=[0.1])
