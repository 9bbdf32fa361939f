"""qk_norm in every layout, qkv_norm and softcap: what they compute, their parameters, and their removal."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel import reference
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.nn import MLA, Attention
from qkeel.nn.mla import LatentSizes
from qkeel.remedies.added_parameters import join
from qkeel.remedies.change_norm import KINDS
from qkeel.spec import AttentionSpec, L2Norm, Learned, LogN, Rope, Softcap, Sqrt

from .models import (
    D_MODEL,
    assert_same,
    attention,
    decoder,
    loss,
    snapshot,
    tokens,
    train,
)

GAINS = ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")
LAYOUTS = list(itertools.product(KINDS, ("head", "layer"), GAINS))
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "none": ((), ()),
    "dim": ((4,), (4,)),
    "one_plus_dim": ((4,), (4,)),
    "head_dim": ((4, 4), (2, 4)),
    "scalar": ((), ()),
    "head": ((4, 1), (2, 1)),
}


def x_of(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.randn(
        2, 7, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)


def oracle(
    model: Attention, spec: AttentionSpec, x: Tensor, params: dict[str, Tensor]
) -> Tensor:
    q, k, v = (
        layer(x).unflatten(-1, (n, -1)).transpose(1, 2)
        for layer, n in ((model.q_proj, 4), (model.k_proj, 2), (model.v_proj, 2))
    )
    return model.o_proj(
        reference.attend(spec, q, k, v, params=params).out.transpose(1, 2).flatten(2)
    )


@pytest.mark.parametrize(("kind", "over", "gain"), LAYOUTS)
def test_qk_norm_computes_the_spec_it_names(kind: str, over: str, gain: str) -> None:
    model, plain = attention(), attention()
    x, old = x_of(model), model.spec
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = snapshot(model, optimizer)
    handle = qkeel.apply(model, f"qk_norm:kind={kind},over={over},gain={gain},length=32" if scaled(kind, gain) else
                         f"qk_norm:kind={kind},over={over},gain={gain}", optimizer)  # fmt: skip
    spec = old.replace(norm=KINDS[kind](over=over, gain=gain))
    expected = (
        {"q_norm": SHAPES[gain][0], "k_norm": SHAPES[gain][1]} if gain != "none" else {}
    )
    if kind == "l2":
        spec = old.replace(norm=L2Norm(over=over, gain=gain), scale=Sqrt())
    if scaled(kind, gain):
        per = "layer" if gain == "scalar" else "head"
        spec = old.replace(
            norm=L2Norm(over=over), scale=Learned(init=math.log2(32 * 32 - 32), per=per)
        )
        expected = {"logit_scale": () if gain == "scalar" else (4, 1, 1)}
    assert model.spec == spec
    added = {
        name: tuple(p.shape) for name, p in model.named_parameters() if "." not in name
    }
    assert added == expected
    assert set(expected) <= set(model.state_dict())
    held = [p for g in optimizer.param_groups for p in g["params"]]
    with torch.no_grad():
        for name in expected:
            p = model.get_parameter(name)
            assert p.dtype == torch.float64
            assert any(p is h for h in held)
            p.add_(0.3 * torch.randn(p.shape, dtype=torch.float64))
    params = {name: model.get_parameter(name) for name in expected}
    assert (model(x) - oracle(plain, spec, x, params)).abs().max() < 1e-12
    model(x).square().sum().backward()
    for name in expected:
        assert model.get_parameter(name).grad is not None
    optimizer.zero_grad()
    handle.remove()
    assert_same(before, snapshot(model, optimizer))
    assert torch.equal(model(x), plain(x))


def scaled(kind: str, gain: str) -> bool:
    return kind == "l2" and gain in ("scalar", "head")


def test_gains_start_as_the_identity_gain() -> None:
    model = attention()
    with qkeel.apply(model, "qk_norm:gain=one_plus_dim"):
        assert torch.equal(
            model.get_parameter("q_norm"), torch.zeros(4, dtype=torch.float64)
        )
    with qkeel.apply(model, "qk_norm"):
        assert torch.equal(
            model.get_parameter("k_norm"), torch.ones(4, dtype=torch.float64)
        )


def test_the_published_scale_starts_at_the_logarithm_of_the_training_length() -> None:
    model = attention()
    with qkeel.apply(model, "qk_norm:kind=l2,gain=scalar", train_length=72):
        assert model.get_parameter("logit_scale").item() == pytest.approx(12.319672)
    with qkeel.apply(model, "qk_norm:kind=l2,gain=scalar,length=512", train_length=72):
        assert model.get_parameter("logit_scale").item() == pytest.approx(17.997179)


def test_a_learned_scale_without_a_length_is_refused_before_anything_changes() -> None:
    model = decoder()
    before = snapshot(model)
    with pytest.raises(
        InvalidValueError,
        match=r"give L, as length=512 in the remedy or as qkeel.apply",
    ):
        qkeel.apply(model, "qk_norm:kind=l2,gain=scalar")
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("length", [1, 0, -3, math.nan])
def test_a_length_without_a_logarithm_is_refused(length: float) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError), match="length"):
        qkeel.apply(attention(), "qk_norm", kind="l2", gain="scalar", length=length)


def test_a_length_where_nothing_is_learned_from_it_is_refused() -> None:
    with pytest.raises(
        InvalidValueError, match="length=32 sets the initial value of a learned scale"
    ):
        qkeel.apply(attention(), "qk_norm:length=32")


def test_log_n_stays_when_unit_vectors_take_the_scale() -> None:
    model = Attention(D_MODEL, 4, spec=qkeel.preset("baseline_logn", train_length=16))
    inner = model.spec.scale
    assert isinstance(inner, LogN)
    with qkeel.apply(model, "qk_norm:kind=l2,gain=dim"):
        assert model.spec.scale == LogN(
            inner=Sqrt(), train_length=inner.train_length, clip=inner.clip
        )
    assert model.spec.scale == inner


def test_a_scale_of_its_own_is_not_dropped_in_silence() -> None:
    model = Attention(D_MODEL, 4, spec=AttentionSpec(scale=qkeel.spec.Fixed(0.3)))
    with pytest.raises(
        RefusedError, match=r"unit vectors need their own scale .*0.3; use kind=rms"
    ):
        qkeel.apply(model, "qk_norm:kind=l2")
    with qkeel.apply(model, "qk_norm"):
        assert model.spec.scale == qkeel.spec.Fixed(0.3)


@pytest.mark.parametrize(
    "remedy",
    ["qk_norm", "qk_norm:kind=layer,gain=none", "qk_norm:gain=head_dim", "qkv_norm"],
)
def test_a_norm_after_the_rotation_may_not_tell_dimensions_apart(remedy: str) -> None:
    model = Attention(
        D_MODEL, 4, spec=AttentionSpec(position=Rope(order="rotate_then_norm"))
    )
    with pytest.raises(RefusedError, match="depend on more than the distance"):
        qkeel.apply(model, remedy)
    qkeel.apply(model, "qk_norm:gain=head").remove()


def test_new_gains_join_the_group_of_gains_and_are_named_where_groups_are() -> None:
    model = decoder()
    gains = [(n, p) for n, p in model.named_parameters() if p.ndim < 2]
    rest = [(n, p) for n, p in model.named_parameters() if p.ndim >= 2]
    groups = [
        {"params": rest, "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    n = len(gains)
    with qkeel.apply(model, "qk_norm", optimizer):
        assert len(optimizer.param_groups[1]["params"]) == n + 4
        assert optimizer.param_groups[1]["param_names"][n:] == [
            f"blocks.{i}.attention.{part}"
            for i in (0, 1)
            for part in ("q_norm", "k_norm")
        ]
    assert (
        len(optimizer.param_groups[1]["params"])
        == len(optimizer.param_groups[1]["param_names"])
        == n
    )


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "name",
    ["AdamW", "Adagrad", "SGD", "RMSprop", "ASGD", "Rprop", "Adafactor", "NAdam"],
)
def test_every_optimizer_takes_a_gain_before_and_during_training(
    name: str, fresh: bool
) -> None:
    model = decoder()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    if not fresh:
        train(model, optimizer, 2)
    with qkeel.apply(model, "qk_norm", optimizer):
        gain = model.get_parameter("blocks.0.attention.q_norm")
        old = gain.detach().clone()
        train(model, optimizer, 2)
        scheduler.step()
        assert not torch.equal(old, gain)
    assert gain not in optimizer.state
    train(model, optimizer, 1)


def test_muon_takes_no_gains_and_says_who_does() -> None:
    model = attention(torch.float32)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    before = snapshot(model, optimizer)
    with pytest.raises(
        RefusedError, match="Muon takes matrices only, and q_norm, k_norm are gains"
    ):
        qkeel.apply(model, "qk_norm", optimizer)
    assert_same(before, snapshot(model, optimizer))
    qkeel.apply(model, "qk_norm:gain=none", optimizer)


# --- qkv_norm


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("gain", GAINS)
def test_qkv_norm_normalises_all_three_per_head(kind: str, gain: str) -> None:
    model, plain = attention(), attention()
    x = x_of(model)
    spec = model.spec.replace(norm=KINDS[kind](on="qkv", gain=gain))
    qkeel.apply(model, f"qkv_norm:kind={kind},gain={gain}")
    assert model.spec == spec
    params = {name: p for name, p in model.named_parameters() if "." not in name}
    assert set(params) == (set() if gain == "none" else {"q_norm", "k_norm", "v_norm"})
    assert (model(x) - oracle(plain, spec, x, params)).abs().max() < 1e-12


@pytest.mark.parametrize("order", ["pre", "post", "swin", "peri"])
@pytest.mark.parametrize("drop", [True, False])
def test_qkv_norm_drops_the_norm_before_attention_and_brings_it_back(
    order: str, drop: bool
) -> None:
    model = decoder(norm_order=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before, out = snapshot(model, optimizer), model(tokens())
    had = order in ("pre", "peri")
    with qkeel.apply(model, "qkv_norm", optimizer, drop_pre_norm=drop):
        names = set(model.state_dict())
        assert ("blocks.0.attention_norm.weight" in names) is (had and not drop)
        assert ("blocks.0.mlp_norm.weight" in names) is had
        assert ("blocks.0.attention_post_norm.weight" in names) is (order != "pre")
        loss(model, tokens()).backward()
        optimizer.zero_grad()
    assert_same(before, snapshot(model, optimizer))
    assert torch.equal(out, model(tokens()))


def test_a_dropped_norm_is_not_stepped_by_a_gradient_it_still_had() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, tokens()).backward()
    norm = model.blocks[0].attention_norm.weight
    kept = norm.detach().clone()
    with qkeel.apply(model, "qkv_norm", optimizer):
        model.zero_grad()
        optimizer.step()
    assert torch.equal(kept, norm)


def test_values_of_another_size_cannot_share_a_gain_per_dimension() -> None:
    model = MLA(D_MODEL, 2, sizes=LatentSizes(value_dim=12))
    with pytest.raises(
        RefusedError,
        match=r"queries|a gain per dimension of q and k \(16\) does not fit values of 12",
    ):
        qkeel.apply(model, "qkv_norm")
    with qkeel.apply(model, "qkv_norm:gain=head"):
        model(torch.randn(1, 3, D_MODEL))


# --- softcap


def test_softcap_bends_the_logits() -> None:
    model, plain = attention(), attention()
    x = x_of(model)
    with qkeel.apply(model, "softcap", cap=0.5):
        assert model.spec.cap == Softcap(0.5)
        assert (model(x) - oracle(plain, model.spec, x, {})).abs().max() < 1e-12
        assert not torch.allclose(model(x), plain(x))
    assert torch.equal(model(x), plain(x))


def test_a_capped_model_is_not_capped_again() -> None:
    model = Attention(D_MODEL, 4, spec=qkeel.preset("gemma2", query_scalar=4))
    with pytest.raises(RefusedError, match="logits are already capped"):
        qkeel.apply(model, "softcap")


def test_new_parameters_go_where_their_kind_is_and_leave_nothing_behind() -> None:
    matrix, vector, other = (
        nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (3, 2))
    )
    for groups, near, matrices, home in (
        ([[matrix], [vector], [other]], other, False, 1),
        ([[matrix], [vector], [other]], other, True, 2),
        ([[matrix, vector], [other]], other, False, 1),
        ([[matrix, vector], []], other, False, 0),
        ([[matrix], [other]], other.detach(), True, 0),  # nobody holds it
    ):
        optimizer = torch.optim.SGD(
            [{"params": own} for own in groups], lr=0.1, momentum=0.9
        )
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        before = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
        new = nn.Parameter(torch.ones(2, 2))
        handle = join(optimizer, {"new": new}, near, matrices=matrices)
        assert [any(p is new for p in g["params"]) for g in optimizer.param_groups] == [
            i == home for i in range(len(groups))
        ]
        new.grad = torch.ones_like(new)
        optimizer.step()
        assert new in optimizer.state
        handle.remove()
        assert new not in optimizer.state
        assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == before
    join(None, {"new": new}, near).remove()
    join(optimizer, {}, near).remove()


def test_a_class_that_cannot_be_made_again_takes_new_parameters_too() -> None:
    class Mine(torch.optim.SGD):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1, momentum=0.9)

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = decoder()
    optimizer = Mine(model)
    train(model, optimizer, 1)
    with qkeel.apply(model, "qk_norm", optimizer):
        train(model, optimizer, 1)
