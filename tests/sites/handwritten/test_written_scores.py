"""Scores that are changed in a part of their tensor, in place: hidden pairs, sums, and what is neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel import find_sites
from qkeel.errors import RefusedError
from qkeel.sites import Tap

H, D, M, T = 4, 8, 32, 6
SEEN = torch.ones(T, T, dtype=torch.bool)
SEEN[2:, :3] = False  # the last four queries see the last three keys only
LAST = torch.zeros(4, T).masked_fill(~SEEN[2:], -torch.inf)
Change = Callable[["Pieces", Tensor, Tensor], Tensor]


class Pieces(nn.Module):
    """Attention that changes its scores in one way or another."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(M, M) for _ in "qkv")
        self.table = nn.Parameter(torch.randn(T, T, D))
        self.change, self.z = change, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        z = self.change(self, q, q @ k.mT * D**-0.5)
        self.z = z.detach()
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


def added(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    """As swin-transformer-pytorch masks its shifted windows: a view, added to in place, and written back."""
    z[:, :, 2:] += LAST
    return z


def through_a_view(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    z[:, :, 2:].masked_fill_(~SEEN[2:], -1e9)
    return z


def by_a_mask(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    z[~SEEN.expand_as(z)] = -torch.inf
    return z


@pytest.mark.parametrize("change", [added, through_a_view, by_a_mask], ids=lambda f: f.__name__)
def test_pairs_that_are_hidden_in_a_part_of_the_scores_are_left_out(change: Change) -> None:
    model, x = Pieces(change).double(), torch.randn(2, T, M, dtype=torch.float64)
    sites = find_sites(model, x)
    assert [(s.name, s.why, s.verified, len(s.terms)) for s in sites] == [("", "", True, 1)]
    with torch.no_grad(), Tap(model) as tap:
        model(x)
        (stats,) = tap.read().values()
    visible = model.z[:, :, SEEN]
    assert stats.n_pairs.tolist() == [2 * int(SEEN.sum())] * H
    torch.testing.assert_close(stats.max_logit, visible.amax((0, 2)))
    torch.testing.assert_close(stats.min_logit, visible.amin((0, 2)))


def test_a_cap_leaves_them_hidden() -> None:
    model, x = Pieces(added), torch.randn(2, T, M)
    y = model(x)
    handle = qkeel.apply(model, "softcap:cap=0.5", batch=x)
    q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (model.q, model.k, model.v))
    z = (0.5 * torch.tanh(2 * (q @ k.mT) * D**-0.5)).masked_fill(~SEEN, -torch.inf)
    torch.testing.assert_close(model(x), (z.softmax(-1) @ v).transpose(1, 2).flatten(2))
    handle.remove()
    assert torch.equal(model(x), y)


class Batched(Pieces):
    """Scores by baddbmm, as Megatron and Bloom make them: `beta` times what was there, plus q·k."""

    def __init__(self, beta: float) -> None:
        super().__init__(added)
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        before = torch.zeros(len(x) * H, T, T, dtype=x.dtype).masked_fill(~SEEN, -1e9)
        z = torch.baddbmm(before, q.flatten(0, 1), k.flatten(0, 1).mT, beta=self.beta, alpha=D**-0.5)
        return (z.view(len(x), H, T, T).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("beta", "pairs"), [(1.0, int(SEEN.sum())), (0.0, T * T)])
def test_what_baddbmm_adds_hides_pairs_unless_its_factor_is_zero(beta: float, pairs: int) -> None:
    model, x = Batched(beta), torch.randn(2, T, M)
    with torch.no_grad(), Tap(model) as tap:
        model(x)
        (stats,) = tap.read().values()
    assert stats.n_pairs.tolist() == [2 * pairs] * H


def more(m: Pieces, q: Tensor, z: Tensor, part: slice) -> Tensor:
    z[..., part, :] = z[..., part, :] + torch.einsum("bhtd,tsd->bhts", q[..., part, :], m.table[part])
    return z


def whole_sum(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    return more(m, q, z, slice(None))


def sum_in_part(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    """As MViT v2 adds relative positions to all tokens but that of the class."""
    return more(m, q, z, slice(1, None))


def halved(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    z[..., 1:, :] = z[..., 1:, :] * 0.5
    return z


def bent(m: Pieces, q: Tensor, z: Tensor) -> Tensor:
    z[..., 1:, :] = z[..., 1:, :].relu()
    return z


@pytest.mark.parametrize(
    ("change", "terms", "why"),
    [(whole_sum, 2, ""), (sum_in_part, 0, "part of its scores is a sum of more products than the rest")],
)
def test_a_sum_that_is_written_back_is_watched_and_its_terms_are_known_or_told(
    change: Change, terms: int, why: str
) -> None:
    model, x = Pieces(change), torch.randn(2, T, M)
    (site,) = find_sites(model, x)
    assert len(site.terms) == terms
    assert site.verified == bool(terms)
    assert (site.why or "").startswith(why)
    with torch.no_grad(), Tap(model) as tap:
        model(x)
        (stats,) = tap.read().values()
    torch.testing.assert_close(stats.max_logit, model.z.amax((0, 2, 3)))


@pytest.mark.parametrize("change", [halved, bent], ids=lambda f: f.__name__)
def test_what_is_written_and_is_no_such_sum_is_missed(change: Change) -> None:
    with pytest.raises(RefusedError, match="Seen but not understood: the model itself"):
        find_sites(Pieces(change), torch.randn(2, T, M))
