"""A logit that is a sum of products is known by all of them, or the site says which part is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel import find_sites
from qkeel.errors import RefusedError
from qkeel.sites import Tap

H, T, D = 4, 6, 8


class Sum(nn.Module):
    """Attention [b t h·d] whose logit `z` is what `scores` makes of the projections."""

    def __init__(self, scores: Callable[[Sum, dict[str, Tensor]], Tensor], *names: str) -> None:
        super().__init__()
        self.scores = scores
        for name in (*names, "v"):
            setattr(self, name, nn.Linear(32, 32, bias=False))
        self.names = names
        self.table = nn.Parameter(torch.randn(T, D))
        self.per_head = nn.Parameter(torch.randn(T, H * D))
        self.pairs = nn.Parameter(torch.randn(T, T, D))
        self.embedding = nn.Embedding(2 * T - 1, D)
        self.gap = (torch.arange(T)[:, None] - torch.arange(T)).abs()
        self.mix = nn.Conv2d(H, H, 1, bias=False)
        self.mix_linear = nn.Linear(H, H, bias=False)
        self.gate = nn.Linear(32, H)
        self.z = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        parts = {n: getattr(self, n)(x).unflatten(-1, (H, D)).transpose(1, 2) for n in (*self.names, "v")}
        v = parts.pop("v")
        self.x = x
        self.z = self.scores(self, parts) / 4
        return (self.z.softmax(-1) @ v).transpose(1, 2).flatten(2)


def two(m: Sum, p: dict[str, Tensor]) -> Tensor:
    return p["q1"] @ p["k1"].mT + p["q2"] @ p["k2"].mT


def in_place(m: Sum, p: dict[str, Tensor]) -> Tensor:
    z = p["q1"] @ p["k1"].mT
    z += p["q1"] @ p["k2"].mT
    return z


def with_alpha(m: Sum, p: dict[str, Tensor]) -> Tensor:
    return torch.add(p["q1"] @ p["k1"].mT, p["q2"] @ p["k2"].mT * 0.5, alpha=2.0).sub(p["q2"] @ p["k1"].mT)


def batched(m: Sum, p: dict[str, Tensor]) -> Tensor:
    q1, k1, q2, k2 = (x.flatten(0, 1) for x in p.values())
    return torch.baddbmm(torch.bmm(q1, k1.mT), q2, k2.mT).view(-1, H, T, T)


def absorbed(m: Sum, p: dict[str, Tensor]) -> Tensor:
    """DeepSeek's layout of scores, turned for the softmax of this module."""
    q1, k1, q2, k2 = (x.transpose(1, 2) for x in p.values())
    z = torch.einsum("bshd,bthd->bsht", q1, k1) + torch.einsum("bshd,btd->bsht", q2, k2[:, :, 0])
    return z.transpose(1, 2)


def transformer_xl(m: Sum, p: dict[str, Tensor]) -> Tensor:
    """Positions projected as keys, moved to their place by the relative shift."""
    b = p["q1"] @ p["k2"].mT
    b = torch.nn.functional.pad(b, (1, 0)).view(len(b), H, T + 1, T)[:, :, 1:].view_as(b)
    return (p["q1"] @ p["k1"].mT + b).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)


def deberta(m: Sum, p: dict[str, Tensor]) -> Tensor:
    """Content to content, content to position and position to content, the positions picked by gather."""
    gap = m.gap.expand(len(p["q1"]), H, T, T)
    far = torch.gather(p["q1"] @ p["k2"].mT, -1, gap)
    near = torch.gather(p["k1"] @ p["q2"].mT, -1, gap).transpose(-1, -2)
    return p["q1"] @ p["k1"].mT + far + near


def shaw_table(m: Sum, p: dict[str, Tensor]) -> Tensor:
    return torch.matmul(p["q1"], m.table.mT) + p["q1"] @ p["k1"].mT


def shaw_heads(m: Sum, p: dict[str, Tensor]) -> Tensor:
    return p["q1"] @ p["k1"].mT + torch.einsum("bhtd,shd->bhts", p["q1"], m.per_head.view(T, H, D))


def shaw_embedding(m: Sum, p: dict[str, Tensor]) -> Tensor:
    return p["q1"] @ p["k1"].mT + torch.einsum("bhtd,tsd->bhts", p["q1"], m.embedding(m.gap))


Terms = list[tuple[list[str], list[str]]]
SUMS: dict[str, tuple[Callable[[Sum, dict[str, Tensor]], Tensor], str, Terms]] = {
    "two": (two, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"])]),
    "in place": (in_place, "q1 k1 k2", [(["q1"], ["k1"]), (["q1"], ["k2"])]),
    "alpha": (with_alpha, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"]), (["q2"], ["k1"])]),
    "baddbmm": (batched, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"])]),
    "absorbed": (absorbed, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"])]),
    "relative shift": (transformer_xl, "q1 k1 k2", [(["q1"], ["k1"]), (["q1"], ["k2"])]),
    "disentangled": (deberta, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q1"], ["k2"]), (["q2"], ["k1"])]),
    "table": (shaw_table, "q1 k1", [(["q1"], ["table"]), (["q1"], ["k1"])]),
    "table of heads": (shaw_heads, "q1 k1", [(["q1"], ["k1"]), (["q1"], ["per_head"])]),
    "embedding": (shaw_embedding, "q1 k1", [(["q1"], ["k1"]), (["q1"], ["embedding"])]),
}


def made(name: str) -> Sum:
    torch.manual_seed(0)
    scores, names, _ = SUMS[name]
    model = Sum(scores, *names.split())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6)
    return model


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, T, 32, generator=torch.Generator().manual_seed(seed))


def top(model: Sum) -> float:
    """The true largest logit."""
    with torch.no_grad():
        model(batch())
        return float(model.z.amax())


@pytest.mark.parametrize("name", SUMS)
def test_every_product_is_a_term(name: str) -> None:
    (site,) = find_sites(made(name), batch())
    assert site.why == ""
    assert site.n_heads == H

    def short(parameter: str) -> str:
        return parameter.removesuffix(".weight")

    terms = [([short(s.parameter) for s in t.query], [short(s.parameter) for s in t.key]) for t in site.terms]
    assert terms == SUMS[name][2]


@pytest.mark.parametrize("name", SUMS)
@torch.no_grad()
def test_rows_of_one_head_move_that_heads_logits_and_rows_of_none_move_nothing(name: str) -> None:
    model = made(name)
    (site,) = find_sites(model, batch())
    model(batch())
    before = model.z.clone()
    parts = [s for s in (*site.query, *site.key) if s.n == H]
    for h in range(H):
        kept = {n: p.clone() for n, p in model.named_parameters()}
        for s in parts:
            s.heads(model.get_parameter(s.parameter))[h] = 0
        model(batch())
        finite = before.isfinite()
        assert (model.z[:, h][finite[:, h]] == 0).all()
        others = [i for i in range(H) if i != h]
        assert torch.equal(model.z[:, others], before[:, others])
        for n, p in model.named_parameters():
            p.copy_(kept[n])


@pytest.mark.parametrize("name", SUMS)
@torch.no_grad()
def test_statistics_are_those_of_the_sum(name: str) -> None:
    model = made(name)
    (site,) = find_sites(model, batch())
    with Tap(model) as tap:
        tap.sites = [site]
        model(batch())
        (stats,) = tap.read().values()
    z = model.z.double()
    torch.testing.assert_close(stats.max_logit.double(), z.amax((0, 2, 3)))
    p = z.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    assert stats.n_products.tolist() == [0] * H  # no one pair of q and k makes the logit
