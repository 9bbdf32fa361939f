"""sigma_reparam against the obvious implementation, its buffer, its gain, and folding it."""

import functools

import pytest
import torch
from tests.attention import from_heads
from tests.each_row import each_row
from tests.training import adamw, sgd
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.errors import NonFiniteError, RefusedError

from .models import assert_same, attention, decoder, snapshot, tokens, train

Q = "blocks.0.attention.q_proj"


class Plain(nn.Module):
    """SNLinear as the paper and the authors' code describe it."""

    def __init__(self, weight, gamma, start):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.gamma, self.u = nn.Parameter(gamma), start.clone()

    def forward(self, x):
        with torch.no_grad():
            v = nn.functional.normalize(self.weight @ self.u, dim=0)
            u = nn.functional.normalize(self.weight.t() @ v, dim=0)
        if self.training:
            self.u = u
        return x @ (self.gamma / (v @ self.weight @ u) * self.weight).t()


class OneLayer(nn.Module):
    """A linear layer in a model that has attention, too; it reads the weight twice, as T5 does, in checkpoints."""

    def __init__(self, rows, columns):
        super().__init__()
        torch.manual_seed(0)
        self.site = attention()
        self.linear = nn.Linear(columns, rows, bias=False).double()

    def forward(self, x, *reentrant):
        body = self.linear
        if self.linear.in_features == self.linear.out_features:
            body = self.twice
        for kind in reentrant:
            body = functools.partial(checkpoint, body, use_reentrant=kind)
        return body(x)

    def twice(self, x):
        return self.linear(self.linear(x).sin())

    @property
    def scale(self):
        return self.linear.parametrizations.weight[0]


@pytest.mark.parametrize("init", ["keep", "one"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 4), (4, 1)])
def test_equals_the_obvious_implementation_over_training_steps(init, shape):
    model = OneLayer(*shape)
    weight = model.linear.weight.detach().clone()
    qkeel.apply(model, f"sigma_reparam:init={init}")
    start = torch.linalg.svd(weight).Vh[0]
    start = start * torch.sign(start @ model.scale.right)  # it has no sign
    sigma = torch.linalg.matrix_norm(weight, 2)
    plain = Plain(weight, sigma if init == "keep" else torch.ones_like(sigma), start)
    a, b = (sgd(m, momentum=0.9) for m in (model.linear, plain))
    rng = torch.Generator().manual_seed(1)
    for step in range(20):
        x = torch.randn(3, shape[1], generator=rng, dtype=torch.float64)
        model.train(step % 3 != 0)
        plain.train(step % 3 != 0)
        outputs = model(x), plain(x)
        assert (outputs[0] - outputs[1]).abs().max() < 1e-12
        for output, optimizer in zip(outputs, (a, b)):
            optimizer.zero_grad()
            (output - 1).square().sum().backward()
            optimizer.step()
    assert (model.scale.right - plain.u).abs().max() < 1e-12
    assert (model.scale.gamma - plain.gamma).abs() < 1e-12


def changed(*shape):
    """A model under the remedy whose weight has moved, so that a step of power iteration changes its vectors."""
    model, rng = OneLayer(*shape), torch.Generator().manual_seed(1)
    qkeel.apply(model, "sigma_reparam:init=one")
    with torch.no_grad():
        model.linear.parametrizations.weight.original.add_(
            torch.randn(shape, generator=rng, dtype=torch.float64)
        )
    return model


def trained(*reentrant, compiled=False):
    """Weights, gradients and buffers after two steps."""
    model = changed(9, 9)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    rng = torch.Generator().manual_seed(3)
    optimizer = sgd(model.linear)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 9, generator=rng, dtype=torch.float64, requires_grad=True)
        run(x, *reentrant).square().sum().backward()
        optimizer.step()
    parameters = list(model.linear.parameters())
    return [*parameters, *(p.grad for p in parameters), *model.linear.buffers()]


@pytest.mark.parametrize(
    "reentrant", [(False,), (True,), (False, False), (True, True), (False, True)]
)
def test_passes_that_checkpointing_repeats_have_the_gradients_of_plain_ones(
    reentrant,
):
    assert_close(trained(*reentrant), trained(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "reentrant", [(False,), pytest.param((), marks=pytest.mark.slow)]
)
def test_and_so_have_compiled_ones(reentrant):
    torch.compiler.reset()
    compiled = trained(*reentrant, compiled=True)
    assert_close(compiled, trained(), rtol=1e-12, atol=1e-12)


def test_power_iteration_makes_one_step_for_a_pass_and_none_in_evaluation():
    x = torch.ones(2, 6, dtype=torch.float64)

    def right_after(way):
        model = changed(4, 6)
        if way == "evaluation":
            model.eval()(x)
        elif way == "pass":
            model(x)
        elif way == "repeated pass":
            checkpoint(model, x, use_reentrant=False).sum().backward()
        elif way == "layer alone":
            model.linear(x)
        elif way == "functional":
            weights = {name: p.detach() for name, p in model.named_parameters()}
            torch.func.functional_call(model, weights, (x,))
        elif way == "compiled":
            torch.compile(model, backend="eager", fullgraph=True)(x)
        return model.scale.right.clone()

    start, once = right_after(""), right_after("pass")
    assert not torch.equal(start, once)
    assert torch.equal(right_after("evaluation"), start)
    for way in ("repeated pass", "layer alone", "functional", "compiled"):
        assert_close(right_after(way), once, rtol=1e-12, atol=1e-12)
    model = changed(4, 6)
    (model(x) + model(x)).sum().backward()  # two passes before a backward


def test_the_scale_stays_in_full_precision_under_autocast_and_casts():
    model = decoder()
    qkeel.apply(model.eval(), "sigma_reparam")
    layer = model.get_submodule(Q)
    scale, weight = layer.parametrizations.weight[0], layer.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weight, layer.weight)
    before = scale.gamma.detach().clone(), scale.right.clone()
    for dtype in (torch.bfloat16, torch.float16):
        assert model.to(dtype).get_submodule(Q).weight.dtype == dtype
        assert torch.equal(scale.gamma, before[0])
        assert torch.equal(scale.right, before[1])
    model.to(torch.float64)
    assert scale.gamma.dtype == scale.right.dtype == torch.float64
    model.to("meta")
    assert scale.gamma.is_meta


