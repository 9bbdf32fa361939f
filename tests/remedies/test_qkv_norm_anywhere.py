"""qkv_norm on models that know nothing of qkeel: values are told and normed, and the norm before attention goes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel
from qkeel.errors import RefusedError

from .foreign import LAYOUTS, Hand, everything, example, hf, jolted, out

EPS = {"layer": 1e-5, "rms": 1e-6}
GAINS = ("q_norm.weight", "k_norm.weight", "v_norm.weight")


def normed(x: Tensor, gain: Tensor, kind: str) -> Tensor:
    """The norm written out, of heads [b h t d]."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + EPS[kind]).sqrt() * gain


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_every_layout_is_normed_on_queries_keys_and_values(
    layout: str, how: str, kind: str
) -> None:
    model, x = Hand(layout, how).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    qkeel.apply(model, f"qkv_norm:drop_pre_norm=false,kind={kind}", batch=x)
    jolted(model, GAINS)
    assert [
        n for n, _ in model.named_parameters() if n.endswith("norm.weight")
    ] == list(GAINS)
    q, k, v = (
        normed(y, model.get_parameter(name), kind)
        for y, name in zip(plain.heads(x), GAINS)
    )
    k, v = (y.repeat_interleave(4 // y.shape[1], dim=1) for y in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (model(x) - plain.o(o.transpose(1, 2).flatten(2))).abs().max() < 1e-12


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@torch.no_grad()
def test_the_norm_before_attention_is_dropped_from_blocks_of_other_people(
    how: str,
) -> None:
    model, x = hf("llama", how), example("llama")
    twin = copy.deepcopy(model)
    qkeel.apply(model, "qkv_norm:kind=rms", batch=x)
    jolted(model, GAINS)
    assert not any("input_layernorm" in name for name in model.state_dict())
    assert sum("post_attention_layernorm" in name for name in model.state_dict()) == 2
    for layer, changed in zip(twin.model.layers, model.model.layers):
        layer.input_layernorm = nn.Identity()
        for part in "qkv":
            gain = changed.self_attn.get_submodule(f"{part}_norm").weight

            def norm(
                _: nn.Module, args: object, y: Tensor, gain: Tensor = gain
            ) -> Tensor:
                return normed(y.unflatten(-1, (-1, 8)), gain, "rms").flatten(-2)

            layer.self_attn.get_submodule(f"{part}_proj").register_forward_hook(norm)
    assert torch.allclose(out(model, x), out(twin, x), atol=1e-5)
    short = model.generate(x[:, :3], max_new_tokens=3, do_sample=False, use_cache=True)
    assert torch.equal(
        short,
        model.generate(x[:, :3], max_new_tokens=3, do_sample=False, use_cache=False),
    )


@pytest.mark.parametrize(("name", "remedy", "message"), [
    ("neox", "qkv_norm", "expected a block that computes x"),  # parallel residual
    ("bert", "qkv_norm", "expected a block that computes x"),  # post-norm
    ("deepseek", "qkv_norm:drop_pre_norm=false", "the keys are not the output of a single module"),
    ("qwen3", "qkv_norm", "q and k are already normed"),
])  # fmt: skip
def test_what_has_no_norm_before_or_no_values_of_its_own_is_refused_and_left_alone(
    name: str, remedy: str, message: str
) -> None:
    model, x = hf(name, "sdpa"), example(name)
    before = everything(model)
    with pytest.raises(RefusedError, match=message):
        qkeel.apply(model, remedy, batch=x)
    assert everything(model) == before


@torch.no_grad()
def test_latent_attention_takes_one_without_a_gain_per_dimension_in_its_call() -> None:
    model, x = hf("deepseek", "sdpa"), example("deepseek")
    first = out(model, x)
    with qkeel.apply(model, "qkv_norm:kind=rms,gain=none,drop_pre_norm=false", batch=x):
        assert not torch.allclose(out(model, x), first)
    assert torch.equal(out(model, x), first)
