"""fold: the outputs stay, the factors are in the weights, and what cannot be folded is named."""

import pickle

import pytest
import torch
from tests.attention import Attention
from tests.training import adamw
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.remedies.retrofit import fold

from .models import VOCAB, assert_same, decoder, snapshot, tokens, train


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


def test_a_model_without_the_remedy_has_nothing_to_fold():
    model = decoder()
    before = snapshot(model)
    with pytest.raises(RefusedError, match="no layer is under sigma_reparam"):
        fold(model)
    assert_same(before, snapshot(model))
    with pytest.raises(InvalidTypeError):
        fold("model")
