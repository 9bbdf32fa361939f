"""A remedy whose effect a pass does not show is refused; calls that share a projection are all normed."""

import pytest
import torch
from torch import nn

import qkeel
from qkeel.errors import RefusedError

H, D, M, T = 4, 8, 32, 6


def parts(x):
    """[b h t d] of [b t (h d)]."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


class Attention(nn.Module):
    """Attention whose logits are made of the outputs of its projections as a test says."""

    def __init__(self, logits):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.g = (nn.Linear(M, M) for _ in range(4))
        self.logits = logits

    def forward(self, x):
        return (
            (self.logits(self, x).softmax(-1) @ parts(self.v(x)))
            .transpose(1, 2)
            .flatten(2)
        )


def biased(a, x):
    z = parts(a.q(x)) @ parts(a.k(x)).mT * D**-0.5
    return z - (torch.arange(T)[:, None] - torch.arange(T)).abs()


def tanh(a, x):
    return parts(a.q(x).tanh()) @ parts(a.k(x)).mT


def gated(a, x):
    return parts(a.q(x) * a.g(x).sigmoid()) @ parts(a.k(x)).mT


def over_std(a, x):
    z = parts(a.q(x)) @ parts(a.k(x)).mT
    return z / z.std(-1, keepdim=True)


def steps(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "logits",
    [tanh, gated, over_std],
)
@pytest.mark.parametrize("remedy", ["qk_clip", "lalr:tau=0.1", "qk_norm"])
def test_logits_that_are_no_product_of_the_rows_are_refused(logits, remedy):
    model, x = Attention(logits), torch.randn(2, T, M)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(RefusedError):
        qkeel.apply(model, remedy, steps(model), batch=x)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("remedy", ["qk_clip", "lalr:tau=0.1", "qk_norm"])
def test_a_product_with_a_bias_takes_them(remedy):
    model, x = Attention(biased), torch.randn(2, T, M)
    (site,) = qkeel.find_sites(model, x)
    assert site.verified
    assert not site.unscaled
    qkeel.apply(model, remedy, steps(model), batch=x).remove()
