"""Programs that compute their attention weights a second time, to look at them: these are no attention."""

import pytest
import torch
from tests.attention import (
    Attention,
    from_heads,
    fused,
    fused_causal,
    later,
    scores,
    written,
    written_causal,
)
from tests.training import sgd, step
from torch import nn

import qkeel


class Looking(Attention):
    """Attention that keeps the entropy and the largest logits of its weights, computed before or after it attends."""

    def __init__(self, attend, first):
        super().__init__(attend, 16)
        self.first, self.is_causal = first, "causal" in attend.__name__

    def look(self, q, k):
        z = scores(
            *((q.detach().double(), k.detach().double()) if self.first else (q, k))
        )
        if self.is_causal:
            z = z.masked_fill(later(q, k), -torch.inf)
        p = z.softmax(-1)
        self.entropy = -(p * p.clamp_min(1e-30).log()).sum(-1).mean((0, 2)).detach()
        self.top = z.detach().amax((0, 2, 3))

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.first:
            self.look(q, k)
        y = self.attend(q, k, v)
        if not self.first:
            self.look(q, k)
        return from_heads(y)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("attend", [fused, fused_causal, written, written_causal])
def test_weights_that_a_program_looks_at_are_no_second_attention(attend, first):
    torch.manual_seed(0)
    model = nn.Sequential(Looking(attend, first), Looking(attend, not first))
    x = torch.randn(3, 6, 16)
    assert [site.name for site in qkeel.find_sites(model, x)] == ["0", "1"]
    optimizer = sgd(model)
    with qkeel.watch(model, optimizer) as monitor:
        for _ in range(3):
            step(model, optimizer, x)
            heads = monitor.sample.heads
            for i, layer in enumerate(model):
                assert heads["max_logit"][i] == pytest.approx(layer.top, rel=1e-5)
                assert heads["entropy"][i] == pytest.approx(layer.entropy, rel=1e-4)