def test_the_stored_weight_is_that_of_a_site_and_is_what_step_remedies_scale():
    model = decoder()
    optimizer = sgd(model)
    qkeel.apply(model, "sigma_reparam+qk_lr:factor=0", optimizer)
    site = qkeel.find_sites(model)[0]
    stored = f"{Q}.parametrizations.weight.original"
    assert (site.query[0].parameter, site.reparametrised) == (stored, True)
    weight = model.get_parameter(stored)
    gain = model.get_parameter(f"{Q}.parametrizations.weight.0.gamma")
    old = weight.detach().clone(), gain.detach().clone()
    train(model, optimizer, 1)
    assert torch.equal(old[0], weight)
    assert not torch.equal(old[1], gain)


class OwnWeight(nn.Module):
    """Attention whose q, k and v come from a parameter that no layer multiplies."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.qkv = nn.Parameter(torch.randn(48, 16) / 4)

    def forward(self, x):
        qkv = nn.functional.linear(self.embedding(x), self.qkv)
        q, k, v = qkv.unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return from_heads(o)


@each_row(
    "error, spoil",
    [
        (RefusedError, lambda m: nn.init.zeros_(m.blocks[1].mlp.down.weight)),
        (NonFiniteError, lambda m: nn.init.constant_(m.head.weight, torch.nan)),
        (RefusedError, lambda m: parametrizations.weight_norm(m.blocks[1].mlp.up)),
    ],
)
def test_weights_that_cannot_be_scaled_are_refused_and_the_model_is_as_it_was(
    error, spoil
):
    model = decoder()
    spoil(model)
    with pytest.raises(error):
        qkeel.apply(model, "sigma_reparam")
    assert type(model.get_submodule(Q)) is nn.Linear
    with pytest.raises(RefusedError):
        qkeel.apply(OwnWeight(), "sigma_reparam", batch=tokens())


def test_the_gain_of_a_frozen_weight_is_frozen_and_joins_no_optimizer():
    model = decoder()
    for name, p in model.named_parameters():
        p.requires_grad_("head" in name)
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained_ones, lr=1.0)
    qkeel.apply(model, "sigma_reparam", optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if name.endswith("gamma"):
            assert p.requires_grad == (id(p) in held) == name.startswith("head")
    before = model.eval().get_submodule(Q).weight.detach().clone()
    train(model, optimizer, 3)
    assert torch.equal(before, model.get_submodule(Q).weight)


class Encoder(nn.Module):
    """torch's own attention, with one weight for q, k and v."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True
        )

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


@pytest.mark.parametrize("on", ["all", "attention"])
def test_torchs_own_attention_is_scaled_restored_and_folded(on):
    model, x = Encoder(), tokens()
    own = model.layer.self_attn
    optimizer = adamw(model, 0.01)
    before, output = snapshot(model, optimizer), model(x)
    with torch.no_grad():
        fast = model.eval()(x)
    model.train()
    with qkeel.apply(model, f"sigma_reparam:on={on}", optimizer, batch=x):
        assert torch.equal(model(x), output)
        (site,) = qkeel.find_sites(model, x)
        assert site.verified
        stored = "layer.self_attn.parametrizations.in_proj_weight.original"
        assert site.query[0].parameter == stored
        with torch.no_grad():
            assert_close(model.eval()(x), fast, rtol=0, atol=1e-5)
        model.train()
    assert_same(before, snapshot(model, optimizer))
    qkeel.apply(model, f"sigma_reparam:on={on},init=one", optimizer, batch=x)
    norm = torch.linalg.matrix_norm(own.in_proj_weight.detach(), 2)
    assert float(norm) == pytest.approx(1, abs=1e-5)
    gains = [n for n, _ in model.named_parameters() if n.endswith("gamma")]
    assert any(n.startswith("head") for n in gains) == (on == "all")
    assert len(optimizer.param_groups[0]["params"]) == len(before["parameters"]) + len(
        gains
    )
    train(model, optimizer, 3)
    output = model.eval()(x)
    assert "sigma_reparam of layer.self_attn" in qkeel.fold(model).written
    assert torch.equal(model(x), output)
    assert type(own) is nn.MultiheadAttention
    assert list(model.state_dict()) == list(before["state"])
