"""fold: the outputs stay, the factors are in the weights, and what cannot be folded is named."""

import pickle

import pytest
import torch
from tests.attention import Attention
from tests.each_row import each_row
from tests.training import adamw
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.remedies.retrofit import fold
from qkeel.spec import (
    AttentionSpec,
    Fixed,
    InverseSqrt,
    L2Norm,
    Learned,
    LogN,
    RMSNorm,
    Rope,
)

from .models import VOCAB, assert_same, decoder, snapshot, tokens, train


def moved(model):
    """Gains, scales and biases off their starting values."""
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2 or "logit_scale" in name:
                p.add_(0.3 * torch.rand(p.shape, generator=rng, dtype=p.dtype))
    return model.double()


@pytest.mark.parametrize("on", ["all", "attention"])
def test_sigma_reparam_is_folded_into_plain_layers(on):
    model = decoder(tied=False)
    optimizer = adamw(model, 0.03)
    handle = qkeel.apply(model, f"sigma_reparam:on={on},init=one", optimizer)
    train(model, optimizer, 3)
    weights = {id(p) for n, p in model.named_parameters() if "original" in n}
    output, twin = model.eval()(tokens()), pickle.loads(pickle.dumps(model))
    for each in (model, twin):
        assert len(fold(each).written) == (13 if on == "all" else 8)
        assert torch.equal(each(tokens()), output)
        assert list(each.state_dict()) == list(decoder().state_dict())
        assert type(each.blocks[1].attention.o_proj) is nn.Linear
    # The optimizer still holds them.
    assert weights <= {id(p) for p in model.parameters()}
    handle.remove()
    assert torch.equal(model(tokens()), output)
    qkeel.apply(model, "sigma_reparam").remove()  # it is on no site any more


class Tied(Attention):
    """A language model whose head is its embedding, and whose k is computed with the weight of q."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(m=16, bias=False)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight, self.k.weight = self.embedding.weight, self.q.weight
        self.again = self.v  # one module under two names shares nothing

    def forward(self, x):
        return self.head(super().forward(self.embedding(x)))


def test_weights_that_other_layers_share_are_not_folded_and_remove_restores_them():
    model = Tied().eval()
    plain = {n: p.clone() for n, p in model.state_dict().items()}
    handle = qkeel.apply(model, "sigma_reparam:init=one", batch=tokens())
    with torch.no_grad():
        model.q.parametrizations.weight[0].gamma.mul_(2)
    output = model(tokens())
    folded = fold(model)
    assert folded.written == ("sigma_reparam of v",)
    assert {line.partition(" shares its weight")[0] for line in folded.kept} == {
        "sigma_reparam of head: embedding",
        "sigma_reparam of q: k",
        "sigma_reparam of k: q",
    }
    with pytest.raises(RefusedError):
        fold(model)
    assert torch.equal(model(tokens()), output)
    v = plain.pop("v.weight")
    assert_close(model.v.weight, v / torch.linalg.matrix_norm(v, 2))
    handle.remove()
    del plain["again.weight"]
    assert all(type(m) is nn.Linear for m in (model.q, model.k, model.head))
    assert all(torch.equal(model.state_dict()[n], p) for n, p in plain.items())


def test_a_scale_is_not_folded_into_a_weight_of_another_layer():
    model = decoder(spec=SPECS["constant"])
    model.blocks[0].mlp.up = nn.Linear(16, 16)
    model.blocks[0].mlp.down = nn.Linear(16, 16)
    model.blocks[0].mlp.up.weight = model.blocks[0].attention.q_proj.weight
    output = model(tokens())
    assert len(fold(model).kept) == 1
    assert_close(model(tokens()), output, rtol=0, atol=1e-6)


SPECS = {
    "learned per head": AttentionSpec(
        position=Rope(), scale=Learned(init=0.3, per="head")
    ),
    "learned per layer, as a logarithm": AttentionSpec(
        position=Rope(), scale=Learned(init=0.3, log=True, maximum=5.0)
    ),
    "constant": AttentionSpec(position=Rope(), scale=Fixed(0.7)),
    "multiplied": AttentionSpec(scale=InverseSqrt(multiplier=1.44)),
    "inside log n": AttentionSpec(
        scale=LogN(inner=Learned(init=0.2, per="head"), train_length=4)
    ),
    "behind a norm with gains": AttentionSpec(
        norm=RMSNorm(gain="dim"), position=Rope(), scale=Fixed(0.7)
    ),
    "behind a norm with gains 1 + w": AttentionSpec(
        norm=RMSNorm(gain="one_plus_dim"), scale=Fixed(0.7)
    ),
    "per head behind gains per head": AttentionSpec(
        norm=RMSNorm(gain="head"), scale=Learned(init=0.3, per="head")
    ),
}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("options", [{"attention": "mla"}, {"n_kv_heads": 2}])
def test_scales_go_into_the_query_side(kind, options):
    model = moved(decoder(spec=SPECS[kind], **options))
    output = model(tokens())
    assert len(fold(model).written) == 2
    assert (model(tokens()) - output).abs().max() <= 1e-13
    assert not [n for n in model.state_dict() if "logit_scale" in n]
    assert model.blocks[0].attention.spec.scale.base == InverseSqrt()


@each_row(
    "spec",
    [
        AttentionSpec(),
        AttentionSpec(norm=RMSNorm(gain="dim")),
        AttentionSpec(norm=L2Norm(), scale=Learned(init=5.0)),
        AttentionSpec(norm=RMSNorm(gain="dim"), scale=Learned(init=0.3, per="head")),
        AttentionSpec(norm=RMSNorm(gain="dim", shared=True), scale=Fixed(0.7)),
    ],
)
def test_what_cannot_be_folded_is_refused_and_left_alone(spec):
    model = moved(decoder(spec=spec))
    before = snapshot(model)
    with pytest.raises(RefusedError):
        fold(model)
    assert_same(before, snapshot(model))
    with pytest.raises(InvalidTypeError):
        fold("model")
