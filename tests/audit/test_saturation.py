"""`check` names a layer whose softmax passes back next to no gradient, and no heads that healthy models have."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, from_heads, later
from tests.drawing import randn
from torch import nn

import qkeel
from qkeel.metrics import Status

WIDTH, HEADS = 64, 4


class Scaled(Joint):
    """Attention with a scale, with a kernel or by hand; q and k are normed if asked."""

    def __init__(self, scale, *, fused, head_dim, norm):
        super().__init__(None, HEADS * head_dim, HEADS)
        self.qkv = nn.Linear(WIDTH, sum(self.widths))
        self.o = nn.Linear(HEADS * head_dim, WIDTH)
        self.scale, self.fused = scale, fused
        self.q_norm = nn.RMSNorm(head_dim) if norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim) if norm else nn.Identity()
        self.bias = 0.0

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        mask = torch.zeros(later(q, k).shape).masked_fill(later(q, k), -torch.inf)
        if self.fused:
            bias = self.bias + mask
            y = F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale)
        else:
            y = (q @ k.mT * self.scale + self.bias + mask).softmax(-1) @ v
        return self.o(from_heads(y))


def model(scale, *, fused, head_dim=256, norm=True):
    layers = [
        Scaled(scale, fused=fused, head_dim=head_dim, norm=norm) for _ in range(2)
    ]
    return nn.Sequential(*layers)


def seeded(seed, length):
    return randn(2, length, WIDTH, seed=seed)


@pytest.mark.parametrize(("seed", "fused"), [(0, True), (1, False)])
def test_a_norm_with_a_scale_of_1_is_saturated_until_the_line_is_typed(fused, seed):
    draw = random.Random(seed)
    head_dim, length = draw.choice([256, 384]), draw.choice([32, 48])
    torch.manual_seed(seed)
    saturated = model(1.0, fused=fused, head_dim=head_dim)
    x = seeded(seed, length)
    health = qkeel.check(saturated, x)
    assert health.status is Status.NOT_HEALTHY
    assert "0 and 1 more is saturated: 4 of 4 heads" in str(health)
    line = str(health).partition("To act: ")[2].partition("  # ")[0]
    exec(line.partition(": ")[2], {"model": saturated})
    assert qkeel.check(saturated, x).status is Status.HEALTHY
    usual = model(head_dim**-0.5, fused=fused, head_dim=head_dim)
    assert qkeel.check(usual, x).status is Status.HEALTHY


def test_large_weights_without_a_norm_are_said_and_a_norm_is_proposed():
    torch.manual_seed(0)
    sharp = model(0.25, fused=True, head_dim=16, norm=False)
    with torch.no_grad():
        for layer in sharp:
            layer.qkv.weight[: 2 * HEADS * 16] *= 30
    health = qkeel.check(sharp, seeded(0, 40), threshold=1e9)
    assert "is saturated" in str(health)
    assert 'qkeel.apply(model, "qk_norm", batch=batch)' in str(health)


def alibi(t, head):
    return -(2.0 ** (-8 * (head + 1) / HEADS)) * (
        torch.arange(t)[:, None] - torch.arange(t)
    )


def sink(t, head):
    return 40.0 * (torch.arange(t) == 0).expand(t, t)


def previous(t, head):
    return 40.0 * torch.eye(t).roll(-1, 1)


def itself(t, head):
    return 40.0 * torch.eye(t)


BY_HAND = {
    "ALiBi": alibi,
    "sinks": sink,
    "previous token": previous,
    "own token": itself,
    "mixed": lambda t, head: [alibi, sink, previous, itself][head](t, head),
}


@pytest.mark.parametrize(
    ("kind", "fused"), [*((kind, True) for kind in BY_HAND), ("mixed", False)]
)
def test_heads_that_attend_to_a_place_are_healthy(kind, fused):
    torch.manual_seed(0)
    positional = model(0.125, fused=fused, head_dim=64)
    t = random.Random(f"{kind} {fused}").choice([12, 40])
    for layer in positional:
        layer.bias = torch.stack([BY_HAND[kind](t, head) for head in range(HEADS)])
    assert "saturated" not in str(qkeel.check(positional, seeded(0, t)))


@pytest.mark.parametrize("name", ["sink", "sigmoid:length=24"])
def test_weights_that_rest_on_a_sink_or_do_not_compete_are_no_saturation(
    name,
):
    torch.manual_seed(0)
    attention = qkeel.nn.Attention(WIDTH, HEADS)
    with qkeel.apply(attention, name, batch=seeded(0, 24)):
        with torch.no_grad():
            for parameter_name, parameter in attention.named_parameters():
                if "sink" in parameter_name:
                    # Nearly all of the weight.
                    parameter.fill_(12.0)
        assert "saturated" not in str(qkeel.check(attention, seeded(0, 24)))


def test_a_single_saturated_head_is_no_layer():
    torch.manual_seed(0)
    mixed = model(0.125, fused=True, head_dim=64, norm=False)
    with torch.no_grad():
        for layer in mixed:
            layer.qkv.weight[:64] *= 60
    assert "saturated" not in str(qkeel.check(mixed, seeded(0, 40), threshold=1e9))
