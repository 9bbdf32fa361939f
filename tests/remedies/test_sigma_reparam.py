"""sigma_reparam against the obvious implementation, its buffer, its gain, and its removal."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.errors import NonFiniteError, RefusedError
from qkeel.remedies.sigma_reparam import SpectralScale

from .models import assert_same, attention, decoder, snapshot, tokens, train


class Plain(nn.Module):
    """SNLinear as the paper and the authors' code describe it."""

    def __init__(self, weight: Tensor, gamma: float, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.gamma = nn.Parameter(torch.tensor(gamma, dtype=weight.dtype))
        self.u = start.clone()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = self.weight @ self.u
            v = v / v.norm()
            u = self.weight.t() @ v
            u = u / u.norm()
        if self.training:
            self.u = u
        sigma = v @ self.weight @ u
        return x @ (self.gamma / sigma * self.weight).t()


class OneLayer(nn.Module):
    """A linear layer in a model that has attention, too."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.site, self.linear = (
            attention(),
            nn.Linear(shape[1], shape[0], bias=False).double(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("init", ["keep", "one"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 4), (4, 1)])
def test_equals_the_obvious_implementation_over_training_steps(
    init: str, shape: tuple[int, int]
) -> None:
    model = OneLayer(shape)
    weight = model.linear.weight.detach().clone()
    qkeel.apply(model, f"sigma_reparam:init={init}")
    start = torch.linalg.svd(weight).Vh[0]
    start = start * torch.sign(
        start @ model.linear.get_buffer("parametrizations.weight.0.right")
    )  # it has no sign
    plain = Plain(
        weight,
        float(torch.linalg.matrix_norm(weight, ord=2)) if init == "keep" else 1.0,
        start,
    )
    a, b = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        for m in (model.linear, plain)
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        x = torch.randn(3, shape[1], generator=generator, dtype=torch.float64)
        model.train(step % 3 != 0)
        plain.train(step % 3 != 0)
        one, two = model(x), plain(x)
        assert (one - two).abs().max() < 1e-12
        for out, optimizer in ((one, a), (two, b)):
            optimizer.zero_grad()
            (out - 1).square().sum().backward()
            optimizer.step()
    assert (
        model.linear.get_buffer("parametrizations.weight.0.right") - plain.u
    ).abs().max() < 1e-12
    assert (
        model.linear.get_parameter("parametrizations.weight.0.gamma") - plain.gamma
    ).abs() < 1e-12


@pytest.mark.parametrize("training", [False, True])
def test_the_gradient_flows_through_sigma(training: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 6, dtype=torch.float64)
    scale = SpectralScale(weight, "keep").train(training)
    probe = weight.clone().requires_grad_()
    (scale(probe) * torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    # Ŵ does not depend on the size of W, so the gradient has no component along it.
    assert probe.grad is not None
    assert (probe.grad * weight).sum().abs() < 1e-12
    assert torch.autograd.gradcheck(scale, probe.detach().requires_grad_())


class Twice(nn.Module):
    """Reads a weight twice in a pass, as T5 does, possibly in one or two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.site, self.one, self.two = (
            attention(),
            nn.Linear(9, 9).double(),
            nn.Linear(9, 9).double(),
        )

    def forward(self, x: Tensor, *reentrant: bool) -> Tensor:
        body = self.body
        for kind in reentrant:
            body = functools.partial(checkpoint, body, use_reentrant=kind)
        return body(x)

    def body(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.one(x).sin()).tanh())


def trained(*reentrant: bool, compiled: bool = False) -> list[Tensor]:
    """Weights, gradients and buffers after two steps, the first from a u that is no singular vector."""
    model = Twice()
    qkeel.apply(model, "sigma_reparam:init=one")
    run: Callable[..., Tensor] = (
        torch.compile(model, backend="aot_eager") if compiled else model
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("original"):
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(
            4, 9, generator=generator, dtype=torch.float64, requires_grad=True
        )
        run(x, *reentrant).square().sum().backward()
        optimizer.step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(p.detach() for p in model.parameters()), *grads, *model.buffers()]


@pytest.mark.parametrize(
    ("compiled", "reentrant"),
    [
        *(
            (False, kinds)
            for kinds in (
                (False,),
                (True,),
                (False, False),
                (True, True),
                (False, True),
            )
        ),
        *((True, kinds) for kinds in ((), (False,))),
    ],
)
def test_passes_that_checkpointing_repeats_have_the_gradients_of_plain_ones(
    compiled: bool, reentrant: tuple[bool, ...]
) -> None:
    torch.compiler.reset()
    for got, want in zip(
        trained(*reentrant, compiled=compiled), trained(), strict=True
    ):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def rights(model: nn.Module) -> list[Tensor]:
    return [
        module.right.clone()
        for module in model.modules()
        if isinstance(module, SpectralScale)
    ]


def changed() -> OneLayer:
    """A layer under the remedy whose weight has moved, so that a step of power iteration changes its vectors."""
    model = OneLayer((4, 6))
    qkeel.apply(model, "sigma_reparam")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return model


