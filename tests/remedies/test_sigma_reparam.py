"""sigma_reparam against the obvious implementation, its buffer, its gain, and its removal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.errors import NonFiniteError, RefusedError, UnknownNameError
from qkeel.nn import Decoder
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


def layer_pair(init: str, shape: tuple[int, int] = (6, 9)) -> tuple[nn.Linear, Plain]:
    torch.manual_seed(0)
    holder = nn.ModuleDict({"site": attention(), "linear": nn.Linear(shape[1], shape[0], bias=False).double()})
    layer = holder["linear"]
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach().clone()
    qkeel.apply(f"sigma_reparam:init={init}", holder)
    start = torch.linalg.svd(weight).Vh[0]
    own = layer.get_buffer("parametrizations.weight.0.right")
    start = start * torch.sign(start @ own)  # a singular vector has no sign
    sigma = float(torch.linalg.matrix_norm(weight, ord=2))
    return layer, Plain(weight, sigma if init == "keep" else 1.0, start)


@pytest.mark.parametrize("init", ["keep", "one"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 4), (4, 1)])
def test_equals_the_obvious_implementation_over_training_steps(init: str, shape: tuple[int, int]) -> None:
    layer, plain = layer_pair(init, shape)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (layer, plain))
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        x = torch.randn(3, shape[1], generator=generator, dtype=torch.float64)
        layer.train(step % 3 != 0)
        plain.train(step % 3 != 0)
        one, two = layer(x), plain(x)
        assert (one - two).abs().max() < 1e-12
        for out, optimizer in ((one, a), (two, b)):
            optimizer.zero_grad()
            (out - 1).square().sum().backward()
            optimizer.step()
    assert (layer.get_buffer("parametrizations.weight.0.right") - plain.u).abs().max() < 1e-12
    assert (layer.get_parameter("parametrizations.weight.0.gamma") - plain.gamma).abs() < 1e-12


def test_the_gradient_flows_through_sigma() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 6, dtype=torch.float64)
    scale = SpectralScale(weight, "keep").eval()
    probe = weight.clone().requires_grad_()
    (scale(probe) * torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    # Ŵ does not depend on the size of W, so the gradient has no component along it.
    assert probe.grad is not None
    assert (probe.grad * weight).sum().abs() < 1e-12
    assert torch.autograd.gradcheck(scale, probe.detach().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keep_leaves_the_first_forward_bit_for_bit(dtype: torch.dtype) -> None:
    model = decoder().to(dtype)
    out = model(tokens())
    with qkeel.apply("sigma_reparam", model):
        assert torch.equal(out, model(tokens()))
        model.eval()
        assert torch.allclose(out, model(tokens()), atol=1e-4 if dtype != torch.bfloat16 else 0.1)


def test_one_gives_every_linear_layer_spectral_norm_one() -> None:
    model = decoder(mlp="swiglu")
    with qkeel.apply("sigma_reparam:init=one", model):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert len(linears) == 2 * 7 + 1
        for layer in linears:
            assert float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2)) == pytest.approx(1, abs=1e-5)


def test_evaluation_never_changes_the_buffer_even_if_it_was_on_when_the_remedy_came() -> None:
    model = decoder().eval()
    qkeel.apply("sigma_reparam", model)
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
    qkeel.apply("sigma_reparam", model)
    model.eval()
    layer = model.blocks[0].attention.q_proj
    plain = layer.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain, layer.weight)


def test_attention_only_leaves_the_rest_alone() -> None:
    model = decoder()
    with qkeel.apply("sigma_reparam:on=attention", model):
        gains = {n for n, _ in model.named_parameters() if n.endswith("gamma")}
    assert gains == {
        f"blocks.{i}.attention.{w}_proj.parametrizations.weight.0.gamma" for i in (0, 1) for w in ("q", "k", "v", "o")
    }


def test_the_gains_join_the_optimizer_and_leave_it() -> None:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    n = len(optimizer.param_groups[0]["params"])
    with qkeel.apply("sigma_reparam", model, optimizer):
        assert len(optimizer.param_groups) == 1
        assert len(optimizer.param_groups[0]["params"]) == n + 13
        gain = model.get_parameter("head.parametrizations.weight.0.gamma")
        old = gain.detach().clone()
        train(model, optimizer, 2)
        assert not torch.equal(old, gain)
    assert len(optimizer.param_groups[0]["params"]) == n
    assert gain not in optimizer.state


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_removal_restores_everything_bit_for_bit(tied: bool, training: bool) -> None:
    model = decoder(tied=tied).train(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before, out = snapshot(model, optimizer), model(tokens())
    with qkeel.apply("sigma_reparam:init=one", model, optimizer):
        assert not torch.equal(out, model(tokens()))
    assert_same(before, snapshot(model, optimizer))
    assert torch.equal(out, model(tokens()))
    assert type(model.blocks[0].attention.q_proj) is nn.Linear
    assert list(model.head._parameters) == ["weight", "bias"]
    if tied:
        assert model.head.weight is model.embedding.weight


def test_a_checkpoint_goes_round() -> None:
    def fresh() -> tuple[Decoder, torch.optim.Optimizer]:
        model = decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
        qkeel.apply("sigma_reparam", model, optimizer)
        return model, optimizer

    straight, optimizer = fresh()
    train(straight, optimizer, 3)
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    train(straight, optimizer, 3)
    resumed, other = fresh()
    train(resumed, other, 1)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(resumed, other, 3)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_sites_find_the_stored_weight() -> None:
    model = decoder()
    with qkeel.apply("sigma_reparam", model):
        site = qkeel.find_sites(model)[0]
        assert site.query[0].parameter == "blocks.0.attention.q_proj.parametrizations.weight.original"
        assert site.reparametrised
    assert not qkeel.find_sites(model)[0].reparametrised


@pytest.mark.parametrize("other", ["lalr", "qk_clip"])
@pytest.mark.parametrize("first", [True, False])
def test_what_reads_or_scales_weights_is_refused_in_either_order(other: str, first: bool) -> None:
    # The size of the stored weight is not the size of the one in use: σ divides it out.
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match="computed from another"):
        qkeel.apply(f"{other}+sigma_reparam" if first else f"sigma_reparam+{other}", model, optimizer)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("remedy", ["sigma_reparam+qk_lr", "qk_lr+sigma_reparam", "sigma_reparam+qk_norm+softcap"])
def test_allowed_compositions_train(remedy: str) -> None:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = snapshot(model, optimizer)
    handle = qkeel.apply(remedy, model, optimizer)
    train(model, optimizer, 3)
    handle.remove()
    after = snapshot(model, optimizer)
    assert all(before[part] == after[part] for part in before if part != "state")


def test_qk_lr_after_sigma_reparam_scales_the_stored_weight_and_not_the_gain() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qkeel.apply("sigma_reparam+qk_lr:factor=0", model, optimizer)
    q = model.blocks[0].attention.q_proj
    weight, gain = (q.get_parameter(f"parametrizations.weight.{n}") for n in ("original", "0.gamma"))
    old = weight.detach().clone(), gain.detach().clone()
    train(model, optimizer, 1)
    assert torch.equal(old[0], weight)
    assert not torch.equal(old[1], gain)


def test_weights_that_cannot_be_scaled_are_named_and_the_model_is_as_it_was() -> None:
    for spoil, error, message in (
        (lambda m: nn.init.zeros_(m.blocks[1].mlp.down.weight), RefusedError, "blocks.1.mlp.down is all zeros"),
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
            qkeel.apply("sigma_reparam", model)
        assert type(model.blocks[0].attention.q_proj) is nn.Linear
        assert not model.blocks[0].attention.__dict__.get("_qkeel_applied")


def test_wrong_words_name_the_right_ones() -> None:
    for remedy in ("sigma_reparam:on=al", "sigma_reparam:init=keeps"):
        with pytest.raises(UnknownNameError, match="Did you mean"):
            qkeel.apply(remedy, decoder())


def test_a_pass_that_checkpointing_repeats_has_the_same_weights_or_says_so() -> None:
    layer, _ = layer_pair("one")
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    start = layer.get_buffer("parametrizations.weight.0.right").clone()

    def gradients(*reentrant: bool) -> list[Tensor]:
        layer.zero_grad()
        x.grad = None
        with torch.no_grad():
            layer.get_parameter("parametrizations.weight.original").mul_(1)  # as a step of the optimizer
            layer.get_buffer("parametrizations.weight.0.right").copy_(start)
        for _ in range(2):
            y = checkpoint(layer, x, use_reentrant=reentrant[0]) if reentrant else layer(x)
            y.square().sum().backward()
        grads = [p.grad for p in (*layer.parameters(), x)]
        return [g.clone() for g in grads if g is not None] + [layer.get_buffer("parametrizations.weight.0.right")]

    plain = [g.clone() for g in gradients()]
    for reentrant in (False, True):
        assert all(torch.equal(a, b) for a, b in zip(gradients(reentrant), plain, strict=True))
    two = [checkpoint(layer, x, use_reentrant=False) for _ in range(2)]
    with pytest.raises(RefusedError, match="ran 2 times before this backward pass"):
        two[0].sum().backward()
