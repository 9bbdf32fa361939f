"""Scores that are changed in a part of their tensor, in place: hidden pairs, sums, and what is neither."""

import pytest
import torch
from tests.attention import from_heads, to_heads
from torch import nn

from qkeel import find_sites
from qkeel.errors import RefusedError
from qkeel.sites import Tap

H, D, M, T = 4, 8, 32, 6
SEEN = torch.ones(T, T, dtype=torch.bool)
SEEN[2:, :3] = False  # the last four queries see the last three keys only
LAST = torch.zeros(4, T).masked_fill(~SEEN[2:], -torch.inf)


class Pieces(nn.Module):
    """Attention that changes its scores in one way or another."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(M, M) for _ in "qkv")
        self.table = nn.Parameter(torch.randn(T, T, D))
        self.change, self.z = change, torch.empty(0)

    def forward(self, x):
        q, k, v = (to_heads(p(x), H, D) for p in (self.q, self.k, self.v))
        z = self.change(self, q, q @ k.mT * D**-0.5)
        self.z = z.detach()
        return from_heads(z.softmax(-1) @ v)


class Batched(Pieces):
    """Scores by baddbmm, as Megatron and Bloom make them: `beta` times what was there, plus q·k."""

    def __init__(self, beta):
        super().__init__(lambda m, q, z: z)
        self.beta = beta

    def forward(self, x):
        q, k, v = (to_heads(p(x), H, D) for p in (self.q, self.k, self.v))
        before = torch.zeros(len(x) * H, T, T, dtype=x.dtype).masked_fill(~SEEN, -1e9)
        z = torch.baddbmm(
            before, q.flatten(0, 1), k.flatten(0, 1).mT, beta=self.beta, alpha=D**-0.5
        )
        return from_heads(z.view(len(x), H, T, T).softmax(-1) @ v)


@pytest.mark.parametrize(("beta", "pairs"), [(1.0, int(SEEN.sum())), (0.0, T * T)])
def test_what_baddbmm_adds_hides_pairs_unless_its_factor_is_zero(beta, pairs):
    model, x = Batched(beta), torch.randn(2, T, M)
    with torch.no_grad(), Tap(model) as tap:
        model(x)
        (stats,) = tap.read().values()
    assert stats.n_pairs.tolist() == [2 * pairs] * H


def added(m, q, z):
    """As swin-transformer-pytorch masks its shifted windows: a view, added to in place, and written back."""
    z[:, :, 2:] += LAST
    return z


def through_a_view(m, q, z):
    z[:, :, 2:].masked_fill_(~SEEN[2:], -1e9)
    return z


def by_a_mask(m, q, z):
    z[~SEEN.expand_as(z)] = -torch.inf
    return z


def summed(m, q, z):
    """As MViT v2 adds relative positions to all tokens but that of the class."""
    z[..., 1:, :] = z[..., 1:, :] + torch.einsum(
        "bhtd,tsd->bhts", q[..., 1:, :], m.table[1:]
    )
    return z


def bent(m, q, z):
    z[..., 1:, :].relu_()
    return z


@pytest.mark.parametrize(
    "change", [added, through_a_view, by_a_mask, summed, bent], ids=lambda f: f.__name__
)
def test_scores_that_are_changed_in_a_part_are_missed(change):
    with pytest.raises(RefusedError) as refusal:
        find_sites(Pieces(change), torch.randn(2, T, M))
    assert "a write into a part of a tensor" in str(refusal.value)
