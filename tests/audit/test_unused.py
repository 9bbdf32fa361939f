"""Vectors of an attention module that the path that runs leaves out: named by explain and by watch, and no others."""

import random
import warnings

import pytest
import torch
from torch import nn

import qkeel


class Attention(nn.Module):
    """Attention with a learned sink, scale or gain, on a path that uses it or on one that forgot it."""

    def __init__(self, part, uses, heads):
        super().__init__()
        self.part, self.uses, self.heads = part, uses, heads
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        d = 32 // heads
        if part == "sinks":
            self.sinks = nn.Parameter(torch.randn(heads))
        elif part == "scale":
            self.scale = nn.Parameter(torch.rand(1, heads, 1, 1) + 0.5)
        else:
            self.gain = nn.ModuleDict({"q": nn.LayerNorm(d, bias=False)})
        # Has no gradient, and matters.
        self.frozen = nn.Parameter(torch.ones(heads), requires_grad=False)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        scale = q.shape[-1] ** -0.5
        if self.uses and self.part == "gain":
            q = self.gain["q"](q)
        if self.uses and self.part == "scale":
            scale = scale * self.scale
        if self.uses and self.part == "sinks":
            z = q @ k.mT * scale
            sinks = self.sinks[:, None, None].expand(len(x), -1, x.shape[1], 1)
            o = torch.cat([z, sinks], -1).softmax(-1)[..., :-1] @ v
        else:
            o = nn.functional.scaled_dot_product_attention(q * scale, k, v, scale=1.0)
        o = o * self.frozen[:, None, None]
        return x + self.out(o.transpose(1, 2).flatten(2))


NAMES = {"sinks": "sinks", "scale": "scale", "gain": "gain.q.weight"}


@pytest.mark.parametrize("seed", range(4))
def test_what_the_path_leaves_out_is_named(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads = draw.choice([2, 4])
    drawn = [(draw.choice([*NAMES]), draw.random() < 0.5) for _ in range(3)]
    model = nn.Sequential(*[Attention(p, uses, heads) for p, uses in drawn])
    left_out = {f"{i}.{NAMES[p]}" for i, (p, uses) in enumerate(drawn) if not uses}
    x = torch.randn(2, 6, 32)

    idle = [
        sentence for site in qkeel.explain(model, x).sites for sentence in site.idle
    ]
    assert len(idle) == len(left_out)
    for name in left_out:
        inner = name.partition(".")[2].removesuffix(".weight")
        assert any(inner in sentence for sentence in idle)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        warnings.catch_warnings(record=True) as caught,
        qkeel.watch(model, optimizer, rules=()),
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(w.message) for w in caught if "got no gradient" in str(w.message)]
    assert len(said) == bool(left_out)
    for sentence in said:
        assert {*sentence.split(" got ")[0].split(", ")} == left_out
