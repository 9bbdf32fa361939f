"""Small models with sparse attention as it was published, and what each computes, in float64 by their formulas alone.

DSA: DeepSeek-V3.2 (indexer Σ_j w_j ReLU(q_j·k), top-k keys). MoBA: Lu et al. 2025, arXiv 2502.13189 (blocks by mean
keys, the query's own always).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from torch import nn

M, H, D, T, B = 32, 4, 8, 24, 2
NEVER = -math.inf


def heads(x, n):
    return to_heads(x, n, -1)


def places():
    return torch.arange(T)[:, None], torch.arange(T)[None]


class Sparse(nn.Module):
    """Projections, the last input in float64, and the pairs [b h t s] that its pass left out."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(M, M)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(M, H * D, bias=False) for _ in range(3)
        )
        self.hidden = self.input = torch.empty(0)

    def qkv(self, x):
        self.input = x.detach().double()
        return [heads(f(x), H) for f in (self.q_proj, self.k_proj, self.v_proj)]

    def double(self, linear, n):
        """A projection of the last input in float64, as heads."""
        return heads(self.input @ linear.weight.detach().double().mT, n)

    def dense(self):
        """The logits [b h t s] of all pairs of the last input."""
        q, k = self.double(self.q_proj, H), self.double(self.k_proj, H)
        return (q @ k.mT / math.sqrt(D)).numpy()

    def truth(self):
        return np.where(self.hidden, NEVER, self.dense())


class DSA(Sparse):
    def __init__(self, *, fused, top=5, index_heads=3):
        super().__init__()
        self.top, self.fused, self.index_heads = top, fused, index_heads
        self.iq, self.ik = (
            nn.Linear(M, index_heads * D, bias=False),
            nn.Linear(M, D, bias=False),
        )
        self.iw = nn.Linear(M, index_heads, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x)
        i, j = places()
        later = (j > i)[: x.shape[1], : x.shape[1]]
        iq, ik, w = (
            self.iq(x).unflatten(-1, (self.index_heads, D)),
            self.ik(x),
            self.iw(x),
        )
        if self.fused:  # as the einsums of the reference code
            index = torch.einsum("bthd,bsd->bths", iq, ik).relu()
            index = torch.einsum("bths,bth->bts", index, w)
        else:
            index = (F.relu(iq @ ik.mT[:, None]) * w[..., None]).sum(2)
        index = index + torch.zeros(later.shape).masked_fill(later, NEVER)
        chosen = index.topk(min(self.top, x.shape[1]), dim=-1).indices
        mask = (
            torch.full_like(index, NEVER)
            .scatter(-1, chosen, 0.0)
            .masked_fill(later, NEVER)[:, None]
        )
        self.hidden = (mask == NEVER).expand(-1, H, -1, -1)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = (q @ k.mT / math.sqrt(D) + mask).softmax(-1) @ v
        return from_heads(out)

    def index_truth(self):
        """I [b t s] = Σ_j w_j ReLU(q_j·k), -inf where the key comes later."""
        q = self.double(self.iq, self.index_heads)
        k, w = (
            self.double(self.ik, 1),
            (self.input @ self.iw.weight.detach().double().mT).mT[..., None],
        )
        i, j = places()
        return ((q @ k.mT).clamp_min(0) * w).sum(1).masked_fill(j > i, NEVER).numpy()


class MoBA(Sparse):
    """All sequences of a batch at once; the reference code takes one after the other."""

    def __init__(self, *, block=4, top=2):
        super().__init__()
        self.block, self.top = block, top

    def forward(self, x):
        q, k, v = self.qkv(x)
        t = x.shape[1]
        n = math.ceil(t / self.block)
        means = torch.stack(
            [k[:, :, i * self.block : (i + 1) * self.block].mean(2) for i in range(n)],
            2,
        )
        gate = torch.einsum("bhtd,bhnd->bhtn", q, means)
        own, blocks = torch.arange(t)[:, None] // self.block, torch.arange(n)[None]
        gate = gate.masked_fill(blocks > own, NEVER).masked_fill(
            blocks == own, math.inf
        )
        best = gate.topk(min(self.top, n), dim=-1).indices
        seen = (
            torch.zeros_like(gate, dtype=torch.bool)
            .scatter(-1, best, True)
            .repeat_interleave(self.block, -1)
        )
        seen = seen[..., :t] & torch.ones(t, t, dtype=torch.bool).tril()
        self.hidden = ~seen
        z = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(D)
        return torch.einsum(
            "bhts,bhsd->bthd", z.masked_fill(~seen, NEVER).softmax(-1), v
        ).flatten(2)


class Model(nn.Module):
    """A linear map, and the attention as the module `a`."""

    def __init__(self, a):
        super().__init__()
        self.inner, self.a = nn.Linear(M, M), a

    def forward(self, x):
        return self.a(self.inner(x))


class Numbers(NamedTuple):
    """By head: the largest logit, the mean entropy, the mean weight on the first key that a row reaches."""

    max_logit: np.ndarray
    entropy: np.ndarray
    sink_share: np.ndarray


def numbers(logits):
    """Row by row, of the rows that reach a key, in plain float64."""
    b, h, t, _ = logits.shape
    top, entropies, firsts = (
        np.full(h, -np.inf),
        [[] for _ in range(h)],
        [[] for _ in range(h)],
    )
    for one, head, row in np.ndindex(b, h, t):
        z = logits[one, head, row]
        reached = np.flatnonzero(np.isfinite(z))
        if not len(reached):
            continue
        top[head] = max(top[head], z[reached].max())
        e = np.exp(z[reached] - z[reached].max())
        p = e / math.fsum(e)
        entropies[head].append(-math.fsum(x * math.log(x) for x in p if x > 0))
        if len(reached) > 1:
            firsts[head].append(p[0])
    return Numbers(
        top,
        np.array([np.mean(x) for x in entropies]),
        np.array([np.mean(x) for x in firsts]),
    )
