"""Token classes of cross-attention: the weight that queries give to padded text."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.monitor import Classes

NAMES = ("image", "text", "padding")


class Cross(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.weights: Tensor | None = None

    def forward(self, x, text, present):
        q, k, v = (
            f(y).unflatten(-1, (2, 8)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, text), (self.v, text))
        )
        mask = present[:, None, None].expand(-1, 1, x.shape[1], -1)
        z = q.detach().double() @ k.detach().double().mT * 8**-0.5
        if self.masked:
            z = z.masked_fill(~mask, -torch.inf)
        self.weights = z.softmax(-1)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask if self.masked else None
        )
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("seed", range(6))
def test_weight_on_padding_is_that_of_float64_or_the_pair_is_asked_for(
    seed,
):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    t, s = draw.sample(range(3, 9), 2)
    model = Cross(masked=draw.random() < 0.3)
    x, text = torch.randn(2, t, 16), torch.randn(2, s, 16)
    lengths = torch.tensor([draw.randint(1, s - 1), draw.randint(1, s)])
    present = torch.arange(s) < lengths[:, None]
    of_keys = torch.where(present, 1, 2)
    of_queries = torch.zeros(2, t, dtype=torch.long)
    pair = of_queries, of_keys
    source = pair if draw.random() < 0.5 else lambda *_: pair
    with qkeel.watch(model, classes=Classes(source, NAMES)) as monitor:
        model(x, text, present).sum().backward()
    assert model.weights is not None
    padded = (of_keys == 2)[:, None, None]
    right = (model.weights * padded).sum(-1).mean((0, 2))
    mass = monitor.sample.heads["class_mass/image->padding"]
    assert mass[0] == pytest.approx(right.numpy(), abs=1e-6)

    with (
        warnings.catch_warnings(record=True) as caught,
        qkeel.watch(model, classes=Classes(of_keys, NAMES)) as monitor,
    ):
        warnings.simplefilter("always")
        model(x, text, present).sum().backward()
    # The last tokens of the text are not the queries.
    assert not [name for name in monitor.sample.heads if "class_mass" in name]
    assert any("Classes((of_queries, of_keys)" in str(w.message) for w in caught)
