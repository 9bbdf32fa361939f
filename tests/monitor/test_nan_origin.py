"""The origin of the first NaN is named, and never one of its heirs: planted in twelve ways, at drawn places."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from tests.training import adamw, sgd
from torch import nn

from qkeel import watch
from qkeel.errors import AlarmWarning, RefusedError
from qkeel.monitor.nan_origin import NanOrigin

WIDTH, HEADS, LAYERS, VOCABULARY = 16, 2, 3, 11


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.hurt, self.fused = "", False

    def forward(self, x, mask):
        q, k, v = (to_heads(layer(x), HEADS, -1) for layer in (self.q, self.k, self.v))
        if self.hurt == "empty rows":
            mask = mask.repeat(len(x), 1, 1, 1)
            mask[0, :, 3] = False
        if self.hurt == "overflow":
            q, k = q * 1e25, k * 1e25
        if self.fused and not self.hurt:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return self.o(from_heads(y))


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.hurt = nn.Parameter(torch.ones(WIDTH)), ""

    def forward(self, x):
        if self.hurt == "norm":
            x = (
                x * torch.tensor([0.0] + [1.0] * (x.shape[1] - 1))[:, None]
            )  # 0 / 0 at the first token
            return self.gain * x / x.norm(dim=-1, keepdim=True)
        return self.gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.hurt = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), ""

    def forward(self, x):
        y = F.gelu(self.up(x))
        if self.hurt == "mlp":
            y = y * torch.log(torch.zeros(()))
        if self.hurt == "division":
            y = y / (y - y)
        if self.hurt == "gradients":
            y = (
                y + (y - y.detach()).abs().sqrt()
            )  # 0, with a derivative of infinity times 0
        return self.down(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            RMSNorm(),
            Attention(),
            RMSNorm(),
            MLP(),
        )

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList([Block() for _ in range(LAYERS)]),
        )
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, scale):
        x = self.dropout(self.embed(tokens) * scale)
        mask = torch.ones(
            1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool
        ).tril()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def plant(model, kind, place):
    """Plants an origin and returns what a sentence has to name."""
    block = model.blocks[place]
    if kind in ("empty rows", "overflow"):
        block.attention.hurt = kind
        sentence = (
            f"blocks.{place}.attention: its output is the first that is not finite"
        )
        return f"{sentence}, at [0, 3, 0]" if kind == "empty rows" else sentence
    if kind == "norm":
        block.norm2.hurt = kind
        return f"blocks.{place}.norm2"
    if kind in ("mlp", "division", "gradients"):
        block.mlp.hurt = kind
        return (
            f"backward of blocks.{place}.mlp"
            if kind == "gradients"
            else f"in blocks.{place}.mlp"
        )
    if kind in ("weight of q", "weight of v", "weight of o"):
        name = kind[-1]
        with torch.no_grad():
            getattr(block.attention, name).weight[1, 2] = torch.nan
        return f"weight: blocks.{place}.attention.{name}.weight"
    if kind == "embedding":
        with torch.no_grad():
            model.embed.weight[:, 2] = torch.inf
        return "weight: embed.weight"
    return {"data": "the data", "loss": "in the loss"}[kind]


KINDS = [
    *(
        "empty rows",
        "overflow",
        "weight of q",
        "weight of v",
        "weight of o",
        "embedding",
        "mlp",
        "norm",
        "division",
    ),
    *("data", "loss", "gradients"),
]


def step(
    model,
    optimizer,
    draw,
    hurt,
    passes,
):
    bad = draw.randrange(passes)
    for i in range(passes):
        tokens, scale = torch.randint(VOCABULARY, (2, 7)), torch.ones(2, 7, 1)
        if hurt == "data" and i == bad:
            scale[1, 2] = torch.nan
        with torch.no_grad():
            model(tokens, torch.ones(2, 7, 1))  # a pass that is not trained
        logits = model(tokens, scale)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        if hurt == "loss" and i == bad:
            loss = loss / (loss - loss)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_origin_is_named(kind, seed):
    draw = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    model, sentences = Model().train(), list[str]()
    for block in model.blocks:
        block.attention.fused = draw.random() < 0.5
    optimizer = adamw(model, 0.001)
    passes = draw.randint(1, 3)
    with NanOrigin(model, [optimizer], sentences.append) as origin:
        step(model, optimizer, draw, "", passes)
        assert not sentences
        named = plant(model, kind, draw.randrange(LAYERS))
        step(model, optimizer, draw, kind, passes)
        assert not origin.active  # after the first, everything is NaN
    assert origin.guard.error is None
    assert len(sentences) == 1
    assert named in sentences[0]


def test_a_model_with_batch_statistics_and_dropout_is_made_again_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    )
    optimizer, sentences = sgd(model), list[str]()
    with NanOrigin(model, [optimizer], sentences.append):
        output = model(torch.randn(6, 4))
        mean = model[1].running_mean.clone()
        (output.sum() * torch.inf).backward()
        optimizer.step()
    assert torch.equal(model[1].running_mean, mean)
    assert "in the loss" in sentences[0]


def test_the_second_of_two_optimizers_finds_the_passes_that_the_first_has_stepped_on():
    torch.manual_seed(0)
    model, sentences = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), list[str]()
    first, second = (sgd(layer) for layer in model)
    model[1].weight.register_hook(
        lambda grad: grad * torch.inf
    )  # the gradients of the first stay finite
    with NanOrigin(model, [first, second], sentences.append) as origin:
        for optimizer in (first, second):
            if optimizer is first:
                model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
        assert len(origin._passes) in (0, 1)
    assert "backward of 1" in sentences[0]


def test_watch_raises_the_origin_as_an_alarm():
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model, 0.001)
    with watch(model, optimizer, nan=True, rules=[]) as monitor:
        step(model, optimizer, random.Random(0), "", 1)
        model.blocks[2].mlp.hurt = "mlp"
        with pytest.warns(AlarmWarning, match=r"blocks\.2\.mlp"):
            step(model, optimizer, random.Random(0), "", 1)
    assert [alarm.rule for alarm in monitor.alarms] == ["nan_origin"]
    assert not model._forward_hooks


def test_without_an_optimizer_it_is_refused():
    with pytest.raises(RefusedError, match="optimizer"):
        watch(Model(), nan=True)
