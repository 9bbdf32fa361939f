"""Vectors of an attention module that the path that runs leaves out: named by explain and by watch, and no others."""

import random

import pytest
import torch
from tests.attention import Joint, from_heads, fused, scores
from tests.training import sgd, step, warned
from torch import nn

import qkeel


class Block(Joint):
    """Attention with a learned sink, scale or gain, on a path that uses it or on one that forgot it."""

    def __init__(self, part, uses, heads):
        super().__init__(None, 32, heads)
        self.used = part if uses else ""
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        if part == "sinks":
            self.sinks = nn.Parameter(torch.randn(heads))
        elif part == "scale":
            self.scale = nn.Parameter(torch.rand(1, heads, 1, 1) + 0.5)
        else:
            self.gain = nn.ModuleDict({"q": nn.LayerNorm(32 // heads, bias=False)})
        # Has no gradient, and matters.
        self.frozen = nn.Parameter(torch.ones(heads), requires_grad=False)

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        if self.used == "gain":
            q = self.gain["q"](q)
        if self.used == "scale":
            q = q * self.scale
        if self.used == "sinks":
            sinks = self.sinks[:, None, None].expand(len(q), -1, q.shape[2], 1)
            o = torch.cat([scores(q, k), sinks], -1).softmax(-1)[..., :-1] @ v
        else:
            o = fused(q, k, v)
        o = o * self.frozen[:, None, None]
        return x + self.out(from_heads(o))


NAMES = {"sinks": "sinks", "scale": "scale", "gain": "gain.q.weight"}


@pytest.mark.parametrize("seed", range(4))
def test_what_the_path_leaves_out_is_named(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads = draw.choice([2, 4])
    drawn = [(draw.choice([*NAMES]), draw.random() < 0.5) for _ in range(3)]
    model = nn.Sequential(*[Block(p, uses, heads) for p, uses in drawn])
    left_out = {f"{i}.{NAMES[p]}" for i, (p, uses) in enumerate(drawn) if not uses}
    x = torch.randn(2, 6, 32)

    idle = [
        sentence for site in qkeel.explain(model, x).sites for sentence in site.idle
    ]
    assert len(idle) == len(left_out)
    for name in left_out:
        inner = name.partition(".")[2].removesuffix(".weight")
        assert any(inner in sentence for sentence in idle)

    optimizer = sgd(model, 0.01)
    with (
        warned() as caught,
        qkeel.watch(model, optimizer, rules=()),
    ):
        for _ in range(3):
            step(model, optimizer, x)
    said = [text for text in caught if "got no gradient" in text]
    assert len(said) == bool(left_out)
    for sentence in said:
        assert {*sentence.split(" got ")[0].split(", ")} == left_out
