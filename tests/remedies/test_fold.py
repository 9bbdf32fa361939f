"""fold: the outputs stay, the factors are in the weights, and what cannot be folded is named."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.nn import Decoder
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

from .models import VOCAB, decoder, tokens, train


def moved(model: Decoder) -> Decoder:
    """Gains, scales and biases off their starting values."""
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2 or "logit_scale" in name:
                p.add_(0.3 * torch.rand(p.shape, generator=rng, dtype=p.dtype))
    return model.double()


@pytest.mark.parametrize("on", ["all", "attention"])
def test_sigma_reparam_is_folded_into_plain_layers(on: str) -> None:
    model = decoder(tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    handle = qkeel.apply(model, f"sigma_reparam:on={on},init=one", optimizer)
    train(model, optimizer, 3)
    out, plain = model.eval()(tokens()), list(decoder().state_dict())
    weights = {id(p) for n, p in model.named_parameters() if "original" in n}
    found = fold(model)
    assert torch.equal(model(tokens()), out)
    assert list(model.state_dict()) == plain
    assert all(
        type(m) is nn.Linear
        for m in (model.blocks[0].attention.q_proj, model.blocks[1].attention.o_proj)
    )
    assert weights <= {
        id(p) for p in model.parameters()
    }  # the optimizer still holds them
    assert len(found.written) == (13 if on == "all" else 8)
    assert "folded sigma_reparam of blocks.0.attention.q_proj" in str(found)
    handle.remove()
    assert torch.equal(model(tokens()), out)
    qkeel.apply(model, "sigma_reparam").remove()  # it is on no site any more


def test_a_reparametrised_model_that_was_pickled_can_be_folded() -> None:
    model = decoder()
    qkeel.apply(model, "sigma_reparam:init=one")
    twin = pickle.loads(pickle.dumps(model.eval()))
    out = twin(tokens())
    fold(twin)
    assert torch.equal(twin(tokens()), out)
    assert list(twin.state_dict()) == list(decoder().state_dict())


class Tied(nn.Module):
    """A language model whose head is its embedding, and whose k is computed with the weight of q."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.Linear(16, VOCAB, bias=False),
        )
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in "qkv")
        self.head.weight, self.k.weight = self.embedding.weight, self.q.weight
        self.again = self.v  # one module under two names shares nothing

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        q, k, v = (
            f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return self.head(
            nn.functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .flatten(2)
        )


def test_weights_that_other_layers_share_are_not_folded_and_remove_restores_them() -> (
    None
):
    torch.manual_seed(0)
    model = Tied().eval()
    plain = {n: p.clone() for n, p in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n = len(optimizer.param_groups[0]["params"])
    handle = qkeel.apply(model, "sigma_reparam:init=one", optimizer, batch=tokens())
    with torch.no_grad():
        model.q.parametrizations.weight[0].gamma.mul_(2)
    out = model(tokens())
    found = fold(model)
    assert torch.equal(model(tokens()), out)
    assert found.written == ("sigma_reparam of v",)
    assert [line.partition(" shares its weight")[0] for line in found.kept] == [
        "sigma_reparam of head: embedding",
        "sigma_reparam of q: k",
        "sigma_reparam of k: q",
    ]
    with pytest.raises(
        RefusedError,
        match="nothing to fold: sigma_reparam of head: embedding shares its weight",
    ):
        fold(model)
    assert torch.equal(model(tokens()), out)
    folded = model.v.weight.detach().clone()
    assert torch.allclose(
        folded, plain["v.weight"] / torch.linalg.matrix_norm(plain["v.weight"], 2)
    )
    handle.remove()
    assert all(type(m) is nn.Linear for m in (model.q, model.k, model.v, model.head))
    assert torch.equal(model.v.weight, folded)
    assert all(
        torch.equal(p, plain[n])
        for n, p in model.state_dict().items()
        if n not in ("v.weight", "again.weight")
    )
    assert len(optimizer.param_groups[0]["params"]) == n
    qkeel.apply(model, "sigma_reparam", batch=tokens()).remove()


def test_a_scale_is_not_folded_into_a_weight_of_another_layer() -> None:
    model = decoder(spec=SPECS["constant"])
    model.blocks[0].mlp.up = nn.Linear(16, 16)
    model.blocks[0].mlp.down = nn.Linear(16, 16)
    model.blocks[0].mlp.up.weight = model.blocks[0].attention.q_proj.weight
    out = model(tokens())
    found = fold(model)
    assert torch.allclose(model(tokens()), out, atol=1e-6)
    assert found.kept == (
        "blocks.0.attention: blocks.0.attention.q_proj.weight is shared with another layer",
    )


def test_sigma_reparam_of_conv1d_is_supported_and_folded() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
    }
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **sizes, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
        )
    ).eval()
    out, names = model(tokens()).logits, list(model.state_dict())
    qkeel.apply(model, "sigma_reparam", batch=tokens())
    layer = model.transformer.h[0].attn.c_attn
    sigma = torch.linalg.matrix_norm(layer.weight.detach(), ord=2)
    assert torch.allclose(sigma, layer.parametrizations.weight[0].gamma)
    assert torch.allclose(model(tokens()).logits, out, atol=1e-6)
    with torch.no_grad():
        layer.parametrizations.weight[0].gamma.mul_(2)
    changed = model(tokens()).logits
    fold(model)
    assert torch.equal(model(tokens()).logits, changed)
    assert list(model.state_dict()) == names


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
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_scales_go_into_the_query_side(kind: str, attention: str) -> None:
    model = moved(
        decoder(
            spec=SPECS[kind],
            attention=attention,
            **({} if attention == "mla" else {"n_kv_heads": 2}),
        )
    )
    out = model(tokens())
    found = fold(model)
    assert (model(tokens()) - out).abs().max() <= 1e-13
    assert not [n for n in model.state_dict() if "logit_scale" in n]
    scale = model.blocks[0].attention.spec.scale
    assert (scale.inner if isinstance(scale, LogN) else scale) == InverseSqrt()
    assert found.written == (
        "blocks.0.attention: its scale",
        "blocks.1.attention: its scale",
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            AttentionSpec(),
            "no layer under sigma_reparam, and no scale other than 1/√d in qkeel's own attention",
        ),
        (
            AttentionSpec(norm=RMSNorm(gain="dim")),
            "come after a norm, which undoes any scaling of weights",
        ),
        (
            AttentionSpec(norm=L2Norm(), scale=Learned(init=5.0)),
            "q is normed without a gain",
        ),
        (
            AttentionSpec(
                norm=RMSNorm(gain="dim"), scale=Learned(init=0.3, per="head")
            ),
            "does not fit into gain=dim",
        ),
        (
            AttentionSpec(norm=RMSNorm(gain="dim", shared=True), scale=Fixed(0.7)),
            "q and k share one gain",
        ),
    ],
)
def test_what_cannot_be_folded_is_refused_with_the_reason_and_left_alone(
    spec: AttentionSpec, reason: str
) -> None:
    model = moved(decoder(spec=spec))
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(RefusedError, match=reason.replace("/", "/")):
        fold(model)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert model.blocks[0].attention.spec == spec


def test_only_models_are_folded() -> None:
    with pytest.raises(InvalidTypeError, match=r"torch\.nn\.Module"):
        fold("model")  # type: ignore[arg-type]
