"""output_gate: the published formula, on attention of anybody's, found by trying."""

import copy

import pytest
import torch
from tests.attention import to_heads
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.errors import RefusedError

from .foreign import Hand, assert_refused, encoder, example, hf, out


def stir(model):
    """Gates off their start."""
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("output_gate.weight"):
                p.normal_(generator=rng)


def by_hand(model, projection, x, gates):
    """The output of a model with what goes into its projection multiplied."""
    hook = projection.register_forward_pre_hook(lambda _, args: (args[0] * gates(x),))
    try:
        return model(x)
    finally:
        hook.remove()


@pytest.mark.parametrize("layout", ["linear", "fused", "interleaved", "conv", "groups"])
@pytest.mark.parametrize(("per", "how"), [("feature", "eager"), ("head", "sdpa")])
def test_the_gate_is_a_sigmoid_of_the_input_before_the_output_projection(
    layout, how, per
):
    model, x = Hand(layout, how), torch.randn(2, 6, 16)
    plain = copy.deepcopy(model)
    with (
        qkeel.apply(model, f"output_gate:init=random,per={per}", batch=x),
        torch.no_grad(),
    ):
        # As torch's linear layers of 16 features begin.
        weight = model.get_parameter("output_gate.weight")
        assert -0.25 <= weight.min() < -0.2
        assert 0.2 < weight.max() <= 0.25
        stir(model)
        weight = weight.clone()
        got = model(x)
    assert weight.shape == (16 if per == "feature" else 4, 16)
    wide = weight if per == "feature" else weight.repeat_interleave(4, 0)
    want = by_hand(plain, plain.o, x, lambda x: torch.sigmoid(x @ wide.T))
    assert_close(got, want, rtol=1e-5, atol=1e-5)


class Placed(Hand):
    """Its hidden states come after whole numbers, as positions do, and its projections take them by name."""

    def heads(self, x):
        sides = (self.q, self.k, self.v)
        return [to_heads(side(input=x), -1, self.d) for side in sides]

    def forward(self, place, x):
        return Hand.forward(self, x)


def test_the_input_of_a_gate_is_the_first_tensor_of_floating_point_numbers():
    model, plain, x = Placed("linear"), Hand("linear"), torch.randn(2, 6, 16)
    place = torch.arange(6).expand(2, 6)
    qkeel.apply(model, "output_gate:init=random", batch=(place, x))
    qkeel.apply(plain, "output_gate:init=random", batch=x)
    assert torch.equal(model(place, x), plain(x))
    assert torch.equal(model(place, x=x), plain(x))


def test_gates_are_weights_to_the_optimizer_and_train():
    model, x = hf("llama", "sdpa"), example("llama")
    matrices, gains = (
        [p for p in model.parameters() if (p.ndim > 1) == many]
        for many in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}], lr=0.01
    )
    n = len(matrices)
    qkeel.apply(model, "output_gate", optimizer, batch=x)
    assert len(optimizer.param_groups[0]["params"]) == n + 2
    out(model, x).square().mean().backward()
    optimizer.step()
    gates = [p for name, p in model.named_parameters() if "output_gate" in name]
    assert all(p.any() for p in gates)


def test_where_the_projection_can_not_be_told_it_says_so_and_changes_nothing():
    mixed = Hand("linear")
    mixed.o = nn.Identity()
    for model, x in (
        (encoder(), example("encoder")),  # projects inside a torch function
        (hf("bert", "sdpa"), example("bert")),  # in a module beside its attention
        (mixed, torch.randn(2, 6, 16)),
    ):
        assert_refused(model, "output_gate", x)


def test_heads_that_lie_apart_have_no_gate_of_their_own():
    class Apart(Hand):
        def forward(self, x, mask=None):
            whole = nn.functional.scaled_dot_product_attention(
                *self.heads(x), is_causal=True
            )
            return self.o(whole.permute(0, 2, 3, 1).flatten(2))

    model, x = Apart("fused"), torch.randn(2, 6, 16)
    with pytest.raises(RefusedError):
        qkeel.apply(model, "output_gate:per=head", batch=x)
    qkeel.apply(model, "output_gate", batch=x).remove()


def test_gated_attention_is_watched_with_its_weights():
    """While its forward runs, the gate holds an input that has a graph, which no copy may hold."""
    model = nn.Sequential(nn.Linear(16, 16), Hand("linear", "sdpa"))
    x = torch.randn(2, 6, 16)
    qkeel.apply(model, "output_gate", batch=x)
    with qkeel.watch(model) as monitor:  # a warning would be an error
        model(x).sum().backward()
        (site,) = monitor.sites
    assert site.verified
