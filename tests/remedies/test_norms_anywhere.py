"""qk_norm and its relatives after the projections of models nobody prepared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from tests.quick import one_in, quick
from torch import Tensor, nn

import qkeel
from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.remedies.change_norm import KINDS
from qkeel.spec import AttentionSpec, Fixed, InverseSqrt, L2Norm, Learned, RMSNorm, Sqrt
from qkeel.spec.slot import Params

from .foreign import LAYOUTS, Hand, build, calls, everything, example, hf, jolted, out

GAINS = ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")
HOW = ("eager", "sdpa")
FAMILIES = [
    *itertools.product(("llama", "qwen2", "gpt2", "neox", "bert", "vit", "t5"), HOW),
    ("encoder", ""),
]


def oracle(model: Hand, spec: AttentionSpec, x: Tensor, params: Params) -> Tensor:
    q, k, v = Hand.heads(model, x)
    return model.o(
        reference.attend(spec, q, k, v, params=params).out.transpose(1, 2).flatten(2)
    )


def learned_scale(kind: str, gain: str) -> bool:
    return kind == "l2" and gain in ("scalar", "head")


def check_against_the_oracle(
    layout: str, how: str, kind: str, over: str, gain: str
) -> None:
    model, plain = Hand(layout, how).double(), Hand(layout, how).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    length = {"train_length": 32} if learned_scale(kind, gain) else {}
    qkeel.apply(
        model, f"qk_norm:kind={kind},over={over},gain={gain}", batch=x, **length
    )  # type: ignore[arg-type]
    jolted(model)
    params = {
        n.removesuffix(".weight"): p
        for n, p in model.named_parameters()
        if n.endswith("norm.weight")
    }
    spec = AttentionSpec(
        norm=KINDS[kind](over=over, gain=gain),
        scale=Sqrt() if kind == "l2" else InverseSqrt(),
    )
    if length:
        start = float(torch.tensor(32 * 32 - 32.0).log2())
        spec = AttentionSpec(
            norm=L2Norm(over=over),  # type: ignore[arg-type]
            scale=Learned(init=start, per="layer" if gain == "scalar" else "head"),
        )
        scale = model.get_parameter("q_norm.logit_scale")
        assert torch.allclose(scale, torch.full_like(scale, start))
        with torch.no_grad():
            scale.add_(torch.rand_like(scale))
        params = {"logit_scale": scale if gain == "scalar" else scale[..., None]}
    assert set(params) == set(spec.init_params(model.h, model.g, model.d))
    assert (model(x) - oracle(plain, spec, x, params)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("kind", "over", "gain"), list(itertools.product(KINDS, ("head", "layer"), GAINS))
)
def test_every_layout_of_qk_norm_equals_the_oracle_behind_linear_layers(
    kind: str, over: str, gain: str
) -> None:
    check_against_the_oracle("linear", "eager", kind, over, gain)


def test_a_norm_whose_operators_show_none_is_known_as_one_all_the_same() -> None:
    class Mine(RMSNorm):
        def normalise(self, x: Tensor) -> Tensor:
            return x / x.abs().mean(-1, keepdim=True)

    with mock.patch.dict(KINDS, mine=Mine):
        check_against_the_oracle("linear", "eager", "mine", "head", "dim")
        model, x = Hand("linear"), torch.randn(2, 6, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(RefusedError, match="a norm between the weights"):
            qkeel.apply(model, ["qk_norm:kind=mine", "qk_clip"], optimizer, batch=x)


@pytest.mark.parametrize(("layout", "how"), one_in(itertools.product(LAYOUTS, HOW), 2))
@pytest.mark.parametrize(
    ("kind", "over", "gain"), [("rms", "head", "head_dim"), ("layer", "layer", "dim")]
)
def test_every_way_to_lay_out_heads_is_normed_head_by_head(
    layout: str, how: str, kind: str, over: str, gain: str
) -> None:
    check_against_the_oracle(layout, how, kind, over, gain)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_with_qk_norm_is_qwen3(how: str, dtype: torch.dtype) -> None:
    llama, qwen3 = hf("llama", how).to(dtype), hf("qwen3", how).to(dtype)
    x = example("llama")
    qkeel.apply(llama, "qk_norm", batch=x)
    jolted(llama)
    qwen3.load_state_dict(llama.state_dict(), strict=True)
    with torch.no_grad():
        ours, theirs = out(llama, x), out(qwen3, x)
    if dtype == torch.float32:
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    else:  # one rounding of a factor apart, at most
        assert (ours - theirs).abs().max() <= 2 * torch.finfo(
            dtype
        ).eps * theirs.abs().max()


@pytest.mark.parametrize(("name", "how"), one_in(FAMILIES, 3))
def test_queries_and_keys_that_reach_the_scores_are_the_normed_ones(
    name: str, how: str
) -> None:
    model, x = build(name, how), example(name)
    before = calls(model, x)
    rotated = name in ("llama", "qwen2", "neox")
    gain = (
        "none" if rotated else "dim"
    )  # a gain per dimension does not commute with the rotation
    qkeel.apply(model, f"qk_norm:gain={gain}", batch=x)
    jolted(model)
    after = calls(model, x)
    assert len(before) == len(after) == 2
    # The first layer only: the second's input has changed.
    q, k = before[0].call.q, before[0].call.k
    norm = RMSNorm(gain=gain)  # type: ignore[arg-type]
    params = {
        f"{p}_norm": g
        for p in "qk"
        if (g := gain_of(model, before[0].frame.name, p)) is not None
    }
    encoded = (
        after[0].call.encoded()
        if name == "encoder"
        else (after[0].call.q, after[0].call.k)
    )
    for part, x0, x1 in (("q", q, encoded[0]), ("k", k, encoded[1])):
        assert (
            norm.apply(part, x0, params) - x1
        ).abs().max() < 2e-5 * x1.abs().max(), part  # type: ignore[arg-type]


def gain_of(model: nn.Module, name: str, part: str) -> Tensor | None:
    found = {n: p.detach() for n, p in model.get_submodule(name).named_parameters()}
    return found.get(f"{part}_norm.weight", found.get(f"{part}_norm"))


ONE_SIDED = [
    ("key_norm", AttentionSpec(norm=RMSNorm(on="k"))),
    ("query_norm", AttentionSpec(norm=RMSNorm(on="q"))),
    ("key_norm:kind=l2", qkeel.preset("kna")),
    ("query_norm:kind=l2", qkeel.preset("qna")),
    ("cosine:length=512", qkeel.preset("cosa")),
    ("cosine:scale=9", AttentionSpec(norm=L2Norm(), scale=Fixed(9.0))),
]


@pytest.mark.parametrize(("remedy", "spec"), ONE_SIDED)
@pytest.mark.parametrize(
    "where", quick(["own", *LAYOUTS], lambda where: where in ("own", "linear", "fused"))
)
def test_one_sided_and_cosine_norms_are_the_published_ones(
    remedy: str, spec: AttentionSpec, where: str
) -> None:
    spec = spec.replace(position=qkeel.spec.NoPosition())
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    if where == "own":
        torch.manual_seed(0)
        model: Any = qkeel.nn.Attention(16, 4, spec=AttentionSpec()).double()
        torch.manual_seed(0)
        expected = qkeel.nn.Attention(16, 4, spec=spec).double()(x)
        qkeel.apply(model, remedy)
    else:
        model = Hand(where).double()
        expected = oracle(model, spec, x, {})
        qkeel.apply(model, remedy, batch=x)
    assert (model(x) - expected).abs().max() < 1e-12


def test_an_rms_norm_under_the_usual_scale_is_the_unit_vector_under_one() -> None:
    x = 100 * torch.randn(2, 6, 16, dtype=torch.float64)  # far from eps
    outputs = []
    for remedy in ("key_norm", "key_norm:kind=l2"):
        model = Hand("fused").double()
        qkeel.apply(model, remedy, batch=x)
        outputs.append(model(x))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-8 * outputs[1].abs().max()


def test_under_autocast_the_norm_is_taken_in_float32() -> None:
    model, x = Hand("linear", "sdpa"), torch.randn(2, 6, 16)
    qkeel.apply(model, "qk_norm", batch=x)
    with torch.autocast("cpu", torch.bfloat16):
        q = model.q(x)
    assert q.dtype == torch.bfloat16
    lengths = q.float().unflatten(-1, (4, 4)).norm(dim=-1)
    assert torch.allclose(lengths, torch.full_like(lengths, 2.0), rtol=0.01)


def test_a_model_that_is_normed_already_is_refused() -> None:
    model, x = hf("qwen3", "sdpa"), example("qwen3")
    before = everything(model)
    with pytest.raises(
        RefusedError,
        match=r"qk_norm at model.layers.0.self_attn: q and k are already normed",
    ):
        qkeel.apply(model, "qk_norm", batch=x)
    assert everything(model) == before


@pytest.mark.parametrize("how", HOW)
def test_latent_attention_takes_norms_that_commute_with_the_rotation(how: str) -> None:
    model, x = hf("deepseek", how), example("deepseek")
    before = everything(model)
    with pytest.raises(
        RefusedError,
        match=r"the keys are not the output of a single module.* computed by .*kv_a_proj",
    ):
        qkeel.apply(model, "qk_norm", batch=x)
    assert everything(model) == before
    if how == "eager":
        with pytest.raises(RefusedError, match="use the model's fused attention"):
            qkeel.apply(model, "qk_norm:gain=none", batch=x)
        assert everything(model) == before
        return
    mine = type(
        "Mine", (RMSNorm,), {"__slots__": ()}
    )  # of which nothing is known, hence nothing behind a rotation
    with (
        mock.patch.dict(KINDS, mine=mine),
        pytest.raises(RefusedError, match="not the output of a single module"),
    ):
        qkeel.apply(model, "qk_norm:kind=mine,gain=none", batch=x)
    assert everything(model) == before
    q, k = calls(model, x)[0].call.q, calls(model, x)[0].call.k
    qkeel.apply(model, "qk_norm:gain=none", batch=x)
    after = calls(model, x)[0].call
    expected = [RMSNorm().normalise(y) for y in (q, k)]
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(after.encoded(), expected)
    )


def test_two_adapted_projections_are_normed_as_a_whole() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a, self.b = (
                base,
                nn.Linear(16, 2, bias=False),
                nn.Linear(2, base.out_features, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    model = Hand("linear")
    model.q, model.k = Adapted(model.q), Adapted(model.k)  # type: ignore[arg-type]
    x = torch.randn(2, 6, 16)
    qkeel.apply(model, "qk_norm:gain=none", batch=x)
    lengths = model.q(x).unflatten(-1, (4, 4)).norm(dim=-1)
    assert torch.allclose(lengths, torch.full_like(lengths, 2.0), atol=1e-4)


def test_weights_used_behind_their_modules_back_are_refused() -> None:
    class Behind(Hand):
        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = (x @ m.weight.mT + m.bias for m in (self.q, self.k, self.v))
            return tuple(y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))  # type: ignore[return-value]

    model, x = Behind("linear"), torch.randn(2, 6, 16)
    before = everything(model)
    with pytest.raises(
        RefusedError,
        match="something other than the module that holds the weights uses them",
    ):
        qkeel.apply(model, "qk_norm", batch=x)
    assert everything(model) == before


@pytest.mark.parametrize("layout", ["linear", "fused", "interleaved"])
@pytest.mark.parametrize(
    "options", ["", ":kind=layer,over=layer", ":kind=l2,gain=head"]
)
def test_projections_whose_weights_a_module_uses_itself_are_normed_as_if_it_called_them(
    layout: str, options: str
) -> None:
    class Functional(Hand):
        """As BEiT and Swin do: the projections are modules, and their weights are given to F.linear."""

        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            def projected(m: nn.Linear) -> Callable[[Tensor], Tensor]:
                return lambda x: nn.functional.linear(
                    input=x, weight=m.weight, bias=m.bias
                )

            with ExitStack() as undo:
                for m in (
                    m
                    for m in (self.modules())
                    if isinstance(m, nn.Linear) and m is not self.o
                ):
                    undo.enter_context(mock.patch.object(m, "_call_impl", projected(m)))
                return super().heads(x)

    functional, plain = Functional(layout), Hand(layout)
    x = torch.randn(2, 6, 16)
    before, y = everything(functional), functional(x)
    assert torch.equal(y, plain(x))
    length = {"train_length": 32} if "head" in options and "l2" in options else {}
    handle = qkeel.apply(functional, f"qk_norm{options}", batch=x, **length)  # type: ignore[arg-type]
    qkeel.apply(plain, f"qk_norm{options}", batch=x, **length)  # type: ignore[arg-type]
    assert torch.equal(functional(x), plain(x))
    assert not torch.equal(functional(x), y)
    handle.remove()
    assert everything(functional) == before
    assert torch.equal(functional(x), y)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "options", ["", ":kind=rms,over=layer,gain=head_dim", ":gain=scalar"]
)
def test_an_identity_in_the_place_of_a_norm_is_left_there(
    how: str, options: str
) -> None:
    class Spare(Hand):
        """As timm's: the norm that was left out is an Identity, which the forward calls."""

        def __init__(self) -> None:
            super().__init__("fused", how)
            self.k_norm, self.q_norm = nn.Identity(), nn.Identity()

        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().heads(x)
            return self.q_norm(q), self.k_norm(k), v

    model, plain, x = Spare(), Hand("fused", how), torch.randn(2, 6, 16)
    y, names = model(x), list(model.state_dict())
    handle = qkeel.apply(model, f"qk_norm{options}", batch=x)
    qkeel.apply(plain, f"qk_norm{options}", batch=x)
    assert torch.equal(model(x), plain(x))
    handle.remove()
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), y)
