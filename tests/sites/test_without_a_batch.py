"""Hand-written attention on one sequence [tokens features], without a batch dimension."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import qkeel

SPELLINGS = {
    "@ .T": lambda q, k: q @ k.T,
    "mm": lambda q, k: torch.mm(q, k.t()),
    "@ .mT": lambda q, k: q @ k.mT,
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-2, -1)),
    "einsum": lambda q, k: torch.einsum("id,jd->ij", q, k),
}


class Attention(nn.Module):
    def __init__(self, draw, spelling):
        super().__init__()
        self.spelling, self.causal = spelling, draw.random() < 0.5
        self.d = draw.choice([4, 8])
        self.q, self.k, self.v = (nn.Linear(8, n) for n in (self.d, self.d, 8))
        self.logits: Tensor | None = None

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        hidden = hidden if self.causal else hidden & False
        z = SPELLINGS[self.spelling](q, k) * self.d**-0.5
        with torch.no_grad():
            self.logits = torch.einsum("ic,jc->ij", q.double(), k.double())
            self.logits = (self.logits * self.d**-0.5).masked_fill(hidden, -torch.inf)
        return x + z.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("seed", range(2))
def test_one_sequence_is_measured_and_clipped(spelling, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(Attention(random.Random(seed), spelling))
    x, optimizer = torch.randn(7, 8), torch.optim.SGD(model.parameters(), lr=0.0)
    (site,) = qkeel.find_sites(model, x)
    assert site.verified
    assert site.n_heads == 1
    with qkeel.watch(model, optimizer) as monitor:
        model(x).square().mean().backward()
        optimizer.step()
    logits = model[0].logits
    assert isinstance(logits, Tensor)
    heads = monitor.sample.heads
    assert heads["max_logit"].item() == pytest.approx(logits.amax().item(), rel=1e-5)
    p = logits.softmax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1).mean()
    assert heads["entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)
    tau = float(logits.amax()) / 2
    with qkeel.apply(model, f"qk_clip:threshold={tau}", optimizer, batch=x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x)
    assert float(model[0].logits.amax()) == pytest.approx(tau, rel=1e-4)  # type: ignore[union-attr]


class Contrast(nn.Module):
    """Similarities of the samples of a batch, whose softmax is a loss and weights nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        y = self.attention(x, x, x, need_weights=False)[0].mean(1)
        z = self.a(y) @ self.b(y).T
        return -z.softmax(-1).diagonal().log().mean()


def test_similarities_of_samples_are_no_attention():
    torch.manual_seed(0)
    sites = qkeel.find_sites(Contrast(), torch.randn(5, 3, 8))
    assert [site.name for site in sites] == ["attention"]
    assert not sites.missed
