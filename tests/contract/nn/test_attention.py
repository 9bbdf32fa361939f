"""nn.Attention is projections around the oracle's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkeel import preset, reference
from qkeel.errors import InvalidValueError, QkeelError, ShapeError, UnknownNameError
from qkeel.nn import Attention, KVCache
from qkeel.spec import PRESETS

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
every_preset = pytest.mark.parametrize("name", PRESETS)


def randomised(module: Attention) -> Attention:
    """The module in float64 with gains moved off their initial values."""
    for name, p in module.named_parameters():
        if "proj" not in name:
            p.data.add_(0.3 * torch.randn_like(p) * p.abs().clamp_min(0.3))
    return module.double()


def make(name: str, heads: str = "gqa", bias: bool = False) -> Attention:
    h, g = HEADS["mha"] if name == "ngpt" else HEADS[heads]
    return randomised(Attention(24, h, g, 8, spec=preset(name), bias=bias))


def by_hand(
    module: Attention, x: Tensor, context: Tensor | None = None, **how: object
) -> Tensor:
    """Projections with einsum, the oracle, the output projection."""
    source = x if context is None else context

    def project(layer: torch.nn.Linear, y: Tensor, heads: int) -> Tensor:
        weight = layer.weight.view(heads, module.head_dim, -1)
        out = torch.einsum("btm,hdm->bhtd", y, weight)
        return (
            out
            if layer.bias is None
            else out + layer.bias.view(heads, 1, module.head_dim)
        )

    q = project(module.q_proj, x, module.n_heads)
    k, v = (
        project(layer, source, module.n_kv_heads)
        for layer in (module.k_proj, module.v_proj)
    )
    params = dict(module.spec_params())
    out = reference.attend(module.spec, q, k, v, params=params, **how).out  # type: ignore[arg-type]
    weight = module.o_proj.weight.view(-1, module.n_heads, module.head_dim)
    return torch.einsum("bhtd,mhd->btm", out, weight)


@every_preset
@pytest.mark.parametrize("heads", HEADS)
def test_output_is_that_of_the_oracle_between_projections(
    name: str, heads: str
) -> None:
    for bias in (False, True):
        module = make(name, heads, bias)
        x = torch.randn(2, 5, 24, dtype=torch.float64)
        assert torch.allclose(module(x), by_hand(module, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["sdpa", "chunked"])
def test_impl_names_the_kernel(impl: str) -> None:
    module, x = make("qwen3"), torch.randn(2, 5, 24, dtype=torch.float64)
    module.impl = impl
    assert torch.allclose(module(x), by_hand(module, x), rtol=0, atol=1e-12)
    module.impl = "spda"
    with pytest.raises(UnknownNameError, match="sdpa"):
        module(x)


def test_cross_attention_sees_all_of_the_context_unless_asked_to_be_causal() -> None:
    module = make("qwen3", bias=True)
    x, context = (
        torch.randn(2, 5, 24, dtype=torch.float64),
        torch.randn(2, 7, 24, dtype=torch.float64),
    )
    full = module(x, context=context)
    assert torch.allclose(
        full, by_hand(module, x, context, causal=False), rtol=0, atol=1e-12
    )
    causal = module(x, context=context, causal=True)
    assert torch.allclose(
        causal, by_hand(module, x, context, causal=True), rtol=0, atol=1e-12
    )
    assert not torch.allclose(full, causal)


def test_cross_attention_takes_positions_of_both_sides_and_a_mask() -> None:
    module = make("baseline_logn")
    x, context = (
        torch.randn(2, 3, 24, dtype=torch.float64),
        torch.randn(2, 6, 24, dtype=torch.float64),
    )
    pos, pos_context = (
        torch.tensor([[4, 7, 9], [0, 2, 5]]),
        torch.tensor([[0, 1, 2, 3, 4, 5], [1, 3, 5, 7, 9, 11]]),
    )
    mask = torch.rand(2, 1, 3, 6) < 0.7
    ours = module(x, context=context, pos=pos, pos_context=pos_context, mask=mask)
    theirs = by_hand(
        module, x, context, causal=False, mask=mask, pos_q=pos, pos_k=pos_context
    )
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_own_positions_and_padding_are_those_of_the_oracle() -> None:
    module, x = make("qwen3"), torch.randn(2, 5, 24, dtype=torch.float64)
    pos, real = (
        torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]),
        torch.tensor([[True] * 5, [False] * 2 + [True] * 3]),
    )
    ours = module(x, pos=pos, mask=real)
    assert torch.allclose(
        ours, by_hand(module, x, mask=real, pos_q=pos, pos_k=pos), rtol=0, atol=1e-12
    )


def test_dropout_acts_in_training_only() -> None:
    module = Attention(24, 4, dropout=0.5)
    x = torch.randn(2, 5, 24)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    module.dropout = 0.0
    assert torch.equal(module.eval()(x), module.train()(x))


def test_parameters_of_the_spec_get_gradients() -> None:
    for name in ("qwen3", "chameleon", "qknorm_2020", "swin_v2"):
        module = make(name)
        module(torch.randn(2, 5, 24, dtype=torch.float64)).square().sum().backward()
        assert module.spec_params(), name
        assert all(
            p.grad is not None and p.grad.abs().max() > 0
            for p in module.spec_params().values()
        ), name


def test_weights_come_back_from_a_state_dict() -> None:
    one, other, x = (
        make("chameleon", bias=True),
        make("chameleon", bias=True),
        torch.randn(2, 5, 24).double(),
    )
    assert not torch.equal(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"d_model": 24, "n_heads": 4, "n_kv_heads": 3}, "choose one of"),
        ({"d_model": 24, "n_heads": 5}, "does not split evenly into 5 heads"),
        ({"d_model": 24, "n_heads": 0}, "at least one head"),
        ({"d_model": 24, "n_heads": 4, "n_kv_heads": 0}, "at least one head"),
        ({"d_model": 24, "n_heads": 4, "head_dim": 0}, "head_dim"),
        ({"d_model": 0, "n_heads": 4}, "d_model"),
        (
            {"d_model": 12, "n_heads": 4, "spec": preset("baseline")},
            "even number of dimensions",
        ),
        (
            {"d_model": 24, "n_heads": 4, "n_kv_heads": 2, "spec": preset("ngpt")},
            "shared by q and k",
        ),
        ({"d_model": 24, "n_heads": 4, "dropout": 1.0}, r"dropout in \[0, 1\)"),
        ({"d_model": 24, "n_heads": 4, "impl": "spda"}, "sdpa"),
    ],
)
def test_bad_sizes_are_refused_when_the_module_is_made(
    arguments: dict, said: str
) -> None:
    with pytest.raises(QkeelError, match=said):
        Attention(**arguments)


def test_bad_input_is_refused_with_what_was_expected_and_what_came() -> None:
    module = Attention(24, 4)
    with pytest.raises(ShapeError, match=r"batch tokens 24.*\(2, 5, 23\)"):
        module(torch.randn(2, 5, 23))
    with pytest.raises(ShapeError, match=r"\(5, 24\)"):
        module(torch.randn(5, 24))
    with pytest.raises(ShapeError, match=r"context.*\(2, 5, 23\)"):
        module(torch.randn(2, 5, 24), context=torch.randn(2, 5, 23))
    with pytest.raises(ShapeError, match=r"context.*\(3, 5, 24\)"):
        module(torch.randn(2, 5, 24), context=torch.randn(3, 5, 24))
    with pytest.raises(InvalidValueError, match="are mutually exclusive"):
        module(torch.randn(2, 5, 24), context=torch.randn(2, 5, 24), cache=KVCache())
    with pytest.raises(ShapeError, match="mask"):
        module(torch.randn(2, 5, 24), mask=torch.ones(7, dtype=torch.bool))
    with pytest.raises(ShapeError, match="expected pos_"):
        module(torch.randn(2, 5, 24), pos=torch.arange(4))


def test_the_printed_module_names_heads_and_formula() -> None:
    text = repr(Attention(24, 4, 2, spec=preset("qwen3")))
    assert "n_heads=4, n_kv_heads=2, head_dim=6" in text
    assert "RMS" in text
    assert "RoPE" in text


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("gradient", [False, True])
def test_what_a_hook_keeps_of_a_projection_stays_as_it_was(
    native: str, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    module, x, kept = Attention(64, 4, spec=preset("qwen3")), torch.randn(2, 12, 64), []

    def once(_module: torch.nn.Module, _given: object, out: Tensor) -> None:
        kept.append(out)
        handle.remove()

    handle = module.q_proj.register_forward_hook(once)
    with torch.set_grad_enabled(gradient):
        out = module(x)
        assert torch.equal(kept[0], x @ module.q_proj.weight.T)
        if gradient:
            (out.sum() + kept[0].sum()).backward()


def test_a_projection_that_returns_its_input_leaves_it_alone() -> None:
    module, x = Attention(32, 2, spec=preset("qwen3")), torch.randn(1, 5, 32)
    module.q_proj = module.k_proj = torch.nn.Identity()  # type: ignore[assignment]
    before = x.clone()
    with torch.no_grad():
        module(x)
    assert torch.equal(x, before)
