"""sigma_reparam against the obvious implementation, its buffer, its gain, and its removal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

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
    qkeel.apply(holder, f"sigma_reparam:init={init}")
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
    with qkeel.apply(model, "sigma_reparam"):
        assert torch.equal(out, model(tokens()))
        model.eval()
        assert torch.allclose(out, model(tokens()), atol=1e-4 if dtype != torch.bfloat16 else 0.1)


def test_one_gives_every_linear_layer_spectral_norm_one() -> None:
    model = decoder(mlp="swiglu")
    with qkeel.apply(model, "sigma_reparam:init=one"):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert len(linears) == 2 * 7 + 1
        for layer in linears:
            assert float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2)) == pytest.approx(1, abs=1e-5)


def test_evaluation_never_changes_the_buffer_even_if_it_was_on_when_the_remedy_came() -> None:
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


def test_attention_only_leaves_the_rest_alone() -> None:
    model = decoder()
    with qkeel.apply(model, "sigma_reparam:on=attention"):
        gains = {n for n, _ in model.named_parameters() if n.endswith("gamma")}
    assert gains == {
        f"blocks.{i}.attention.{w}_proj.parametrizations.weight.0.gamma" for i in (0, 1) for w in ("q", "k", "v", "o")
    }


def test_the_gains_join_the_optimizer_and_leave_it() -> None:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    n = len(optimizer.param_groups[0]["params"])
    with qkeel.apply(model, "sigma_reparam", optimizer):
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
    with qkeel.apply(model, "sigma_reparam:init=one", optimizer):
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
        qkeel.apply(model, "sigma_reparam", optimizer)
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
    with qkeel.apply(model, "sigma_reparam"):
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
        qkeel.apply(model, f"{other}+sigma_reparam" if first else f"sigma_reparam+{other}", optimizer)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("remedy", ["sigma_reparam+qk_lr", "qk_lr+sigma_reparam", "sigma_reparam+qk_norm+softcap"])
def test_allowed_compositions_train(remedy: str) -> None:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = snapshot(model, optimizer)
    handle = qkeel.apply(model, remedy, optimizer)
    train(model, optimizer, 3)
    handle.remove()
    after = snapshot(model, optimizer)
    assert all(before[part] == after[part] for part in before if part != "state")


def test_qk_lr_after_sigma_reparam_scales_the_stored_weight_and_not_the_gain() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qkeel.apply(model, "sigma_reparam+qk_lr:factor=0", optimizer)
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
            qkeel.apply(model, "sigma_reparam")
        assert type(model.blocks[0].attention.q_proj) is nn.Linear
        assert not model.blocks[0].attention.__dict__.get("_qkeel_applied")


def test_wrong_words_name_the_right_ones() -> None:
    for remedy in ("sigma_reparam:on=al", "sigma_reparam:init=keeps"):
        with pytest.raises(UnknownNameError, match="Did you mean"):
            qkeel.apply(decoder(), remedy)


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


class Twice(nn.Module):
    """Reads a weight twice in a pass, as T5 does, possibly in one or two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.site, self.one, self.two = attention(), nn.Linear(9, 9).double(), nn.Linear(9, 9).double()

    def body(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.to(self.one.weight.dtype)).tanh())

    def forward(self, x: Tensor, *reentrant: bool) -> Tensor:
        if not reentrant:
            return self.body(x)
        if len(reentrant) == 1:
            return checkpoint(self.body, x, use_reentrant=reentrant[0])
        return checkpoint(self.forward, x, *reentrant[1:], use_reentrant=reentrant[0])