def test_a_whole_model_that_checkpointing_repeats_iterates_once() -> None:
    repeated, plain, x = changed(), changed(), torch.ones(2, 6, dtype=torch.float64)
    checkpoint(repeated, x, use_reentrant=False).sum().backward()
    plain(x).sum().backward()
    for right, expected in zip(rights(repeated), rights(plain), strict=True):
        assert torch.equal(right, expected)


def test_a_layer_that_is_called_without_the_model_iterates_itself_and_not_in_the_model() -> (
    None
):
    alone, within, x = changed(), changed(), torch.ones(2, 6, dtype=torch.float64)
    alone.eval()
    alone.linear(x)
    assert all(map(torch.equal, rights(alone), rights(changed())))
    alone.train()
    alone.linear(x)
    within(x)
    assert torch.equal(rights(alone)[-1], rights(within)[-1])
    assert not torch.equal(rights(alone)[-1], rights(changed())[-1])


def test_a_compiled_forward_iterates_in_one_graph() -> None:
    model, x = changed(), torch.ones(2, 6, dtype=torch.float64)
    before = rights(model)
    torch.compile(model, backend="eager", fullgraph=True)(x).sum().backward()
    assert not torch.equal(rights(model)[-1], before[-1])


def test_two_passes_before_a_backward_are_possible() -> None:
    model = Twice()
    qkeel.apply(model, "sigma_reparam")
    x = torch.randn(4, 9, dtype=torch.float64)
    (model(x) + model(x)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keep_leaves_the_first_forward_bit_for_bit(dtype: torch.dtype) -> None:
    model = decoder().to(dtype)
    out = model(tokens())
    with qkeel.apply(model, "sigma_reparam"):
        assert torch.equal(out, model(tokens()))
        model.eval()
        assert torch.allclose(
            out, model(tokens()), atol=1e-4 if dtype != torch.bfloat16 else 0.1
        )


def test_one_gives_every_linear_layer_spectral_norm_one() -> None:
    model = decoder(mlp="swiglu")
    with qkeel.apply(model, "sigma_reparam:init=one"):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert len(linears) == 2 * 7 + 1
        for layer in linears:
            assert float(
                torch.linalg.matrix_norm(layer.weight.detach(), ord=2)
            ) == pytest.approx(1, abs=1e-5)


def test_evaluation_never_changes_the_buffer_even_if_it_was_on_when_the_remedy_came() -> (
    None
):
    model = decoder().eval()
    qkeel.apply(model, "sigma_reparam")
    before = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model(tokens())
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
    model.train()
    model(tokens())
    assert not any(torch.equal(before[n], b) for n, b in model.named_buffers())


def test_sigma_is_computed_in_full_precision_under_autocast() -> None:
    model = decoder()
    qkeel.apply(model, "sigma_reparam")
    model.eval()
    layer = model.blocks[0].attention.q_proj
    plain = layer.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain, layer.weight)


def test_sites_find_the_stored_weight() -> None:
    model = decoder()
    with qkeel.apply(model, "sigma_reparam"):
        site = qkeel.find_sites(model)[0]
        assert (
            site.query[0].parameter
            == "blocks.0.attention.q_proj.parametrizations.weight.original"
        )
        assert site.reparametrised
    assert not qkeel.find_sites(model)[0].reparametrised


def test_qk_lr_after_sigma_reparam_scales_the_stored_weight_and_not_the_gain() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qkeel.apply(model, "sigma_reparam+qk_lr:factor=0", optimizer)
    q = model.blocks[0].attention.q_proj
    weight, gain = (
        q.get_parameter(f"parametrizations.weight.{n}") for n in ("original", "0.gamma")
    )
    old = weight.detach().clone(), gain.detach().clone()
    train(model, optimizer, 1)
    assert torch.equal(old[0], weight)
    assert not torch.equal(old[1], gain)


def test_weights_that_cannot_be_scaled_are_named_and_the_model_is_as_it_was() -> None:
    for spoil, error, message in (
        (
            lambda m: nn.init.zeros_(m.blocks[1].mlp.down.weight),
            RefusedError,
            "blocks.1.mlp.down is all zeros",
        ),
        (
            lambda m: nn.init.constant_(m.blocks[1].mlp.up.weight, torch.nan),
            NonFiniteError,
            "blocks.1.mlp.up holds NaN",
        ),
        (
            lambda m: parametrizations.weight_norm(m.blocks[1].mlp.up),
            RefusedError,
            "blocks.1.mlp.up is already reparametrised",
        ),
    ):
        model = decoder()
        spoil(model)
        with pytest.raises(error, match=message):
            qkeel.apply(model, "sigma_reparam")
        assert type(model.blocks[0].attention.q_proj) is nn.Linear
        assert not model.blocks[0].attention.__dict__.get("_qkeel_applied")


