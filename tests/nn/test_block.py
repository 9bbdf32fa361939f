"""A block is its formula, in every norm order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qkeel.errors import UnknownNameError
from qkeel.nn import MLA, MLP, Attention, Block
from qkeel.nn.decoder import NORM_ORDERS
from qkeel.nn.mla import LatentSizes


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def make(order: str) -> Block:
    block = Block(Attention(16, 4), MLP(16, 24), 16, order).double()  # type: ignore[arg-type]
    for name, p in block.named_parameters():
        if "norm" in name:
            p.data.normal_(1.0, 0.3)
    return block


def before(block: Block, name: str) -> Callable[[Tensor], Tensor]:
    weight = getattr(block, name).weight
    return lambda x: rms(x, weight)


FORMULAS: dict[str, Callable[[Block, Tensor], Tensor]] = {}


def pre(b: Block, x: Tensor) -> Tensor:
    x = x + b.attention(before(b, "attention_norm")(x))
    return x + b.mlp(before(b, "mlp_norm")(x))


def post(b: Block, x: Tensor) -> Tensor:
    x = before(b, "attention_post_norm")(x + b.attention(x))
    return before(b, "mlp_post_norm")(x + b.mlp(x))


def swin(b: Block, x: Tensor) -> Tensor:
    x = x + before(b, "attention_post_norm")(b.attention(x))
    return x + before(b, "mlp_post_norm")(b.mlp(x))


def peri(b: Block, x: Tensor) -> Tensor:
    x = x + before(b, "attention_post_norm")(
        b.attention(before(b, "attention_norm")(x))
    )
    return x + before(b, "mlp_post_norm")(b.mlp(before(b, "mlp_norm")(x)))


def none(b: Block, x: Tensor) -> Tensor:
    x = x + b.attention(x)
    return x + b.mlp(x)


FORMULAS = {"pre": pre, "post": post, "swin": swin, "peri": peri, "none": none}


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_output_is_the_formula_of_the_norm_order(order: str) -> None:
    block, x = make(order), torch.randn(2, 5, 16, dtype=torch.float64)
    assert torch.allclose(block(x), FORMULAS[order](block, x), rtol=0, atol=1e-12)


def test_norm_orders_differ() -> None:
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    peri_block = make("peri")
    outputs = [FORMULAS[order](peri_block, x) for order in NORM_ORDERS]
    assert all(
        not torch.allclose(a, b) for i, a in enumerate(outputs) for b in outputs[:i]
    )


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_mask_and_positions_reach_the_attention(order: str) -> None:
    block, x = make(order), torch.randn(2, 5, 16, dtype=torch.float64)
    real, pos = (
        torch.tensor([[True] * 5, [False] * 2 + [True] * 3]),
        torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]),
    )
    padded = block(x, mask=real, pos=pos)
    assert torch.allclose(padded[1, 2:], block(x[1:, 2:])[0], rtol=0, atol=1e-12)


def test_a_block_takes_latent_attention() -> None:
    block = Block(MLA(16, 4, sizes=LatentSizes()), MLP(16, 24), 16)
    assert block(torch.randn(2, 5, 16)).shape == (2, 5, 16)


def test_mlp_is_gelu_or_swiglu() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    gelu, swiglu = MLP(8, 12).double(), MLP(8, 12, "swiglu").double()
    phi = 0.5 * (1 + torch.erf(gelu.up(x) / 2**0.5))
    assert torch.allclose(gelu(x), gelu.down(gelu.up(x) * phi))
    assert swiglu.gate is not None
    silu = swiglu.gate(x) / (1 + torch.exp(-swiglu.gate(x)))
    assert torch.allclose(swiglu(x), swiglu.down(silu * swiglu.up(x)))


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="swiglu"):
        MLP(8, 12, "swigu")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="peri"):
        Block(Attention(16, 4), MLP(16, 24), 16, "perl")  # type: ignore[arg-type]
