"""frozen_qk freezes whatever stands between the projections and q·k: drawn layers, judged by q and k themselves."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qkeel
from qkeel.errors import RefusedError

WIDTH, HEADS, TOKENS = 12, 3, 5
SIZE = WIDTH // HEADS


class HandNorm(nn.Module):
    """An RMS norm as people write it, with a gain of 1 + w."""

    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.w)


def rotated(q, p, x):
    """By learned frequencies."""
    angles = torch.arange(q.shape[1]).to(q)[:, None, None] * p
    (a, b), cos, sin = q.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def over_tokens(q, module, x):
    """By a module of channels before tokens."""
    return module(q.flatten(2).mT).mT.reshape_as(q)


# By name: what is trained, a parameter of a shape or a module, and how it changes q or k [b t h d] after its projection.
BETWEEN = {
    "added": ((WIDTH,), lambda q, p, x: (q.flatten(2) + p).view_as(q)),
    "multiplied": ((SIZE,), lambda q, p, x: q * p),
    "softplus": ((SIZE,), lambda q, p, x: q * F.softplus(p)),
    "temperature per token": (
        (2 * TOKENS, 1, 1),
        lambda q, p, x: q * p[: q.shape[1]],
    ),
    "table": ((2 * TOKENS, 1, SIZE), lambda q, p, x: q + p[: q.shape[1]]),
    "frequencies": ((SIZE // 2,), rotated),
    "gate": ((WIDTH, WIDTH), lambda q, p, x: q * torch.sigmoid(x @ p).view_as(q)),
    "mixed": ((SIZE, SIZE), lambda q, p, x: q @ p),
    "rms norm": (
        lambda: nn.RMSNorm(WIDTH),
        lambda q, norm, x: norm(q.flatten(2)).view_as(q),
    ),
    "hand norm": (lambda: HandNorm(SIZE), lambda q, norm, x: norm(q)),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), over_tokens),
    "convolution": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
        over_tokens,
    ),
}


class Between(nn.Module):
    """What changes q or k after its projection, by name."""

    def __init__(self, kind):
        super().__init__()
        trained, self.change = BETWEEN[kind]
        is_shape = isinstance(trained, tuple)
        self.p = nn.Parameter(torch.randn(trained)) if is_shape else trained()
        self.kind = kind

    def forward(self, q, x):
        return self.change(q, self.p, x)


class WeightNorm(nn.Linear):
    """Its weight is computed by hand."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.g = nn.Parameter(torch.rand(WIDTH, 1) + 0.5)

    def forward(self, x):
        w = self.g * self.weight / self.weight.norm(dim=1, keepdim=True)
        return F.linear(x, w, self.bias)


def two(*between):
    return nn.Sequential(nn.Linear(WIDTH, 8), *between, nn.Linear(8, WIDTH))


# What makes q or k [b t h·d] of x.
PROJECTIONS = {
    "plain": lambda: nn.Linear(WIDTH, WIDTH),
    "bare": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "two": two,
    "normed": lambda: two(nn.LayerNorm(8)),
    "mlp": lambda: two(nn.GELU()),
    "weight norm": WeightNorm,
}


class Layer(nn.Module):
    """An attention layer that shows q and k of its last pass."""

    def __init__(self, draw):
        super().__init__()
        self.fused = draw.choice(["", "", "", "bare", "bias", "added", "multiplied"])
        if self.fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, self.fused == "bias")
            if self.fused in ("added", "multiplied"):
                self.p = nn.Parameter(torch.randn(3 * WIDTH))
        else:
            self.kinds = draw.choices([*PROJECTIONS, "plain"], k=2)
            self.q, self.k = (PROJECTIONS[kind]() for kind in self.kinds)
            self.v = nn.Linear(WIDTH, WIDTH)
        # After another matrix and a norm, it is not known which part of a fused vector the values use.
        kinds = [
            x for x in BETWEEN if not self.fused or x not in ("mixed", "convolution")
        ]
        self.after_q, self.after_k = (
            nn.ModuleList(
                Between(draw.choice(kinds)) for _ in range(draw.randint(0, 2))
            )
            for _ in "qk"
        )
        if draw.random() < 0.2:
            self.after_k = self.after_q
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.fused:
            qkv = self.qkv(x)
            if self.fused == "added":
                qkv = qkv + self.p
            if self.fused == "multiplied":
                qkv = qkv * self.p
            q, k, v = qkv.chunk(3, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (y.unflatten(-1, (HEADS, SIZE)) for y in (q, k, v))
        for after in self.after_q:
            q = after(q, x)
        for after in self.after_k:
            k = after(k, x)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        self.logits, self.values = (q @ k.mT).detach().clone(), v.detach().clone()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def __str__(self):
        made = [self.fused] if self.fused else self.kinds
        return (
            f"{made} {[a.kind for a in self.after_q]} {[a.kind for a in self.after_k]}"
        )


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Layer(draw)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x).tanh()


def outcome(seed):
    """Whether any step changes q·k as a function of the layer's input; "" if none does."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(draw) for _ in range(draw.randint(1, 2)))).double()
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    optimizer = draw.choice(
        [
            lambda: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            lambda: torch.optim.AdamW(model.parameters(), 0.1),
        ]
    )()
    try:
        if draw.random() < 0.5:
            qkeel.apply(model, "frozen_qk", optimizer, batch=x)
        else:
            qkeel.apply(model, "frozen_qk", optimizer)
            model(x)
    except RefusedError as error:
        return f"refused: {error}"
    longer = torch.randn(3, 2 * TOKENS, WIDTH, dtype=torch.float64)
    layers = [block.attention for block in model]

    def shown():
        states = [{n: b.clone() for n, b in y.named_buffers()} for y in layers]
        for layer in layers:
            layer(longer)
        for layer, state in zip(layers, states):
            for name, b in layer.named_buffers():
                b.copy_(state[name])
        return [(y.logits, y.values) for y in layers]

    before, norms = shown(), [b.norm.weight.detach().clone() for b in model]
    for _ in range(2):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    for layer, (z, v), (z0, v0) in zip(layers, shown(), before):
        if not torch.equal(z, z0):
            return f"moved: {layer}"
        if any(torch.equal(a, b) for a, b in zip(v.unbind(1), v0.unbind(1))):
            return f"values are frozen too: {layer}"
    if any(torch.equal(b.norm.weight, old) for b, old in zip(model, norms)):
        return "the norm before the layer is frozen too"
    return ""


@pytest.mark.parametrize("seed", range(12))
def test_no_step_changes_the_product(seed):
    found = outcome(seed)
    assert not found or found.startswith("refused")


def test_a_bias_in_an_optimizer_that_was_not_passed_is_refused():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    first, second = torch.optim.SGD(matrices, 0.1), torch.optim.SGD(vectors, 0.1)
    with pytest.raises(RefusedError, match="in_proj_bias"):
        qkeel.apply(model, "frozen_qk", first, batch=torch.randn(2, 3, 8))
    qkeel.apply(model, "frozen_qk", [first, second], batch=torch.randn(2, 3, 8))
