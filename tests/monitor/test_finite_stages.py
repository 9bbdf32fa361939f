"""A measured step names between what a NaN or infinity began, without making the step again, and never an heir."""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.quick import quick
from tests.training import adamw
from torch import nn

from qkeel import watch
from qkeel.records import STAGES

from .test_nan_origin import LAYERS, WIDTH, Model, plant, step

ALL = len(STAGES)


def named(kind, place):
    """What the alarm must say of an origin in a block."""
    layer, after = f"blocks.{place}.attention", f"blocks.{place + 1}.attention"
    by_step = "in the loss or in gradients"
    if kind in ("mlp", "norm", "division"):
        # Behind the last attention nothing sees it until the next step.
        if place == LAYERS - 1:
            return by_step
        return f"between the output of {layer} (finite) and the input of {after} (not finite)"
    return {
        "empty rows": f"in an empty row in {layer}: sample 0, query 3 sees no key",
        "overflow": f"between the input of {layer} (finite) and its queries and keys (not finite)",
        "weight of q": f"in a weight: {layer}.q.weight is not finite",
        "weight of v": f"between the logits of {layer} (finite) and its output (not finite)",
        "weight of o": f"between the logits of {layer} (finite) and its output (not finite)",
        "embedding": "between the data (finite) and the input of blocks.0.attention (not finite)",
        "data": "in the data",
        "loss": by_step,
        "gradients": by_step
        if place == LAYERS - 1
        else f"in gradients, between {after} (finite) and {layer} (not finite)",
    }[kind]


KINDS = (
    *("empty rows", "overflow", "weight of q", "weight of v", "weight of o"),
    *("embedding", "mlp", "norm", "division", "data", "loss", "gradients"),
)


def run(model, steps, stats):
    optimizer = adamw(model, 0.001)
    with warnings.catch_warnings(), watch(model, optimizer, stats=stats) as monitor:
        warnings.simplefilter("ignore")
        for take in steps:
            take(optimizer)
    return monitor


def alarms(monitor):
    return [x.meaning for x in monitor.alarms if x.rule == "not finite"]


@pytest.mark.parametrize("seed", quick([10, 11], lambda seed: seed == 10))
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_origin_is_bracketed(kind, seed):
    draw = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    model = Model().train()
    for block in model.blocks:
        block.attention.fused = draw.random() < 0.5
    passes, place = draw.randint(1, 3), draw.randrange(LAYERS)

    def take(optimizer, hurt=kind):
        step(model, optimizer, draw, hurt, passes)

    def plant_and_take(optimizer):
        plant(model, kind, place)
        take(optimizer)

    monitor = run(model, [lambda x: take(x, ""), plant_and_take, take], "all")
    (meaning,) = alarms(monitor)
    assert named(kind, place) in meaning


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("overflow", "between the input of blocks.1.attention (finite) and its logits"),
        ("empty rows", "in an empty row in blocks.1.attention: sample 0, query 3"),
        ("weight of q", "in a weight: blocks.1.attention.q.weight"),
    ],
)
def test_the_largest_logits_alone_bracket_it_too(kind, sentence):
    torch.manual_seed(0)
    model, draw = Model(), random.Random(0)
    plant(model, kind, 1)
    monitor = run(model, [lambda x: step(model, x, draw, kind, 1)], "max")
    assert sentence in alarms(monitor)[0]


class Scores(nn.Module):
    """Attention written by hand, with weights from its scores and a mask of the pairs that are seen."""

    def __init__(self, weights):
        super().__init__()
        self.qkv, self.weights = nn.Linear(WIDTH, 3 * WIDTH), weights

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.weights(q @ k.mT, mask) @ v


class Two(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.layers = nn.ModuleList([Scores(weights) for _ in range(2)])

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return x


def fused(z, mask):
    eye = torch.eye(z.shape[-1]).expand_as(z)
    return F.scaled_dot_product_attention(z, eye, eye, attn_mask=mask, scale=1.0)


HEALTHY = {
    "a large negative number": lambda z, mask: z.masked_fill(~mask, -1e4).softmax(-1),
    "zeros in place of NaN": lambda z, mask: (
        z.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    ),
    "a fused kernel": fused,
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_rows_without_a_key_that_stay_finite_raise_no_alarm(kind):
    torch.manual_seed(0)
    model = Two(HEALTHY[kind])
    keep = torch.rand(3, 6) < 0.6
    keep[:, 0], keep[0, 1] = True, False
    mask = keep[:, None, :] & keep[:, :, None]

    def take(optimizer):
        model(torch.randn(3, 6, WIDTH), mask)[keep].square().mean().backward()
        optimizer.step()

    monitor = run(model, [take, take], "all")
    assert alarms(monitor) == []
    assert (monitor.sample.heads["finite_stages"] == ALL).all()


def test_minus_infinity_in_a_mask_that_is_passed_is_no_origin():
    torch.manual_seed(0)
    model = Two(lambda z, mask: (z + mask).softmax(-1))
    mask = torch.zeros(5, 5).masked_fill(
        torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf
    )

    def take(optimizer):
        model(torch.randn(2, 5, WIDTH), mask).square().mean().backward()
        optimizer.step()

    def hurt(optimizer):
        model.layers[0].weights = lambda z, mask: (z + mask).softmax(-1) * torch.inf
        take(optimizer)

    assert alarms(run(model, [take], "all")) == []
    (meaning,) = alarms(run(model, [take, hurt], "all"))
    assert "between the logits of layers.0 (finite) and its output" in meaning


def test_half_precision_scores_that_overflow_are_said_with_their_size():
    model = Two(lambda z, mask: z.softmax(-1)).half()
    with torch.no_grad():
        for layer in model.layers:
            layer.qkv.weight.zero_()
            layer.qkv.bias.fill_(100.0)

    def take(optimizer):
        x = torch.zeros(1, 4, WIDTH).half()
        model(x, x).float().mean().backward()
        optimizer.step()

    # 16 · 100 · 100 = 160,000 does not fit float16.
    (meaning,) = alarms(run(model, [take], "all"))
    assert (
        "in the logits of layers.0, which overflow float16: |q| |k| reaches 160,000"
        in meaning
    )
