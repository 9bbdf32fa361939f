"""Modules whose logit is a sum of products, as they are written in the field, and what is not one."""

import torch
from tests.attention import from_heads, to_heads
from tests.drawing import randn
from torch import nn

H, T, D = 4, 6, 8


class Sum(nn.Module):
    """Attention [b t h·d] whose logit `z` is what `scores` makes of the projections."""

    def __init__(self, scores, *names):
        super().__init__()
        self.scores = scores
        for name in (*names, "v"):
            setattr(self, name, nn.Linear(32, 32, bias=False))
        self.names = names
        self.table = nn.Parameter(torch.randn(T, D))
        self.rows = nn.Parameter(torch.randn(D, T))
        self.per_head = nn.Parameter(torch.randn(T, H * D))
        self.pairs = nn.Parameter(torch.randn(T, T, D))
        self.memory = nn.Parameter(torch.randn(H, 2, D))
        self.embedding = nn.Embedding(2 * T - 1, D)
        self.gap = (torch.arange(T)[:, None] - torch.arange(T)).abs()
        self.gate = nn.Linear(32, H)
        self.z = torch.zeros(())

    def forward(self, x):
        parts = {n: to_heads(getattr(self, n)(x), H, D) for n in (*self.names, "v")}
        v = parts.pop("v")
        self.x = x
        self.z = self.scores(self, parts) / 4
        return from_heads(self.z.softmax(-1) @ v)


def two(m, p):
    return p["q1"] @ p["k1"].mT + p["q2"] @ p["k2"].mT


def in_place(m, p):
    z = p["q1"] @ p["k1"].mT
    z += p["q1"] @ p["k2"].mT
    return z


def with_alpha(m, p):
    return torch.add(p["q1"] @ p["k1"].mT, p["q2"] @ p["k2"].mT * 0.5, alpha=2.0).sub(
        p["q2"] @ p["k1"].mT
    )


def chosen(m, p):
    """As the author of ReRoPE writes it: near keys and far keys, which one mask chooses from."""
    return torch.where(m.gap < 2, p["q1"] @ p["k1"].mT, p["q1"] @ p["k1"].mT / 2)


def batched(m, p):
    q1, k1, q2, k2 = (x.flatten(0, 1) for x in p.values())
    return torch.baddbmm(torch.bmm(q1, k1.mT), q2, k2.mT).view(-1, H, T, T)


def absorbed(m, p):
    """DeepSeek's layout of scores, turned for the softmax of this module."""
    q1, k1, q2, k2 = (x.transpose(1, 2) for x in p.values())
    z = torch.einsum("bshd,bthd->bsht", q1, k1) + torch.einsum(
        "bshd,btd->bsht", q2, k2[:, :, 0]
    )
    return z.transpose(1, 2)


def transformer_xl(m, p):
    """Positions projected as keys, moved to their place by the relative shift."""
    b = p["q1"] @ p["k2"].mT
    b = (
        torch.nn.functional.pad(b, (1, 0))
        .view(len(b), H, T + 1, T)[:, :, 1:]
        .view_as(b)
    )
    return (p["q1"] @ p["k1"].mT + b).masked_fill(
        torch.ones(T, T).triu(1).bool(), -torch.inf
    )


def deberta(m, p):
    """Content to content, content to position and position to content, the positions picked by gather."""
    gap = m.gap.expand(len(p["q1"]), H, T, T)
    far = torch.gather(p["q1"] @ p["k2"].mT, -1, gap)
    near = torch.gather(p["k1"] @ p["q2"].mT, -1, gap).transpose(-1, -2)
    return p["q1"] @ p["k1"].mT + far + near


def shaw_table(m, p):
    return torch.matmul(p["q1"], m.table.mT) + p["q1"] @ p["k1"].mT


def shaw_heads(m, p):
    return p["q1"] @ p["k1"].mT + torch.einsum(
        "bhtd,shd->bhts", p["q1"], m.per_head.view(T, H, D)
    )


def shaw_embedding(m, p):
    return p["q1"] @ p["k1"].mT + torch.einsum(
        "bhtd,tsd->bhts", p["q1"], m.embedding(m.gap)
    )


def shaw_pairs(m, p):
    """A vector for every pair of positions."""
    return torch.einsum("bhtd,tsd->bhts", p["q1"], m.pairs) + p["q1"] @ p["k1"].mT


def memory_keys(m, p):
    """x-transformers' learned keys of each head before those of the tokens."""
    return (
        p["q1"]
        @ torch.cat(
            [m.memory.expand(len(p["k1"]), -1, -1, -1), p["k1"][:, :, 2:]], 2
        ).mT
    )


SUMS = {
    "two": (two, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"])]),
    "in place": (in_place, "q1 k1 k2", [(["q1"], ["k1"]), (["q1"], ["k2"])]),
    "alpha": (
        with_alpha,
        "q1 k1 q2 k2",
        [(["q1"], ["k1"]), (["q2"], ["k2"]), (["q2"], ["k1"])],
    ),
    "baddbmm": (batched, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"])]),
    "absorbed": (absorbed, "q1 k1 q2 k2", [(["q1"], ["k1"]), (["q2"], ["k2"])]),
    "relative shift": (
        transformer_xl,
        "q1 k1 k2",
        [(["q1"], ["k1"]), (["q1"], ["k2"])],
    ),
    "disentangled": (
        deberta,
        "q1 k1 q2 k2",
        [(["q1"], ["k1"]), (["q1"], ["k2"]), (["q2"], ["k1"])],
    ),
    "chosen by a mask": (chosen, "q1 k1", [(["q1"], ["k1"])]),
    "table": (shaw_table, "q1 k1", [(["q1"], ["table"]), (["q1"], ["k1"])]),
    "table of heads": (shaw_heads, "q1 k1", [(["q1"], ["k1"]), (["q1"], ["per_head"])]),
    "embedding": (shaw_embedding, "q1 k1", [(["q1"], ["k1"]), (["q1"], ["embedding"])]),
    "table of pairs": (shaw_pairs, "q1 k1", [(["q1"], ["pairs"]), (["q1"], ["k1"])]),
}


def made(name):
    torch.manual_seed(0)
    scores, names, _ = SUMS[name]
    model = Sum(scores, *names.split())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6)
    return model


def batch(seed=1):
    return randn(2, T, 32, seed=seed)


def gated(m, p):
    """A bias that the input decides on."""
    return p["q1"] @ p["k1"].mT + m.gate(m.x).permute(0, 2, 1)[..., None] * torch.randn(
        T, T
    )


def capped_part(m, p):
    return 5 * torch.tanh(p["q1"] @ p["k1"].mT / 5) + p["q2"] @ p["k2"].mT