def gradients_of_passes(passes: str, *reentrant: bool, compiled: str = "") -> list[Tensor]:
    """Gradients of training passes: "g" with gradients, "n" without, and "b" a backward of all losses so far.

    What `compiled` names is compiled: the code inside the checkpoint or the model around it."""
    model = Twice()
    qkeel.apply(model, "sigma_reparam:init=one")
    run: Callable[..., Tensor] = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    if compiled == "body":
        object.__setattr__(model, "body", torch.compile(model.body, backend="aot_eager"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("original"):  # u is no singular vector any more
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    losses: list[Tensor] = []
    for one in passes:
        x = torch.randn(4, 9, generator=generator, dtype=torch.float64, requires_grad=True)
        if one == "b":
            torch.stack(losses).sum().backward()
            losses.clear()
            continue
        with torch.set_grad_enabled(one == "g"):
            loss = run(x, *reentrant).square().sum()
        losses += [loss] if one == "g" else []
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any(n.startswith("one") and n.endswith("gamma") for n in grads)
    return [*grads.values(), *model.buffers()]


@pytest.mark.parametrize("passes", ["gb", "ggb", "gnb", "ngb", "gngnb", "gbgb", "ggbnggb", "g" * 12 + "b"])
@pytest.mark.parametrize("reentrant", [(False,), (True,), (True, True), (False, True)])
def test_recomputed_passes_have_the_gradients_of_plain_ones(passes: str, reentrant: tuple[bool, ...]) -> None:
    # The order in which the passes' gradients are added differs.
    plain = gradients_of_passes(passes)
    for got, want in zip(gradients_of_passes(passes, *reentrant), plain, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("passes", ["gb", "ggb", "gnb"])
@pytest.mark.parametrize("compiled", ["body", "model"])
@pytest.mark.parametrize("reentrant", [(), (False,), (True,)])
def test_recomputed_passes_of_compiled_code_have_the_gradients_of_plain_ones(
    passes: str, compiled: str, reentrant: tuple[bool, ...]
) -> None:
    plain = gradients_of_passes(passes)
    torch.compiler.reset()
    for got, want in zip(gradients_of_passes(passes, *reentrant, compiled=compiled), plain, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("passes", ["gb", "ggb"])
@pytest.mark.parametrize("reentrant", [(False, False), (True, False)])
def test_where_the_recomputed_pass_is_unknown_the_gradient_is_right_or_refused(
    passes: str, reentrant: tuple[bool, ...]
) -> None:
    # Of two checkpoints inside one another, torch shows only the inner one; the weight is read twice in each pass.
    plain = gradients_of_passes(passes)
    try:
        got = gradients_of_passes(passes, *reentrant)
    except RefusedError as error:
        assert reentrant == (False, False)
        assert "it is unknown which of these is recomputed" in str(error)  # noqa: PT017
    else:
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, plain, strict=True))


def test_one_read_in_nested_checkpoints_is_not_refused() -> None:
    grads = []
    for nested in (False, True):
        layer, _ = layer_pair("one")
        torch.manual_seed(1)
        with torch.no_grad():
            layer.get_parameter("parametrizations.weight.original").add_(torch.randn(6, 9))
        for i in range(3):  # the gradients are added up, and the weight stays
            x = torch.full((2, 9), i + 1.0, dtype=torch.float64, requires_grad=True)

            def inner(x: Tensor, layer: nn.Linear = layer) -> Tensor:
                return checkpoint(layer, x, use_reentrant=False)

            y = checkpoint(inner, x, use_reentrant=False) if nested else layer(x)
            y.square().sum().backward()
        grads.append([p.grad for p in layer.parameters() if p.grad is not None])
    assert len(grads[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_gain_of_a_frozen_weight_is_frozen_and_joins_no_optimizer() -> None:
    model = decoder()
    for name, p in model.named_parameters():
        p.requires_grad_("head" in name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    qkeel.apply(model, "sigma_reparam", optimizer)
    gains = {n: p for n, p in model.named_parameters() if n.endswith("gamma")}
    assert [n for n, p in gains.items() if p.requires_grad] == ["head.parametrizations.weight.0.gamma"]
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert [n for n, p in gains.items() if id(p) in listed] == ["head.parametrizations.weight.0.gamma"]
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
        self.layer: nn.Module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        if kind == "separate":
            self.layer.self_attn = nn.MultiheadAttention(16, 2, kdim=8, vdim=12, batch_first=True)
        self.separate = kind == "separate"

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        if self.separate:
            attention = self.layer.get_submodule("self_attn")
            return self.head(x + attention(x, x[..., :8].sin(), x[..., :12].cos(), need_weights=False)[0])
        return self.head(self.layer(x))


WEIGHTS = {"fused": ["in_proj_weight"], "separate": ["q_proj_weight", "k_proj_weight", "v_proj_weight"]}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("on", ["all", "attention"])
def test_torchs_own_attention_is_scaled_and_restored(kind: str, on: str) -> None:
    model, x = Encoder(kind), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before, out, own = snapshot(model, optimizer), model(x), model.layer.get_submodule("self_attn")
    with torch.no_grad():
        fast = model.eval()(x)
    model.train()
    handle = qkeel.apply(model, f"sigma_reparam:on={on}", optimizer, batch=x)
    assert torch.equal(model(x), out)
    site = qkeel.find_sites(model, x)[0]
    assert site.reparametrised
    assert site.verified
    assert site.query[0].parameter == f"layer.self_attn.parametrizations.{WEIGHTS[kind][0]}.original"
    model.eval()
    with torch.no_grad():
        assert torch.allclose(model(x), fast, atol=1e-5)
    model.train()
    handle.remove()
    assert type(own) is nn.MultiheadAttention
    after = snapshot(model, optimizer)
    assert all(before[part] == after[part] for part in before if part != "state")
    assert_same(before, after)
    assert torch.equal(model(x), out)

    handle = qkeel.apply(model, f"sigma_reparam:on={on},init=one", optimizer, batch=x)
    for name in WEIGHTS[kind]:
        assert float(torch.linalg.matrix_norm(getattr(own, name).detach(), 2)) == pytest.approx(1, abs=1e-5)
    gains = {n for n, _ in model.named_parameters() if n.endswith("gamma")}
    assert {f"layer.self_attn.parametrizations.{name}.0.gamma" for name in WEIGHTS[kind]} <= gains
    assert ("head.parametrizations.weight.0.gamma" in gains) == (on == "all")
    assert len(optimizer.param_groups[0]["params"]) == len(before["parameters"]) + len(gains)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_copies_and_folds_of_torchs_own_attention_compute_the_same(kind: str) -> None:
    model, x = Encoder(kind), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    names = list(model.state_dict())
    qkeel.apply(model, "sigma_reparam:init=one", optimizer, batch=x)
    monitor = qkeel.watch(model, optimizer)
    train(model, optimizer, 3)
    assert monitor.history.heads["max_logit"].shape == (3, 1, 2)
    monitor.remove()
    model.eval()
    out = model(x)
    resumed = Encoder(kind)
    qkeel.apply(resumed, "sigma_reparam", batch=x)
    resumed.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), resumed.eval()):
        assert torch.equal(twin(x), out)
        assert list(twin.state_dict()) == list(model.state_dict())
        found = qkeel.fold(twin)
        assert torch.equal(twin(x), out)
        assert "sigma_reparam of layer.self_attn" in found.written
        assert list(twin.state_dict()) == names
        assert type(twin.layer.self_attn) is nn.MultiheadAttention
        with torch.no_grad():
            assert torch.allclose(twin(x), out, atol=1e-5)


class OwnWeight(nn.Module):
    """Attention whose q, k and v come from a parameter that no layer multiplies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = nn.Embedding(13, 16), nn.Parameter(torch.randn(48, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = nn.functional.linear(self.embedding(x), self.qkv).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_logits_from_a_weight_that_would_stay_as_it_is_are_refused() -> None:
    model = OwnWeight()
    with pytest.raises(RefusedError, match=r"some are computed from qkv \[48, 16\], which the remedy would leave"):
        qkeel.apply(model, "sigma_reparam", batch=tokens())
