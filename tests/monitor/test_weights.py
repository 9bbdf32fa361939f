"""Norms of the weights behind each head, against dense products in float64; gradients and hidden states by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import qkeel
from qkeel import find_sites
from qkeel.monitor.pass_values import Means
from qkeel.monitor.token_classes import HiddenNorms
from qkeel.monitor.weight_norms import WeightNorms
from qkeel.nn import MLA, Attention, Decoder, DecoderConfig
from qkeel.nn.mla import LatentSizes

WIDTH, H = 24, 4
X = torch.randn(
    2, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)
IDS = torch.randint(3, 11, (2, 7), generator=torch.Generator().manual_seed(0))
SIZES = LatentSizes(q_latent=10, kv_latent=9, rope_dim=4, nope_dim=6, value_dim=3)

Dense = tuple[
    Tensor, Tensor
]  # [h d m] of q and of k, the latter of each query head's key head


def heads(weight: Tensor, n: int) -> Tensor:
    """[h d m] of rows one head after the other, repeated for grouped keys."""
    return weight.detach().unflatten(0, (n, -1)).repeat_interleave(H // n, 0)


def dense_attention(model: nn.Module) -> Dense:
    return heads(model.q_proj.weight, H), heads(model.k_proj.weight, model.n_kv_heads)


def dense_gpt2(model: nn.Module) -> Dense:
    q, k, _ = model.h[0].attn.c_attn.weight.mT.split(WIDTH)
    return heads(q, H), heads(k, H)


def dense_neox(model: nn.Module) -> Dense:
    q, k, _ = (
        model.layers[0]
        .attention.query_key_value.weight.unflatten(0, (H, 3, -1))
        .unbind(1)
    )
    return q.detach(), k.detach()


def dense_mla(model: nn.Module) -> Dense:
    """Of plain and rotated part together, from x to the head."""
    down_q, down_k = model.q_down.weight.detach(), model.kv_down.weight.detach()
    if model.latent_norm:  # q from its latent; k from [its latent, x]
        down_q, down_k = (
            torch.eye(10, dtype=torch.float64),
            torch.eye(9, 9 + WIDTH, dtype=torch.float64),
        )
    q = torch.cat(
        [heads(model.q_up.weight, H) @ down_q, heads(model.q_rope.weight, H) @ down_q],
        1,
    )
    rope = heads(model.k_rope.weight, 1)
    if model.latent_norm:
        rope = torch.cat([torch.zeros(H, 4, 9, dtype=torch.float64), rope], -1)
    return q, torch.cat([heads(model.k_up.weight, H) @ down_k, rope], 1)


def gpt2() -> nn.Module:
    return transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=11, n_embd=WIDTH, n_layer=1, n_head=H)
    )


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(
        vocab_size=11,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=H,
        intermediate_size=8,
    )
    return transformers.GPTNeoXModel(config)


KINDS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Dense], Tensor]
] = {
    "plain": (lambda: Attention(WIDTH, H), dense_attention, X),
    "grouped": (lambda: Attention(WIDTH, H, 2), dense_attention, X),
    "one key head": (lambda: Attention(WIDTH, H, 1, head_dim=4), dense_attention, X),
    "fused, columns": (gpt2, dense_gpt2, IDS),
    "fused, interleaved": (neox, dense_neox, IDS),
    "mla": (lambda: MLA(WIDTH, H, sizes=SIZES), dense_mla, X),
    "mla, latents normed": (
        lambda: MLA(WIDTH, H, sizes=SIZES, latent_norm=True),
        dense_mla,
        X,
    ),
}


def built(kind: str) -> tuple[nn.Module, Dense, Tensor]:
    torch.manual_seed(1)
    make, dense, example = KINDS[kind]
    model = make().double()
    return model, dense(model), example


def read(
    model: nn.Module, example: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    sites = find_sites(model, example)
    return {
        name: value
        for (_, name), value in WeightNorms(model, sites, optimizer).read().items()
    }


def spectral(q: Tensor, k: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(q.mT @ k, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_spectral_norm_is_that_of_the_dense_product(kind: str) -> None:
    model, (q, k), example = built(kind)
    found = read(model, example)
    assert torch.allclose(found["qk_spectral_norm"], spectral(q, k), rtol=1e-9)


@pytest.mark.parametrize("kind", [k for k in KINDS if "mla" not in k])
def test_weight_norms_are_those_of_the_heads_rows(kind: str) -> None:
    model, (q, k), example = built(kind)
    found = read(model, example)
    assert torch.allclose(
        found["query_weight_norm"], q.square().sum((1, 2)).sqrt(), rtol=1e-12
    )
    assert torch.allclose(
        found["key_weight_norm"], k.square().sum((1, 2)).sqrt(), rtol=1e-12
    )


def test_of_mla_the_weight_norms_are_those_of_the_up_projections() -> None:
    model, _, example = built("mla")
    found = read(model, example)
    q = heads(model.q_up.weight, H).square().sum((1, 2)) + heads(
        model.q_rope.weight, H
    ).square().sum((1, 2))
    k = heads(model.k_up.weight, H).square().sum((1, 2)) + heads(
        model.k_rope.weight, 1
    ).square().sum((1, 2))
    assert torch.allclose(found["query_weight_norm"], q.sqrt(), rtol=1e-12)
    assert torch.allclose(found["key_weight_norm"], k.sqrt(), rtol=1e-12)


def test_gradients_are_root_mean_squares_over_a_heads_rows_and_over_eps() -> None:
    model = Attention(8, 2, 1)  # query heads of 4 rows, one key head
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert model.q_proj.weight.grad is not None
    assert model.k_proj.weight.grad is not None
    model.q_proj.weight.grad[:4] = 3e-4
    model.q_proj.weight.grad[4, 0] = 8e-8  # one of 32 numbers
    model.k_proj.weight.grad[:] = -2e-5
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-6)
    found = read(model, torch.randn(1, 3, 8), optimizer)
    head = 8e-8 / 32**0.5
    assert found["query_grad_rms"].tolist() == pytest.approx([3e-4, head])
    assert found["key_grad_rms"].tolist() == pytest.approx([2e-5, 2e-5])
    assert found["grad_over_eps"].tolist() == pytest.approx([20.0, head / 1e-6])


def test_without_gradients_or_eps_there_are_none_of_their_numbers() -> None:
    model, example = Attention(8, 2), torch.randn(1, 3, 8)
    weights = {"query_weight_norm", "key_weight_norm", "qk_spectral_norm"}
    assert set(read(model, example, torch.optim.Adam(model.parameters()))) == weights
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert set(read(model, example, torch.optim.SGD(model.parameters()))) == weights | {
        "query_grad_rms",
        "key_grad_rms",
    }


class Doubling(nn.Module):
    """A block whose output is twice its input, with an attention in it that adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + 0 * self.attention(x)


