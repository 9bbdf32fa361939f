"""Every way to attend that is read gives its exact numbers, and one that is not understood is listed with a reason."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from tests.sites import flash_stand_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from qkeel import find_sites, watch
from qkeel.sites import Reading, describe

from .layers import Attend, Layers


def hidden(q: Tensor, k: Tensor) -> Tensor:
    return ~torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


def causal(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden(q, k), -torch.inf)


def everywhere(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.detach(), k.detach(), v.detach()  # on a CPU it has no gradients
    return flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)
    )  # type: ignore[return-value]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    function = sys.modules["flash_attn"].flash_attn_func  # type: ignore[attr-defined]
    return function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(
        1, 2
    )


def flash_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    function = sys.modules["flash_attn"].flash_attn_varlen_func  # type: ignore[attr-defined]
    b, _, t, _ = q.shape
    ends = torch.arange(b + 1, dtype=torch.int32) * t
    out = function(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)),
        ends,
        ends,
        t,
        t,
        causal=True,
    )
    return out.unflatten(0, (b, t)).transpose(1, 2)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
        hidden(q, k), -torch.inf
    ).softmax(-1) @ v


def added_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[-2], k.shape[-2]).masked_fill(
        hidden(q, k), torch.finfo(torch.float32).min
    )
    z = torch.einsum("bhtd,bhsd->bhts", q * q.shape[-1] ** -0.5, k)
    return torch.einsum(
        "bhts,bhsd->bhtd",
        F.dropout(F.softmax(z + mask, dim=-1, dtype=torch.float32), 0.0),
        v,
    )


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b, c = (x.flatten(0, 1) for x in (q, k, v))
    z = torch.baddbmm(torch.zeros(len(a), a.shape[1], b.shape[1]), a, b.mT)
    powers = (z - z.amax(-1, keepdim=True)).exp()
    return torch.bmm(powers / powers.sum(-1, keepdim=True), c).view_as(v)


def in_two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[..., :2] @ k[..., :2].mT + q[..., 2:] @ k[..., 2:].mT).softmax(-1) @ v


def chosen_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(-1)
    return torch.where(near, q @ k.mT, 0.5 * q @ k.mT).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor) -> Tensor:
    near = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(-1)
    return torch.where(near, 1.0, 0.5) * (q @ k.mT)


Logits = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, tuple[Attend, Logits]] = {
    "scaled_dot_product_attention": (sdpa, causal),
    "flex_attention": (flex, causal),
    "flash_attn_func": (flash, causal),
    "flash_attn_varlen_func": (flash_packed, causal),
    "matmul, masked_fill": (masked, causal),
    "einsum, added mask, casts, dropout": (added_mask, causal),
    "baddbmm, less the row's maximum": (batched, everywhere),
    "a sum of products": (in_two_products, everywhere),
    "where of two products": (chosen_products, chosen),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", WAYS)
def test_largest_logit_and_entropy_of_each_head_are_those_of_the_formula(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, logits = WAYS[name]
    if name.startswith("flash"):
        monkeypatch.setitem(sys.modules, "flash_attn", flash_stand_in)
    operands: list[Tensor] = []

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operands[:] = q.detach().double(), k.detach().double()
        return attend(q, k, v)

    model, x = (
        Layers(noted),
        torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)),
    )
    with watch(model) as monitor:
        model(x)
        (stats,) = monitor.read().values()
    z = logits(*operands)
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.max_logit, z.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-5, atol=1e-5)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(masked)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum() + self.layers(x.reshape(-1, 2, 8)).sum()


def test_a_module_that_runs_twice_in_a_pass_counts_both_calls_whatever_their_shapes() -> (
    None
):
    model, x = Twice(), torch.randn(3, 4, 8)
    with watch(model) as monitor:
        model(x)
        (both,) = monitor.read().values()
    largest = []
    for batch in (x, x.reshape(-1, 2, 8)):
        with watch(model.layers) as monitor:
            model.layers(batch)
            (stats,) = monitor.read().values()
        largest.append(stats.max_logit)
    assert both.n_queries.tolist() == [24, 24]
    assert torch.equal(both.max_logit, torch.maximum(*largest))


def test_multihead_attention_is_a_site_with_the_weights_of_its_heads() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    (site,) = find_sites(model, (x, x, x))
    assert (site.n_heads, site.verified) == (2, True)
    with watch(model) as monitor:
        weights = model(x, x, x, average_attn_weights=False)[1]
        (stats,) = monitor.read().values()
    entropy = torch.special.entr(weights.double()).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-5, atol=1e-5)


def test_what_normalises_scores_in_a_way_that_is_not_understood_is_listed() -> None:
    def sorted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).sort(-1).values.softmax(-1) @ v

    sites = find_sites(Layers(sdpa, sorted_scores), torch.randn(2, 5, 8))
    assert [site.name for site in sites] == ["layers.0"]
    (missed,) = sites.missed
    assert missed.module == "layers.1"
    assert missed.reason


@torch.library.custom_op("qkeel_contract::attend", mutates_args=())
def opaque(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A kernel in which no function of torch is called."""
    a, b, c = (x.detach().numpy() for x in (q, k, v))
    z = a @ b.swapaxes(-1, -2) / a.shape[-1] ** 0.5
    z[..., ~torch.ones(z.shape[-2:], dtype=torch.bool).tril().numpy()] = -torch.inf
    weights = z.copy()
    for row in weights.reshape(-1, weights.shape[-1]):
        row[:] = torch.tensor(row).softmax(-1).numpy()
    return torch.from_numpy(weights @ c)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        return (
            opaque(*(y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v)))
            .transpose(1, 2)
            .flatten(2)
        )


def test_a_kernel_that_nothing_can_see_is_watched_as_it_is_described() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Opaque()), torch.randn(2, 5, 8)
    query, key = (
        Reading(module="q"),
        Reading(module="kv", layout="b t (n h d)", part=0, parts=2),
    )
    site = describe(model, "0", query=query, key=key, heads=2)
    with watch(model, sites=[site]) as monitor, torch.no_grad():
        model(x)
        (stats,) = monitor.read().values()
        q, k = (
            y.unflatten(-1, (2, 4)).transpose(1, 2)
            for y in (model[0].q(x), model[0].kv(x)[..., :8])
        )
        z = causal(q.double(), k.double())
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.max_logit, z.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-5, atol=1e-5)