def test_the_gain_of_a_frozen_weight_is_frozen_and_joins_no_optimizer() -> None:
    model = decoder()
    for name, p in model.named_parameters():
        p.requires_grad_("head" in name)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1.0
    )
    qkeel.apply(model, "sigma_reparam", optimizer)
    gains = {n: p for n, p in model.named_parameters() if n.endswith("gamma")}
    assert [n for n, p in gains.items() if p.requires_grad] == [
        "head.parametrizations.weight.0.gamma"
    ]
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert [n for n, p in gains.items() if id(p) in listed] == [
        "head.parametrizations.weight.0.gamma"
    ]
    model.eval()
    before = model.blocks[0].attention.q_proj.weight.detach().clone()
    train(model, optimizer, 3)
    assert torch.equal(before, model.blocks[0].attention.q_proj.weight)


def test_the_scale_stays_in_full_precision_when_the_model_is_cast() -> None:
    model = decoder()
    qkeel.apply(model.eval(), "sigma_reparam")
    scale = model.head.parametrizations.weight[0]
    before = scale.gamma.detach().clone(), scale.right.clone()
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        assert model.head.weight.dtype == dtype
        assert torch.equal(scale.gamma, before[0])
        assert torch.equal(scale.right, before[1])
    model.to(torch.float64)
    assert scale.gamma.dtype == scale.right.dtype == torch.float64
    model.to("meta")
    assert scale.gamma.is_meta
    assert scale.right.is_meta


class Encoder(nn.Module):
    """torch's own attention with one weight for q, k and v, or one each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.layer: nn.Module = nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=True, dropout=0.0
        )
        if kind == "separate":
            self.layer.self_attn = nn.MultiheadAttention(
                16, 2, kdim=8, vdim=12, batch_first=True
            )
        self.separate = kind == "separate"

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        if self.separate:
            attention = self.layer.get_submodule("self_attn")
            return self.head(
                x
                + attention(x, x[..., :8].sin(), x[..., :12].cos(), need_weights=False)[
                    0
                ]
            )
        return self.head(self.layer(x))


WEIGHTS = {
    "fused": ["in_proj_weight"],
    "separate": ["q_proj_weight", "k_proj_weight", "v_proj_weight"],
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("on", ["all", "attention"])
def test_torchs_own_attention_is_scaled_and_restored(kind: str, on: str) -> None:
    model, x = Encoder(kind), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before, out, own = (
        snapshot(model, optimizer),
        model(x),
        model.layer.get_submodule("self_attn"),
    )
    with torch.no_grad():
        fast = model.eval()(x)
    model.train()
    handle = qkeel.apply(model, f"sigma_reparam:on={on}", optimizer, batch=x)
    assert torch.equal(model(x), out)
    site = qkeel.find_sites(model, x)[0]
    assert site.reparametrised
    assert site.verified
    assert (
        site.query[0].parameter
        == f"layer.self_attn.parametrizations.{WEIGHTS[kind][0]}.original"
    )
    model.eval()
    with torch.no_grad():
        assert torch.allclose(model(x), fast, atol=1e-5)
    model.train()
    handle.remove()
    assert type(own) is nn.MultiheadAttention
    assert_same(before, snapshot(model, optimizer))

    handle = qkeel.apply(model, f"sigma_reparam:on={on},init=one", optimizer, batch=x)
    for name in WEIGHTS[kind]:
        assert float(
            torch.linalg.matrix_norm(getattr(own, name).detach(), 2)
        ) == pytest.approx(1, abs=1e-5)
    gains = {n for n, _ in model.named_parameters() if n.endswith("gamma")}
    assert {
        f"layer.self_attn.parametrizations.{name}.0.gamma" for name in WEIGHTS[kind]
    } <= gains
    assert ("head.parametrizations.weight.0.gamma" in gains) == (on == "all")
    assert len(optimizer.param_groups[0]["params"]) == len(before["parameters"]) + len(
        gains
    )


@pytest.mark.parametrize("kind", WEIGHTS)
def test_torchs_own_attention_is_watched_and_folded(kind: str) -> None:
    model, x = Encoder(kind), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    names = list(model.state_dict())
    qkeel.apply(model, "sigma_reparam:init=one", optimizer, batch=x)
    monitor = qkeel.watch(model, optimizer)
    train(model, optimizer, 3)
    assert monitor.history.heads["max_logit"].shape == (3, 1, 2)
    monitor.remove()
    out = model.eval()(x)
    found = qkeel.fold(model)
    assert torch.equal(model(x), out)
    assert "sigma_reparam of layer.self_attn" in found.written
    assert list(model.state_dict()) == names
    assert type(model.layer.self_attn) is nn.MultiheadAttention
    with torch.no_grad():
        assert torch.allclose(model(x), out, atol=1e-5)


class OwnWeight(nn.Module):
    """Attention whose q, k and v come from a parameter that no layer multiplies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = (
            nn.Embedding(13, 16),
            nn.Parameter(torch.randn(48, 16) / 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            nn.functional.linear(self.embedding(x), self.qkv)
            .unflatten(-1, (3, 2, 8))
            .transpose(1, 3)
            .unbind(2)
        )
        return (
            nn.functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .flatten(2)
        )


def test_logits_from_a_weight_that_would_stay_as_it_is_are_refused() -> None:
    model = OwnWeight()
    with pytest.raises(
        RefusedError,
        match=r"some are computed from qkv \[48, 16\], which the remedy would leave",
    ):
        qkeel.apply(model, "sigma_reparam", batch=tokens())