class Stack(nn.Module):
    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Doubling(), Doubling()])
        self.norm = nn.RMSNorm(8, eps=0.0) if norm else None
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.norm is None else self.norm(x))


@pytest.mark.parametrize("norm", [True, False])
def test_hidden_norms_are_means_over_tokens_and_passes(norm: bool) -> None:
    model, means = Stack(norm=norm), Means()
    names = ["blocks.0.attention", "blocks.1.attention"]
    hidden = HiddenNorms(model, names, means.add)
    first, second = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    first[0, 0, 0], first[0, 1, 0:2] = 1.0, torch.tensor([3.0, 4.0])  # norms 1 and 5
    second[0, :, 3] = 9.0
    for x in (first, second):
        with hidden.attach():
            model(x)
        means.keep(means.end())
    found = {key: float(share.value) for key, share in means.read().items()}
    assert found[names[0], "block_output_norm"] == pytest.approx(2 * (3 + 9) / 2)
    assert found[names[1], "block_output_norm"] == pytest.approx(4 * (3 + 9) / 2)
    assert found["", "final_hidden_norm"] == pytest.approx(
        8**0.5 if norm else 4 * (3 + 9) / 2
    )
    assert len(found) == 3


def test_the_monitor_reads_the_weights_before_the_step_that_moves_them() -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    site = find_sites(model)[0]
    before = read(model, IDS)["query_weight_norm"]
    with qkeel.watch(model, optimizer) as monitor:
        model(IDS).square().mean().backward()
        optimizer.step()
        series = monitor.history.series("query_weight_norm")
    assert series is not None
    assert series[0, 0].tolist() == pytest.approx(before.tolist())
    weight = model.get_parameter(site.terms[0].query[0].parameter)
    after = weight.detach().unflatten(0, (2, -1)).square().sum((1, 2)).sqrt()
    assert not torch.allclose(after, before, rtol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_weights_that_are_computed_from_stored_ones_have_no_norms_but_gradients(
    apart: bool,
) -> None:
    # The norm of the stored W is not that of (γ/σ) W, which the layer uses.
    torch.manual_seed(0)
    model = nn.ModuleList([Attention(WIDTH, H), Attention(WIDTH, H)]).double()
    qkeel.apply(model[0], "sigma_reparam:init=one")
    if not apart:
        qkeel.apply(model[1], "sigma_reparam:init=one")
    sites = find_sites(model)
    assert [site.reparametrised for site in sites] == [True, not apart]
    norms = WeightNorms(model, sites, torch.optim.AdamW(model.parameters()))
    of_weights = {"query_weight_norm", "key_weight_norm", "qk_spectral_norm"}
    assert {key for key, _ in norms.read().items()} == (
        {("1", name) for name in of_weights} if apart else set()
    )
    for layer in model:
        layer(X).square().sum().backward()
    names = {
        site.name: {name for (of, name), _ in norms.read().items() if of == site.name}
        for site in sites
    }
    of_gradients = {"query_grad_rms", "key_grad_rms", "grad_over_eps"}
    assert names == {
        "0": of_gradients,
        "1": of_gradients | (of_weights if apart else set()),
    }


def test_steps_of_weights_that_are_computed_from_stored_ones_are_not_compared() -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=11, d_model=16, n_layers=2, n_heads=2))
    optimizer = torch.optim.AdamW(model.parameters())
    qkeel.apply(model, "sigma_reparam", optimizer)
    monitor = qkeel.watch(model, optimizer, stats="all+updates")
    model(IDS).square().sum().backward()
    with pytest.warns(UserWarning, match="computed from other weights"):
        optimizer.step()
    known = {
        name
        for name, values in monitor.history.heads.items()
        if not torch.as_tensor(values).isnan().all()
    }
    assert "query_grad_rms" in known
    assert not known & {
        "query_weight_norm",
        "qk_spectral_norm",
        "delta2_spectral_norm",
        "query_update_ratio",
    }
