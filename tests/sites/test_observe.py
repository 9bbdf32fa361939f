"""Attention written by hand in the ways people write it is found, with its exact statistics."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint
from torch import Tensor, nn
from torch.nn.attention import bias
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from qkeel.capture.calls import statistics
from qkeel.capture.intercept import CaptureMode
from qkeel.sites import Tap

B, H, T, D = 2, 4, 6, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal():
    return torch.ones(T, T, dtype=torch.bool).tril()


class Block(Joint):
    """Attention that keeps its queries and keys."""

    def __init__(self, attend):
        super().__init__(attend, H * D, H)

    def heads(self, x):
        q, k, v = super().heads(x)
        self.last = q.detach(), k.detach()
        return q, k, v


def nanogpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(~causal()[None, None], float("-inf"))
    return F.dropout(F.softmax(att, dim=-1), 0.5) @ v


def merged_heads(q, k, v):
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    scores = torch.baddbmm(torch.zeros(1), q, k.mT, beta=0.0, alpha=1 / math.sqrt(D))
    weights = scores.masked_fill_(~causal(), -torch.inf).softmax(-1)
    return torch.bmm(weights, v).view(B, H, T, D)


def head_by_head(q, k, v):
    def one(h):
        scores = q[:, h] @ k[:, h].mT / math.sqrt(D)
        return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v[:, h]

    return torch.stack([one(h) for h in range(H)], dim=1)


def with_sink(q, k, v):
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~causal(), -torch.inf)
    scores = torch.cat([scores, torch.full((B, H, T, 1), 3.0)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v


def without_softmax(q, k, v):
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~causal(), -1e9)
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)) @ v


def checkpointed(q, k, v):
    return checkpoint(nanogpt, q, k, v, use_reentrant=True)


def values_before_the_sum(q, k, v):
    scores = q @ k.mT
    scores -= scores.max(dim=-1, keepdim=True).values.detach()
    e = (scores / math.sqrt(D)).masked_fill(~causal(), -torch.inf).exp_()
    return e @ v / e.sum(-1)[..., None]


def softmax_of_the_rest(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    scores = scores - scores.max()
    scores = (scores - scores.amax(-1, keepdim=True)).transpose(1, 2).transpose(1, 2)
    return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v


WAYS = {
    f.__name__: f
    for f in (
        nanogpt,
        merged_heads,
        head_by_head,
        with_sink,
        without_softmax,
        checkpointed,
        values_before_the_sum,
        softmax_of_the_rest,
    )
}


def oracle(module):
    """Largest logit and mean entropy per head, in float64 on the whole matrix."""
    q, k = (x.double() for x in module.last)
    z = (q @ k.mT / math.sqrt(D)).masked_fill(~causal(), -torch.inf)
    sink = torch.full(
        (*z.shape[:-1], 1),
        3.0 if module.attend is with_sink else -torch.inf,
        dtype=z.dtype,
    )
    p = torch.cat([z, sink], -1).softmax(-1)
    return z.amax((0, 2, 3)), -torch.special.xlogy(p, p).sum(-1).mean((0, 2))


def read_one(model, *inputs):
    with Tap(model) as tap:
        model(*inputs)
        (stats,) = tap.read().values()
    return stats


def test_every_way_to_write_causal_attention_gives_the_oracles_numbers():
    x = torch.randn(B, T, H * D)
    for name, way in WAYS.items():
        module = Block(way)
        stats = read_one(module, x)
        top, entropy = oracle(module)
        assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5, msg=name)
        assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5, msg=name)
        assert stats.n_pairs.tolist() == [B * T * (T + 1) // 2] * H, name
        assert stats.n_queries.tolist() == [B * T] * H, name


def fused_stats(q, k, mask):
    found = []
    with CaptureMode(nn.Identity(), lambda one: found.append(statistics(one.call))):
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    (stats,) = found
    return stats


@pytest.mark.parametrize("name", ["causal_lower_right", "causal_upper_left"])
@pytest.mark.parametrize("keys", [T, T + 3])
def test_a_mask_object_hides_what_it_says(name, keys):
    """torch.nn.attention.bias, which PyTorch advises for caches: a tensor whose own storage holds nothing."""
    q, k = torch.randn(B, H, T, D).double(), torch.randn(B, H, keys, D).double()
    visible = torch.ones(T, keys, dtype=torch.bool)
    visible = visible.tril(keys - T if name == "causal_lower_right" else 0)
    stats = fused_stats(q, k, getattr(bias, name)(T, keys))
    z = (q @ k.mT / math.sqrt(D)).masked_fill(~visible, -torch.inf)
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    assert_close(stats.max_logit, z.amax((0, 2, 3)))
    assert_close(stats.entropy, entropy)
    assert stats.n_pairs.tolist() == [B * int(visible.sum())] * H
