"""Programs that compute their attention weights a second time, to look at them: these are no attention."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import qkeel


class Attention(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.qk, self.v = nn.Linear(16, 32), nn.Linear(16, 16)
        self.by_hand, self.first = draw.random() < 0.5, draw.random() < 0.5
        self.double, self.scaled = draw.random() < 0.5, draw.random() < 0.5
        self.causal = draw.random() < 0.5
        self.entropy: Tensor | None = None
        self.largest = torch.zeros(2, dtype=torch.float64)

    def look(self, q, k):
        q, k = (x.detach().double() if self.double else x for x in (q, k))
        z = (q * 8**-0.5) @ k.mT if self.scaled else q @ k.mT * 8**-0.5
        if self.causal:
            hidden = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
            z = z.masked_fill(hidden, -torch.inf)
        p = z.softmax(-1)
        self.entropy = -(p * p.clamp_min(1e-30).log()).sum(-1).mean((0, 2)).detach()
        self.largest = z.detach().double().amax((0, 2, 3))

    def forward(self, x):
        q, k = (
            y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qk(x).chunk(2, -1)
        )
        v = self.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
        if self.first:
            self.look(q, k)
        if self.by_hand:
            z = q @ k.mT * 8**-0.5
            if self.causal:
                hidden = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
                z = z.masked_fill(hidden, -torch.inf)
            o = z.softmax(-1) @ v
        else:
            o = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal
            )
        if not self.first:
            self.look(q, k)
        return o.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("seed", range(4))
def test_weights_that_a_program_looks_at_are_no_second_attention(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = nn.Sequential(*[Attention(draw) for _ in range(2)])
    x = torch.randn(3, 6, 16)
    assert [site.name for site in qkeel.find_sites(model, x)] == ["0", "1"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with qkeel.watch(model, optimizer) as monitor:
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            heads = monitor.sample.heads
            for layer, largest in zip(model, heads["max_logit"], strict=True):
                assert largest == pytest.approx(layer.largest.numpy(), rel=1e-5)
            for layer, entropy in zip(model, heads["entropy"], strict=True):
                assert layer.entropy is not None
                assert entropy == pytest.approx(layer.entropy.numpy(), rel=1e-4)
