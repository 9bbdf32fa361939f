"""Biases of q and k that are parameters of their own, or parts of one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel


class Beit(nn.Module):
    """Fused weights without a bias, biases of q and v apart, none for keys; the weight is given to F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.q_bias, self.v_bias = (
            nn.Parameter(torch.randn(16)),
            nn.Parameter(torch.randn(16)),
        )
        self.k_bias: Tensor
        self.register_buffer("k_bias", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(
            input=x,
            weight=self.qkv.weight,
            bias=torch.cat((self.q_bias, self.k_bias, self.v_bias)),
        )
        q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in y.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Cross(nn.Module):
    """nn.MultiheadAttention whose keys have another size: three weights, one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True)
        nn.init.normal_(self.attn.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x[..., :12], x[..., :12])[0]


class Tail(nn.Module):
    """A bias that is the end of a longer vector."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = (
            nn.Linear(16, 48, bias=False),
            nn.Parameter(torch.randn(60)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.qkv.weight, self.bias[2:][-50:-2])
        q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in y.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Beit, [("q_bias", range(16)), None]),
        (
            Cross,
            [("attn.in_proj_bias", range(16)), ("attn.in_proj_bias", range(16, 32))],
        ),
        (Tail, [("bias", range(10, 26)), ("bias", range(26, 42))]),
    ],
)
def test_the_entries_of_each_heads_bias_are_found(
    model: type[nn.Module], expected: list[object]
) -> None:
    (site,) = qkeel.find_sites(model(), torch.randn(2, 5, 16))
    found = [s.bias_of() for s in (*site.query, *site.key)]
    assert [
        None
        if b is None
        else (b.parameter, range(int(b.index[0, 0]), int(b.index[-1, -1]) + 1))
        for b in found
    ] == expected
    assert site.verified, site.unverified


@pytest.mark.parametrize("build", [Beit, Cross, Tail])
def test_qk_clip_scales_them_so_that_the_largest_logit_is_the_threshold(
    build: type[nn.Module],
) -> None:
    model, x = build().double(), torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)

    def largest() -> Tensor:
        with torch.no_grad(), qkeel.sites.Tap(model) as tap:
            model(x)
            return next(iter(tap.read().values())).max_logit

    before = largest()
    threshold = float(before.mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    qkeel.apply(model, f"qk_clip:threshold={threshold}", optimizer, batch=x)
    model(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(largest(), before.clamp_max(threshold))


class Distances(nn.Module):
    """Logits are negative squared distances, written as twice the products less the squares."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        squares = q.square().sum(-1)[..., None] + k.square().sum(-1)[..., None, :]
        return (
            (((2 * q @ k.mT - squares) / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("batch", [1, 2])
def test_squares_of_the_factors_are_no_bias(batch: int) -> None:
    (site,) = qkeel.find_sites(Distances(), torch.randn(batch, 5, 16))
    assert not site.verified
