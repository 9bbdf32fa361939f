"""Token classes of cross-attention: the weight that queries give to padded text."""

import random
import re

import numpy as np
import pytest
import torch
from tests.attention import Attention, from_heads, scores
from tests.training import warned
from torch import nn

import qkeel
from qkeel.monitor import Classes

NAMES = ("image", "text", "padding")


class Cross(Attention):
    """Queries of x and keys of a text, whose padding is hidden or not."""

    def forward(self, x, text, present):
        q, k, v = self.heads(x)[0], *self.heads(text)[1:]
        mask = present[:, None, None] if self.is_masked else None
        z = scores(q.detach().double(), k.detach().double())
        self.weights = (
            z if mask is None else z.masked_fill(~mask, -torch.inf)
        ).softmax(-1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return from_heads(out)


@pytest.mark.parametrize("seed", range(6))
def test_weight_on_padding_is_that_of_float64_or_the_pair_is_asked_for(
    seed,
):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    t, s = draw.sample(range(3, 9), 2)
    model = Cross(m=16)
    model.is_masked = draw.random() < 0.3
    x, text = torch.randn(2, t, 16), torch.randn(2, s, 16)
    lengths = torch.tensor([draw.randint(1, s - 1), draw.randint(1, s)])
    present = torch.arange(s) < lengths[:, None]
    of_keys = torch.where(present, 1, 2)
    of_queries = torch.zeros(2, t, dtype=torch.long)
    pair = of_queries, of_keys
    source = pair if draw.random() < 0.5 else lambda *_: pair
    with qkeel.watch(model, classes=Classes(source, NAMES)) as monitor:
        model(x, text, present).sum().backward()
    padded = (of_keys == 2)[:, None, None]
    right = (model.weights * padded).sum(-1).mean((0, 2))
    mass = monitor.sample.heads["class_mass/image->padding"]
    assert mass[0] == pytest.approx(right.numpy(), abs=1e-6)

    with (
        warned() as caught,
        qkeel.watch(model, classes=Classes(of_keys, NAMES)) as monitor,
    ):
        model(x, text, present).sum().backward()
    # The last tokens of the text are not the queries.
    assert not [name for name in monitor.sample.heads if "class_mass" in name]
    # What is proposed is right when it is typed.
    (line,) = re.findall(r"classes=(.*), or a function", caught[-1])
    proposed = eval(line, {**globals(), "classes_of_keys": of_keys})
    with qkeel.watch(model, classes=proposed) as monitor:
        model(x, text, present).sum().backward()
    assert np.array_equal(mass, monitor.sample.heads["class_mass/image->padding"])
