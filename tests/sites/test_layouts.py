"""Heads are those of the operands, wherever the scores have them: by experiment on the projections, never by shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qkeel import find_sites
from qkeel.sites import AttentionSite, Tap

B, H, T, D = 4, 4, 4, 8  # all alike: no shape says which is which
SCALE = 1 / math.sqrt(D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """Projections of `h` query and `g` key heads around a way to attend; what is given and returned is [b t h d]."""

    def __init__(self, attend: Attend, g: int = H) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (
            nn.Linear(32, H * D),
            nn.Linear(32, g * D),
            nn.Linear(32, H * D),
        )
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D)) for p in (self.q, self.k, self.v))
        self.last = (q.detach(), k.detach())
        return self.attend(q, k, v).flatten(-2)


def causal(t: int = T) -> Tensor:
    return torch.full((t, t), -torch.inf).triu(1)


def bsht(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DeepSeek-V3's own layout."""
    z = (
        torch.einsum("bshd,bthd->bsht", q, k) * SCALE
        + causal(q.shape[1])[None, :, None]
    )
    return torch.einsum("bsht,bthd->bshd", z.softmax(-1), v)


def hbts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    z = q @ k.mT * SCALE + causal(q.shape[2])
    return (z.softmax(-1) @ v).permute(1, 2, 0, 3)


def ijbn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Transformer-XL's layout, softmax over dimension 1."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    z = torch.einsum("ibnd,jbnd->ijbn", q, k) * SCALE + causal(len(q))[:, :, None, None]
    return torch.einsum("ijbn,jbnd->ibnd", z.softmax(dim=1), v).transpose(0, 1)


def merged_bh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, t = q.shape[:2]
    q, k, v = (x.transpose(1, 2).reshape(b * H, t, D) for x in (q, k, v))
    z = torch.bmm(q, k.mT) * SCALE + causal(t)
    return torch.bmm(z.softmax(-1), v).view(b, H, t, D).transpose(1, 2)


