"""The missing transpose of a published attention module, kept as a regression test.

Taylor 2024 ("QK Norm and the Curious Case of Logit Drift", blog post) prints a self-attention with QK-norm in which
v is moved to [batch heads tokens dim] and q and k stay [batch tokens heads dim]. Attention then runs over heads
where it should run over tokens. The module below has that layout; `straight` transposes all three.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import reference
from qkeel.errors import ShapeError
from qkeel.spec import AttentionSpec, RMSNorm

HEADS, HEAD_DIM, EPS = 6, 4, 1e-6


class PublishedAttention(nn.Module):
    """Causal self-attention with RMS QK-norm; `straight` puts the heads of q and k where SDPA wants them."""

    def __init__(self, n_heads: int, head_dim: int, *, straight: bool) -> None:
        super().__init__()
        self.n_heads, self.straight = n_heads, straight
        self.qkv = nn.Linear(n_heads * head_dim, 3 * n_heads * head_dim, bias=False)
        self.out = nn.Linear(n_heads * head_dim, n_heads * head_dim, bias=False)
        self.norms = nn.ModuleDict(
            {part: nn.RMSNorm(head_dim, eps=EPS) for part in "qk"}
        )

    def heads(self, x: Tensor) -> list[Tensor]:
        """q, k, v as [batch tokens heads dim], before the norm."""
        return [
            y.unflatten(-1, (self.n_heads, -1)) for y in self.qkv(x).chunk(3, dim=-1)
        ]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k, v = self.norms["q"](q), self.norms["k"](k), v.transpose(1, 2)
        if self.straight:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def module(*, straight: bool) -> PublishedAttention:
    torch.manual_seed(0)
    made = PublishedAttention(HEADS, HEAD_DIM, straight=straight).double()
    for norm in made.norms.values():
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    return made


def tokens(n: int) -> Tensor:
    return torch.randn(
        2,
        n,
        HEADS * HEAD_DIM,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )


def by_qkeel(attention: PublishedAttention, x: Tensor) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in attention.heads(x))
    params = {f"{part}_norm": attention.norms[part].weight for part in "qk"}
    spec = AttentionSpec(norm=RMSNorm(gain="dim", eps=EPS))
    out = reference.attend(spec, q, k, v, params=params).out
    return attention.out(out.transpose(1, 2).flatten(-2))


def change_by_last_token(attention: PublishedAttention) -> Tensor:
    """How much each position's output moves when the last token changes."""
    x = tokens(HEADS)
    other = x.clone()
    other[:, -1] += 1.0
    return (attention(x) - attention(other)).abs().amax(dim=(0, 2))


@pytest.mark.parametrize("n", [2, 5, 7, 32])
def test_as_published_it_raises_when_tokens_differ_from_heads(n: int) -> None:
    with pytest.raises(RuntimeError):
        module(straight=False)(tokens(n))


@torch.no_grad()
def test_as_published_it_runs_in_silence_when_tokens_equal_heads_and_is_wrong() -> None:
    x = tokens(HEADS)
    wrong = module(straight=False)(x)
    right = module(straight=True)(x)
    assert wrong.shape == right.shape
    assert wrong.isfinite().all()
    assert (wrong - right).abs().max() > 0.1


@torch.no_grad()
def test_as_published_it_leaks_the_future() -> None:
    change = change_by_last_token(module(straight=False))
    assert change[0] == 0  # one visible key has weight 1 whatever the logits are
    assert (change[1:-1] > 1e-3).all()


@torch.no_grad()
def test_transposed_it_does_not_leak_the_future() -> None:
    change = change_by_last_token(module(straight=True))
    assert (change[:-1] == 0).all()
    assert change[-1] > 1e-3


@pytest.mark.parametrize("n", [1, 5, HEADS, 9])
@torch.no_grad()
def test_transposed_it_is_what_qkeel_computes(n: int) -> None:
    attention, x = module(straight=True), tokens(n)
    assert (attention(x) - by_qkeel(attention, x)).abs().max() <= 1e-12


@pytest.mark.parametrize("n", [1, 5, 9])
def test_qkeel_refuses_the_published_layout_and_says_what_to_transpose(n: int) -> None:
    q, k, v = module(straight=False).heads(tokens(n))
    with pytest.raises(ShapeError, match=r"transpose\(1, 2\) on all three"):
        reference.attend(AttentionSpec(), q, k, v.transpose(1, 2))
