"""What the search cannot confirm is said, and no remedy on heads accepts it."""

import pytest
import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from tests.sites.models import CASES, SCALE, D, H, Heads, M, T
from tests.training import sgd
from torch import nn

from qkeel import apply, find_sites
from qkeel.errors import RefusedError
from qkeel.nn import Attention


def x():
    return CASES["written"].x()


class Scored(Heads):
    """Heads whose scores a function of q and k [b h t d] makes."""

    def __init__(self, scores):
        super().__init__()
        torch.manual_seed(0)
        self.scores = scores
        self.q2 = nn.Linear(M, H * D)
        self.mix = nn.Conv2d(H, H, 1)

    def forward(self, x):
        q, k, v = (y.transpose(1, 2) for y in self.operands(x))
        return from_heads(self.scores(self, q, k).softmax(-1) @ v)


def gated_outside_the_graph(model, q, k):
    gate = q.detach().amax(-1, keepdim=True)
    return q @ k.mT * SCALE + gate * torch.arange(float(T))


def talking(model, q, k):
    z = q @ k.mT
    return z + model.mix(z)


# Every remedy asks the site alone.
@pytest.mark.parametrize(
    ("scored", "remedy"),
    [(gated_outside_the_graph, "lalr"), (talking, "qk_clip"), (talking, "qk_norm")],
)
def test_rows_that_do_not_make_the_logits_alone_are_not_changed(scored, remedy):
    model = Scored(scored)
    (site,) = find_sites(model, x())
    assert not site.verified
    assert site.unverified or site.why
    optimizer = sgd(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(RefusedError):
        apply(model, remedy, optimizer, batch=x())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_mask_of_a_fused_function_may_be_a_product(in_graph):
    class Masked(Heads):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(T, T, D))

        def forward(self, x):
            q, k, v = (y.transpose(1, 2) for y in self.operands(x))
            mask = torch.einsum("bhtd,tsd->bhts", q, self.table)
            if not in_graph:
                mask = q.detach().amax(-1, keepdim=True) * torch.arange(float(T))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return from_heads(y)

    torch.manual_seed(0)
    (site,) = find_sites(Masked(), x())
    assert site.verified == in_graph


def test_weights_that_are_unknown_are_not_verified_and_own_modules_need_no_search():
    class Sum(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])

    (site,) = find_sites(Sum(), x())
    assert (site.terms, site.verified, site.unverified) == ((), False, "")
    assert site.why
    assert [site.verified for site in find_sites(Attention(16, 4))] == [True]


def test_heads_that_share_some_rows_of_a_weight_are_unknown():
    class Overlapping(Heads):
        def forward(self, x):
            q, k = (
                p(x).unfold(-1, D, D // 2).transpose(1, 2) for p in (self.q, self.k)
            )
            return (q @ k.mT * SCALE).softmax(-1) @ k

    torch.manual_seed(0)
    (site,) = find_sites(Overlapping(), x())
    assert (site.verified, site.terms) == (False, ())
    assert "share some rows of q.weight" in site.why


class Delta(nn.Linear):
    """A projection whose weight is added to a frozen one in its forward."""

    def __init__(self):
        super().__init__(M, H * D, bias=False)
        self.register_buffer("start", torch.randn(H * D, M) / 3)

    def forward(self, x):
        return F.linear(x, self.weight + self.start)


class DeltaHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = Delta(), Delta()

    def forward(self, x):
        q, k = (to_heads(y(x), H, D) for y in (self.q, self.k))
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize("build", [DeltaHeads, lambda: nn.Sequential(DeltaHeads())])
def test_a_weight_that_is_added_in_the_forward_of_a_projection_is_missed(build):
    torch.manual_seed(0)
    (site,) = find_sites(build(), torch.randn(2, T, M))
    assert not site.verified
    assert "part of them comes from other weights" in site.unverified
