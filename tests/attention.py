"""Attention that knows nothing of qkeel, as programs write it: what the models of many tests have in common."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


def to_heads(x, heads, size):
    """[b h t d] of [b t (h d)]."""
    return x.unflatten(-1, (heads, size)).transpose(1, 2)


def from_heads(y):
    """[b t (h d)] of [b h t d]."""
    return y.transpose(1, 2).flatten(2)


def fused(q, k, v):
    return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def fused_causal(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def scores(q, k):
    """Of each query head, whose keys several may share."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5


def written(q, k, v):
    weights = scores(q, k).softmax(-1)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def later(q, k):
    """The pairs of which the key comes after the query."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)


def written_causal(q, k, v):
    return scores(q, k).masked_fill(later(q, k), -torch.inf).softmax(-1) @ v


class Attention(nn.Module):
    """Heads [b h t d] of [b t m], attended by a function of q, k and v."""

    def __init__(self, attend=fused, m=8, heads=2, *, groups=None, bias=True):
        super().__init__()
        self.attend, self.d, groups = attend, m // heads, groups or heads
        self.q, self.k, self.v = (
            nn.Linear(m, n * self.d, bias) for n in (heads, groups, groups)
        )

    def projected(self, x):
        return self.q(x), self.k(x), self.v(x)

    def heads(self, x):
        return [to_heads(y, -1, self.d) for y in self.projected(x)]

    def forward(self, x):
        return from_heads(self.attend(*self.heads(x)))

    def largest(self, x, attended=None):
        """The largest logit of each head in float64, of the pairs that are attended to."""
        q, k, _ = (y.detach().double() for y in self.heads(x))
        z = scores(q, k)
        return (z if attended is None else z.masked_fill(~attended, -torch.inf)).amax(
            (0, 2, 3)
        )


class Joint(Attention):
    """One projection for all three."""

    def __init__(self, attend=fused, m=8, heads=2, *, groups=None, bias=True):
        nn.Module.__init__(self)
        self.attend, self.d, groups = attend, m // heads, groups or heads
        self.widths = [n * self.d for n in (heads, groups, groups)]
        self.qkv = nn.Linear(m, sum(self.widths), bias)

    def projected(self, x):
        return self.qkv(x).split(self.widths, -1)


def values(model):
    """A copy of each parameter, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
