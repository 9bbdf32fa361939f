"""A sum that all of q or k passes through is no norm's: gradients go through it to the rows that make each head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel

BATCH, TOKENS, HEADS, GROUPS, WIDTH = 2, 12, 4, 2, 8


def rotated(x: Tensor) -> Tensor:
    """The rotation of lingua and xFormers of x [b t h d]: each pair times a 2 × 2 matrix, summed over a dimension."""
    angle = torch.outer(
        torch.arange(TOKENS).float(), 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    )
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(
        1, TOKENS, 1, WIDTH // 2, 2, 2
    )
    return (x.reshape(*x.shape[:-1], -1, 1, 2) * turn).sum(5).flatten(3)


def divided(x: Tensor) -> Tensor:
    return x / x.pow(2).sum(-1, keepdim=True).sqrt()


class Attention(nn.Module):
    """Grouped attention whose q and k go through some functions."""

    def __init__(self, *functions: object) -> None:
        super().__init__()
        self.functions = functions
        self.wq, self.wk, self.wv = (
            nn.Linear(32, n * WIDTH, bias=False) for n in (HEADS, GROUPS, GROUPS)
        )
        self.wo = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH)) for w in (self.wq, self.wk, self.wv))
        for function in self.functions:
            q, k = function(q), function(k)  # type: ignore[operator]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "functions", [(rotated,), (rotated, divided), (divided, rotated), (divided,)]
)
def test_rows_are_known_through_a_rotation_that_is_written_as_a_sum(
    functions: tuple[object, ...],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Attention(*functions))
    (site,) = qkeel.find_sites(model, torch.randn(BATCH, TOKENS, 32))
    assert (site.why, site.unverified) == ("", "")
    (query,), (key,) = site.query, site.key
    assert (query.parameter, query.index.tolist()) == (
        "1.wq.weight",
        torch.arange(32).view(HEADS, WIDTH).tolist(),
    )
    assert (key.parameter, key.index.tolist()) == (
        "1.wk.weight",
        torch.arange(16).view(GROUPS, WIDTH).tolist(),
    )


def test_a_clip_halves_the_logits_behind_such_a_rotation() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(32, 32), Attention(rotated)),
        torch.randn(BATCH, TOKENS, 32),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.watch(model) as monitor:
        model(x)
    before = monitor.read()["1"].max_logit
    threshold = float(before.max()) / 2
    handle = qkeel.apply(model, f"qk_clip:threshold={threshold}", optimizer, batch=x)
    model(x).square().mean().backward()
    optimizer.step()
    handle.remove()
    with qkeel.watch(model) as monitor:
        model(x)
    assert float(monitor.read()["1"].max_logit.max()) == pytest.approx(
        threshold, rel=1e-5
    )