def merged_hb(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads first, as where torch.cat(x.split(d), 0) makes them."""
    b, t = q.shape[:2]
    q, k, v = (x.permute(2, 0, 1, 3).reshape(H * b, t, D) for x in (q, k, v))
    z = torch.bmm(q, k.mT) * SCALE + causal(t)
    return torch.bmm(z.softmax(-1), v).view(H, b, t, D).permute(1, 2, 0, 3)


def with_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = torch.einsum("...qd,...kd->...qk", q, k) * SCALE + causal(q.shape[2])
    return torch.einsum("...qk,...kd->...qd", z.softmax(-1), v).transpose(1, 2)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scores of keys by queries, softmax over the rows."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = k @ q.mT * SCALE + causal(q.shape[2]).mT
    return (z.softmax(-2).mT @ v).transpose(1, 2)


WAYS = {
    f.__name__: f
    for f in (bsht, hbts, ijbn, merged_bh, merged_hb, with_ellipsis, turned)
}


def truth(model: Heads, used: list[int]) -> tuple[Tensor, Tensor]:
    """Largest logit and entropy per query head in float64; `used`: the key head of each."""
    assert model.last is not None
    q, k = (x.double() for x in model.last)
    z = torch.einsum("...thd,...shd->...hts", q, k[..., used, :]) * SCALE + causal(
        q.shape[-3]
    )
    p = z.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return z.flatten(0, -4).amax((0, 2, 3)), entropy.flatten(0, -3).mean((0, 2))


def check_rows(
    model: nn.Module, site: AttentionSite, x: Tensor, logits: Callable[[], Tensor]
) -> None:
    """Scaling the query rows reported for one head moves the logits [h …] of exactly that head."""
    (term,) = site.terms
    with torch.no_grad():
        before = logits()
        for h in range(site.n_heads):
            weight = model.get_parameter(term.query[-1].parameter)
            kept = weight.clone()
            term.query[-1].heads(weight)[h] *= 3
            moved = (logits() != before).flatten(1).any(1)
            weight.copy_(kept)
            assert moved.tolist() == [i == h for i in range(site.n_heads)]


@pytest.mark.parametrize("name", WAYS)
def test_heads_are_found_whatever_the_layout(name: str) -> None:
    torch.manual_seed(0)
    model, x = Heads(WAYS[name]), torch.randn(B, T, 32)
    (site,) = find_sites(model, x)
    assert (site.n_heads, site.n_kv_heads, site.head_dim, site.why) == (H, H, D, "")
    assert site.layout is not None
    assert site.layout.guess == ""
    (term,) = site.terms
    for side, parameter in ((term.query, "q.weight"), (term.key, "k.weight")):
        assert side[-1].parameter == parameter
        assert torch.equal(side[-1].index, torch.arange(H * D).view(H, D))

    # Watched at another size the layout is the one that was found.
    y = torch.randn(2, 6, 32)
    with torch.no_grad(), Tap(model) as tap:
        tap.sites = [site]
        model(y)
        (stats,) = tap.read().values()
    top, entropy = truth(model, list(range(H)))
    torch.testing.assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    assert stats.n_queries.tolist() == [2 * 6] * H

    def logits() -> Tensor:
        model(y)
        assert model.last is not None
        q, k = model.last
        return torch.einsum("bthd,bshd->hbts", q, k)

    check_rows(model, site, y, logits)


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torchvision's MaxViT: [b window t h d], as many windows as heads."""
    z = torch.einsum("bwthd,bwshd->bwhts", q, k) * SCALE + causal()
    return torch.einsum("bwhts,bwshd->bwthd", z.softmax(-1), v)


def test_windows_are_not_taken_for_heads() -> None:
    torch.manual_seed(0)
    model, x = Heads(windows), torch.randn(2, H, T, 32)
    (site,) = find_sites(model, x)
    assert (site.n_heads, str(site.layout), site.why) == (H, "b b h t s", "")
    with torch.no_grad(), Tap(model) as tap:
        tap.sites = [site]
        model(x)
        (stats,) = tap.read().values()
    top, entropy = truth(model, list(range(H)))
    torch.testing.assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """x-transformers: query head i uses key head i mod g."""
    q, k, v = (
        q.transpose(1, 2),
        *(x.transpose(1, 2).repeat(1, H // x.shape[2], 1, 1) for x in (k, v[:, :, :2])),
    )
    return ((q @ k.mT * SCALE + causal(q.shape[2])).softmax(-1) @ v).transpose(1, 2)


def tiled_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (
        q.transpose(1, 2),
        *(x.transpose(1, 2).repeat(1, H // x.shape[2], 1, 1) for x in (k, v[:, :, :2])),
    )
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ).transpose(1, 2)


def grouped_rg(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A dimension of its own for the repeats, before the key heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v[:, :, :2]))
    q = q.unflatten(1, (-1, k.shape[1]))
    z = torch.einsum("brgtd,bgsd->brgts", q, k) * SCALE + causal(q.shape[3])
    return (
        torch.einsum("brgts,bgsd->brgtd", z.softmax(-1), v)
        .flatten(1, 2)
        .transpose(1, 2)
    )


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v[:, :, :2]))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    return ((q @ k.mT * SCALE + causal(q.shape[2])).softmax(-1) @ v).transpose(1, 2)


def shared_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query attention with the heads after the queries, as GPT-BigCode has it."""
    z = (
        torch.einsum("bthd,bsd->bths", q, k[:, :, 0]) * SCALE
        + causal(q.shape[1])[None, :, None]
    )
    return torch.einsum("bths,bshd->bthd", z.softmax(-1), v)


GROUPS = {
    "tiled": (tiled, 2, (0, 1, 0, 1)),
    "tiled, fused": (tiled_fused, 2, (0, 1, 0, 1)),
    "repeats first": (grouped_rg, 2, (0, 1, 0, 1)),
    "blocks": (blocks, 2, None),
    "one key": (shared_key, 1, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_key_head_of_each_query_head_is_part_of_the_site(name: str) -> None:
    torch.manual_seed(0)
    attend, g, used = GROUPS[name]
    model, x = Heads(attend, g), torch.randn(3, 5, 32)
    (site,) = find_sites(model, x)
    assert (site.n_heads, site.n_kv_heads, site.key_heads, site.why) == (H, g, used, "")
    (term,) = site.terms
    assert torch.equal(term.key[-1].index, torch.arange(g * D).view(g, D))
    pairs = list(used) if used is not None else [i * g // H for i in range(H)]
    assert site.used(g).tolist() == pairs
    assert sorted(site.users(g).flatten().tolist()) == list(range(H))
    with torch.no_grad(), Tap(model) as tap:
        tap.sites = [site]
        model(x)
        (stats,) = tap.read().values()
    top, entropy = truth(model, pairs)
    torch.testing.assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)

    def logits() -> Tensor:
        model(x)
        assert model.last is not None
        q, k = model.last
        return torch.einsum("bthd,bshd->hbts", q, k[:, :, pairs])

    check_rows(model, site, x, logits)


def fused_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads before the batch in three dimensions, as no shape shows."""
    b, t = q.shape[:2]
    q, k, v = (x.permute(2, 0, 1, 3).reshape(H * b, t, D) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.view(H, b, t, D).permute(1, 2, 0, 3)


def fused_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ).transpose(-2, -3)


@pytest.mark.parametrize(
    ("attend", "shape"), [(fused_merged, (B, T, 32)), (fused_windows, (2, H, T, 32))]
)
def test_fused_attention_of_other_dimensions_is_read_by_its_operands(
    attend: Attend, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = Heads(attend), torch.randn(shape)
    (site,) = find_sites(model, x)
    assert (site.n_heads, site.why) == (H, "")
    assert torch.equal(site.query[0].index, torch.arange(H * D).view(H, D))
    with torch.no_grad(), Tap(model) as tap:
        tap.sites = [site]
        model(x)
        (stats,) = tap.read().values()
    top, entropy = truth(model, list(range(H)))
    torch.testing.assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def test_a_layout_that_only_the_shape_shows_is_reported_once_as_a_guess() -> None:
    """Queries and keys that nothing in the model makes: no experiment says which dimension is heads."""

    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.mT).softmax(-1) @ k

    model, q = Given(), torch.randn(H, H, T, D)
    (site,) = find_sites(model, (q, q))
    assert site.terms == ()
    assert "do not show which dimension holds the heads" in site.why
    for sites in ([], [site]):
        with torch.no_grad(), Tap(model) as tap:
            tap.sites = sites
            with pytest.warns(
                UserWarning, match="the heads of the model itself are a guess"
            ) as seen:
                [model(q, q) for _ in range(2)]
            assert len(seen) == 1
    (certain,) = find_sites(model, (q[:2], q[:2]))
    assert certain.layout is not None
    assert certain.layout.guess == ""


def fused_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Five dimensions, as timm's Twins and Hiera have them: [b h window t d]."""
    q, k, v = (x.permute(0, 3, 1, 2, 4) for x in (q, k, v))
    mask = causal(q.shape[-2])
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask
    ).permute(0, 2, 3, 1, 4)
