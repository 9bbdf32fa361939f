"""A block is its formula, in every norm order."""

import pytest
import torch
from torch.testing import assert_close

from qkeel.nn import MLP, Attention, Block
from qkeel.nn.decoder import NORM_ORDERS


def make(order, cross=None):
    block = Block(Attention(16, 4), MLP(16, 24), 16, order, cross).double()
    for name, p in block.named_parameters():
        if "norm" in name:
            p.data.normal_(1.0, 0.3)
    return block


def by_formula(block, order, x, context=None):
    def norm(name, x):
        size = (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x / size * getattr(block, name).weight

    crosses = [] if context is None else ["cross_attention"]
    for name in ("attention", *crosses, "mlp"):
        before = norm(f"{name}_norm", x) if order in ("pre", "peri") else x
        options = {"context": context} if name in crosses else {}
        branch = getattr(block, name)(before, **options)
        if order in ("swin", "peri"):
            branch = norm(f"{name}_post_norm", branch)
        x = x + branch
        if order == "post":
            x = norm(f"{name}_post_norm", x)
    return x


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_output_is_the_formula_of_the_norm_order(order):
    block, x = make(order), torch.randn(2, 5, 16, dtype=torch.float64)
    out = block(x)
    assert_close(out, by_formula(block, order, x), rtol=0, atol=1e-12)
    crossed, context = make(order, Attention(16, 4)), torch.randn(2, 3, 16).double()
    expected = by_formula(crossed, order, x, context)
    assert_close(crossed(x, context=context), expected)
    # Mask and positions reach the attention.
    real = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    pos = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    padded = block(x, mask=real, pos=pos)
    assert_close(padded[0], out[0], rtol=0, atol=1e-12)
    assert_close(padded[1, 2:], block(x[1:, 2:])[0], rtol=0, atol=1e-12)


def test_mlp_is_gelu_or_swiglu():
    x = torch.randn(3, 8, dtype=torch.float64)
    gelu, swiglu = MLP(8, 12).double(), MLP(8, 12, "swiglu").double()
    phi = 0.5 * (1 + torch.erf(gelu.up(x) / 2**0.5))
    assert_close(gelu(x), gelu.down(gelu.up(x) * phi))
    assert swiglu.gate is not None
    silu = swiglu.gate(x) / (1 + torch.exp(-swiglu.gate(x)))
    assert_close(swiglu(x), swiglu.down(silu * swiglu.up(x)))
