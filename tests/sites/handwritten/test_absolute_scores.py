"""Attention by the size of q·k, as x-transformers' signed attention: the softmax takes |z|, and |z| is what is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qkeel


class SignedAttention(nn.Module):
    """sign(z) · softmax(|z|), causal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.n_heads = nn.Linear(16, 48, bias=False), nn.Linear(16, 16), 2
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.qkv(x).view(-1, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        z = q @ k.mT * 8**-0.5
        sign, z = z.sign(), z.abs()
        self.logits = z.detach()
        z = z.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.finfo(z.dtype).max)
        return self.out(((z.softmax(-1) * sign) @ v).transpose(1, 2).flatten(2))


def test_the_logits_of_a_softmax_of_absolute_scores_are_these() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(SignedAttention()), 3 * torch.randn(2, 5, 16)
    with qkeel.watch(model) as monitor:
        model(x)
    z = model[0].logits
    assert z is not None
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    weights = z.double().masked_fill(~seen, -torch.inf).softmax(-1)
    stats = monitor.read()["0"]
    z = z.double()
    torch.testing.assert_close(stats.max_logit, z.masked_fill(~seen, 0.0).amax((0, 2, 3)))
    torch.testing.assert_close(stats.min_logit, z.masked_fill(~seen, torch.inf).amin((0, 2, 3)))
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-5, atol=1e-6)


def test_a_remedy_that_scales_weights_is_told_that_scores_are_taken_absolute() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(SignedAttention()), torch.randn(2, 5, 16)
    (site,) = qkeel.find_sites(model, x)
    assert "absolute" in site.why
    with pytest.raises(qkeel.errors.RefusedError, match="absolute"):
        qkeel.apply(model, "lalr:tau=0.1", torch.optim.SGD(model.parameters(), lr=0.1), batch=x)


class HiddenBefore(SignedAttention):
    """The mask comes before the absolute value, so that what it hides has the most weight: a mistake."""

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.qkv(x).view(-1, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        z = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
        return self.out((z.abs().softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_scores_that_were_masked_before_are_not_called_hidden_after() -> None:
    torch.manual_seed(0)
    with pytest.raises(qkeel.errors.RefusedError, match="could not be followed beyond abs"):
        qkeel.find_sites(nn.Sequential(HiddenBefore()), torch.randn(2, 5, 16))
