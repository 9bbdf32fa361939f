"""Hand-written attention on one sequence [tokens features], without a batch dimension."""

import pytest
import torch
from tests.training import sgd, step
from torch import nn

import qkeel

SPELLINGS = {
    "@ .T": lambda q, k: q @ k.T,
    "mm": lambda q, k: torch.mm(q, k.t()),
    "@ .mT": lambda q, k: q @ k.mT,
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-2, -1)),
    "einsum": lambda q, k: torch.einsum("id,jd->ij", q, k),
}


class Attention(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.product = product
        self.q, self.k, self.v = (nn.Linear(8, n) for n in (4, 4, 8))

    def logits(self, x):
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        z = self.product(self.q(x), self.k(x)) / 2
        return z.masked_fill(hidden, -torch.inf)

    def forward(self, x):
        return x + self.logits(x).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_sequence_is_measured_and_clipped(spelling):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(SPELLINGS[spelling])), torch.randn(7, 8)
    optimizer = sgd(model, 0.0)
    (site,) = qkeel.find_sites(model, x)
    assert (site.verified, site.n_heads) == (True, 1)
    with qkeel.watch(model, optimizer) as monitor:
        step(model, optimizer, x)
        heads = monitor.sample.heads
    z = model[0].logits(x).detach()
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean()
    assert heads["max_logit"].item() == pytest.approx(float(z.amax()), rel=1e-5)
    assert heads["entropy"].item() == pytest.approx(float(entropy), rel=1e-5)
    tau = float(z.amax()) / 2
    with qkeel.apply(model, f"qk_clip:threshold={tau}", optimizer, batch=x):
        step(model, optimizer, x)
    assert float(model[0].logits(x).detach().amax()) == pytest.approx(tau, rel=1e-4)


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
