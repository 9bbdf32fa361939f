"""output_gate: the published formula, on attention of anybody's, found by trying."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.errors import RefusedError

from .foreign import Hand, encoder, everything, example, hf, out


def stir(model: nn.Module) -> None:
    """Gates off their start."""
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("output_gate.weight"):
                p.normal_(generator=rng)


def by_hand(model: nn.Module, projection: nn.Module, x: Tensor, gates: Any) -> Tensor:
    """The output of a model with what goes into its projection multiplied."""
    hook = projection.register_forward_pre_hook(lambda _, args: (args[0] * gates(x),))
    try:
        return model(x)
    finally:
        hook.remove()


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["linear", "fused", "interleaved", "conv", "groups"])
@pytest.mark.parametrize("per", ["feature", "head"])
def test_the_gate_is_a_sigmoid_of_the_input_before_the_output_projection(
    layout: str, how: str, per: str
) -> None:
    model, x = Hand(layout, how), torch.randn(2, 6, 16)
    plain = copy.deepcopy(model)
    with (
        qkeel.apply(model, f"output_gate:init=random,per={per}", batch=x),
        torch.no_grad(),
    ):
        stir(model)
        weight = model.get_parameter("output_gate.weight").clone()
        got = model(x)
    assert weight.shape == (16 if per == "feature" else 4, 16)
    wide = weight if per == "feature" else weight.repeat_interleave(4, 0)
    want = by_hand(plain, plain.o, x, lambda x: torch.sigmoid(x @ wide.T))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gates_are_weights_to_the_optimizer_and_train() -> None:
    model, x = hf("llama", "sdpa"), example("llama")
    matrices, gains = (
        [p for p in model.parameters() if (p.ndim > 1) == many]
        for many in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}], lr=0.01
    )
    sizes = [len(g["params"]) for g in optimizer.param_groups]
    with qkeel.apply(model, "output_gate", optimizer, batch=x):
        assert [len(g["params"]) for g in optimizer.param_groups] == [
            sizes[0] + 2,
            sizes[1],
        ]
        out(model, x).square().mean().backward()
        optimizer.step()
        assert all(
            p.any()
            for n, p in model.named_parameters()
            if n.endswith("output_gate.weight")
        )
    assert [len(g["params"]) for g in optimizer.param_groups] == sizes


def test_where_the_projection_can_not_be_told_it_says_so_and_changes_nothing() -> None:
    torchs, x = encoder(), example("encoder")
    before = everything(torchs)
    with pytest.raises(RefusedError, match="inside a torch function"):
        qkeel.apply(torchs, "output_gate", batch=x)
    assert everything(torchs) == before
    bert, x = (
        hf("bert", "sdpa"),
        example("bert"),
    )  # projects in a module beside that of the attention
    before = everything(bert)
    with pytest.raises(
        RefusedError, match="no module inside it multiplies the output of attention"
    ):
        qkeel.apply(bert, "output_gate", batch=x)
    assert everything(bert) == before
    mixed, x = Hand("linear"), torch.randn(2, 6, 16)
    mixed.o = nn.Identity()
    before = everything(mixed)
    with pytest.raises(
        RefusedError, match="no module inside it multiplies the output of attention"
    ):
        qkeel.apply(mixed, "output_gate", batch=x)
    assert everything(mixed) == before


def test_heads_that_lie_apart_have_no_gate_of_their_own() -> None:
    class Apart(Hand):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            whole = nn.functional.scaled_dot_product_attention(
                *self.heads(x), is_causal=True
            )
            return self.o(whole.permute(0, 2, 3, 1).flatten(2))

    model, x = Apart("fused"), torch.randn(2, 6, 16)
    with pytest.raises(RefusedError, match="are not adjacent"):
        qkeel.apply(model, "output_gate:per=head", batch=x)
    qkeel.apply(model, "output_gate", batch=x).remove()
