"""Slots: neutral settings are the identity, bad ones are refused by name, values are immutable."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.each_row import each_row
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qkeel import attention, preset, reference
from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, RefusedError, ShapeError, UnknownNameError
from qkeel.kernels import encode
from qkeel.spec import (
    PRESETS,
    ALiBi,
    AttentionSpec,
    Fixed,
    FloorLogTemperature,
    InverseSqrt,
    Kerple,
    L2Norm,
    LayerNorm,
    LeakyReRope,
    Learned,
    LogN,
    NoCap,
    NoNorm,
    NoPosition,
    ReRope,
    RMSNorm,
    Rope,
    Sigmoid,
    Sink,
    SlidingWindow,
    Softcap,
    Softmax,
    Softpick,
    Sqrt,
    XPos,
)
from qkeel.spec.slot import Slot

GAINS = ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")


def qkv(h: int = 4, g: int = 2, t: int = 6, d: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(2, heads, t, d, dtype=torch.float64, generator=generator) for heads in (h, g, g)
    )


def attend(spec: AttentionSpec, **params: Tensor) -> Tensor:
    return reference.attend(spec, *qkv(), params=params).out


# A neutral hyperparameter is the identity.

NEUTRAL: dict[str, tuple[AttentionSpec, AttentionSpec]] = {
    "infinite cap": (AttentionSpec(cap=Softcap(math.inf)), AttentionSpec()),
    "multiplier 1": (AttentionSpec(scale=InverseSqrt(multiplier=1.0)), AttentionSpec()),
    "dim = head_dim": (AttentionSpec(scale=InverseSqrt(dim=8)), AttentionSpec()),
    "temperature alpha 0": (AttentionSpec(scale=FloorLogTemperature(alpha=0.0)), AttentionSpec()),
    "temperature under its floor": (AttentionSpec(scale=FloorLogTemperature(floor=100)), AttentionSpec()),
    "log n clipped inside the training length": (
        AttentionSpec(scale=LogN(train_length=6, clip=True)),
        AttentionSpec(),
    ),
    "a learned factor of log n at its start": (
        AttentionSpec(scale=LogN(train_length=6, learned="head")),
        AttentionSpec(scale=LogN(train_length=6)),
    ),
    "sink at minus infinity": (AttentionSpec(normalizer=Sink(learned=False, init=-math.inf)), AttentionSpec()),
    "the whole head rotated": (AttentionSpec(position=Rope(rotary=1.0)), AttentionSpec(position=Rope())),
    "learned scale at its start": (AttentionSpec(scale=Learned(init=2.0)), AttentionSpec(scale=Fixed(2.0))),
    "logarithm of a learned scale at its start": (
        AttentionSpec(scale=Learned(init=2.0, log=True, per="head")),
        AttentionSpec(scale=Fixed(2.0)),
    ),
}


@each_row("neutral, plain", NEUTRAL.values(), ids=list(NEUTRAL))
def test_a_neutral_hyperparameter_is_the_identity(neutral: AttentionSpec, plain: AttentionSpec) -> None:
    params = {name: p.double() for name, p in neutral.init_params(4, 2, 8).items()}
    torch.testing.assert_close(attend(neutral, **params), attend(plain), rtol=0, atol=1e-7)
    if not params:
        torch.testing.assert_close(attend(neutral), attend(plain), rtol=0, atol=1e-14)


@pytest.mark.parametrize("gain", ["dim", "head_dim"])
def test_a_bias_starts_at_nothing(gain: Any) -> None:
    spec = AttentionSpec(norm=LayerNorm(gain=gain, bias=True))
    assert torch.equal(attend(spec, **spec.init_params(4, 2, 8)), attend(AttentionSpec(norm=LayerNorm())))


# What a slot does, where no preset shows it.


@pytest.mark.parametrize("on", ["q", "k", "qk", "qkv"])
def test_a_norm_touches_the_named_parts_and_no_other(on: Any) -> None:
    norm = L2Norm(on=on)
    for part, x in zip("qkv", qkv()):
        y = norm.apply(part, x, {})  # type: ignore[arg-type]
        assert (y is x) == (part not in on)
        if part in on:
            torch.testing.assert_close(y.norm(dim=-1), torch.ones(y.shape[:-1], dtype=y.dtype))


def test_a_norm_over_the_layer_is_one_norm_of_all_heads_of_a_token() -> None:
    q, _, _ = qkv()
    found = RMSNorm(over="layer", eps=0.0).apply("q", q, {})
    for b in range(2):
        for t in range(6):
            token = q[b, :, t].flatten()
            expected = (token / token.square().mean().sqrt()).view(4, 8)
            torch.testing.assert_close(found[b, :, t], expected, rtol=1e-12, atol=0)


def test_a_shared_gain_has_no_parameter_for_k_and_serves_it() -> None:
    spec = AttentionSpec(norm=L2Norm(gain="head_dim", shared=True))
    params = spec.init_params(3, 3, 8)
    assert list(params) == ["q_norm"]
    gain = torch.rand(3, 8, dtype=torch.float64) + 0.5
    both = AttentionSpec(norm=L2Norm(gain="head_dim"))
    x = qkv(3, 3)
    shared = reference.attend(spec, *x, params={"q_norm": gain}).out
    assert torch.equal(shared, reference.attend(both, *x, params={"q_norm": gain, "k_norm": gain}).out)


def test_a_shared_gain_with_grouped_keys_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="needs n_heads = n_kv_heads, got 4 and 2; use shared=False"):
        AttentionSpec(norm=L2Norm(gain="head_dim", shared=True)).init_params(4, 2, 8)


def test_values_may_have_a_gain_of_their_own_kind() -> None:
    norm = RMSNorm(on="qkv", gain="dim", value_gain="none")
    assert sorted(AttentionSpec(norm=norm).init_params(4, 2, 8)) == ["k_norm", "q_norm"]
    norm = RMSNorm(on="qkv", value_gain="head")
    assert {name: tuple(p.shape) for name, p in AttentionSpec(norm=norm).init_params(4, 2, 8).items()} == {
        "v_norm": (2, 1)
    }


def test_a_learned_scale_per_head_scales_its_head() -> None:
    spec, scales = AttentionSpec(scale=Learned(init=1.0, per="head")), torch.tensor([1.0, 2.0, 0.5, 0.0]).double()
    found = reference.attend(spec, *qkv(), params={"logit_scale": scales.view(4, 1, 1)}, causal=False).logits
    plain = reference.attend(AttentionSpec(scale=Fixed(1.0)), *qkv(), causal=False).logits
    torch.testing.assert_close(found, plain * scales.view(4, 1, 1), rtol=1e-12, atol=0)


def test_a_learned_sink_takes_its_share_per_head() -> None:
    sink = torch.tensor([-1e30, 0.0, 3.0, 1e30]).double().view(4, 1, 1)
    found = reference.attend(AttentionSpec(normalizer=Sink()), *qkv(), params={"sink": sink})
    share = torch.sigmoid(sink[..., 0] - found.logits.logsumexp(-1))
    torch.testing.assert_close(found.weights.sum(-1), 1 - share, rtol=0, atol=1e-14)
    assert share[0, 0].max() == 0
    assert share[0, 3].min() == 1


def test_sigmoid_attention_at_its_published_bias_starts_with_a_row_sum_near_one() -> None:
    n = 256
    generator = torch.Generator().manual_seed(0)
    q, k = (0.1 * torch.randn(1, 2, n, 16, generator=generator) for _ in range(2))
    spec = AttentionSpec(normalizer=Sigmoid(bias=-math.log(n)))
    total = reference.attend(spec, q, k, k, causal=False).weights.sum(-1)
    assert total.mean().item() == pytest.approx(1.0, rel=0.05)


def test_rotating_after_a_gain_per_head_dim_is_not_rotating_before() -> None:
    params = {"q_norm": torch.rand(8).double() + 0.5, "k_norm": torch.rand(8).double() + 0.5}
    norm = RMSNorm(gain="dim")
    outs = [
        attend(AttentionSpec(norm=norm, position=Rope(order=order)), **params)
        for order in ("norm_then_rotate", "rotate_then_norm")
    ]
    assert (outs[0] - outs[1]).abs().max() > 1e-3


# Bad input: which error, and what it says.

BAD: dict[str, tuple[Callable[[], Any], type[QkeelError], str]] = {
    "part": (lambda: L2Norm(on="kq"), UnknownNameError, "part to normalise 'kq'.*Known: k, q, qk, qkv"),  # type: ignore[arg-type]
    "over": (lambda: RMSNorm(over="heads"), UnknownNameError, "Did you mean 'head'"),  # type: ignore[arg-type]
    "gain": (lambda: RMSNorm(gain="dims"), UnknownNameError, "Did you mean 'dim'"),  # type: ignore[arg-type]
    "value gain": (lambda: RMSNorm(value_gain="heads"), UnknownNameError, "value gain 'heads'"),  # type: ignore[arg-type]
    "eps": (lambda: RMSNorm(eps=-1e-6), InvalidValueError, "eps >= 0, got -1e-06"),
    "eps NaN": (lambda: L2Norm(eps=math.nan), InvalidValueError, "eps >= 0, got nan"),
    "bias without gain": (lambda: LayerNorm(bias=True), InvalidValueError, "gain 'dim' or 'head_dim', got gain 'none'"),
    "bias without gain on v": (
        lambda: LayerNorm(on="qkv", gain="dim", value_gain="none", bias=True),
        InvalidValueError,
        "gain 'dim' or 'head_dim', got gain 'none'",
    ),
    "cap 0": (lambda: Softcap(0.0), InvalidValueError, "a cap above 0, got 0"),
    "cap NaN": (lambda: Softcap(math.nan), InvalidValueError, "a cap above 0, got nan"),
    "base": (lambda: Rope(base=1.0), InvalidValueError, "a RoPE base above 1, got 1"),
    "rotary 0": (lambda: Rope(rotary=0.0), InvalidValueError, r"share in \(0, 1\], got 0"),
    "rotary 2": (lambda: Rope(rotary=2.0), InvalidValueError, r"share in \(0, 1\], got 2"),
    "pairing": (lambda: Rope(pairing="interleave"), UnknownNameError, "Did you mean 'interleaved'"),  # type: ignore[arg-type]
    "order": (lambda: Rope(order="norm_rotate"), UnknownNameError, "Did you mean 'norm_then_rotate'"),  # type: ignore[arg-type]
    "fixed NaN": (lambda: Fixed(math.nan), InvalidValueError, "a finite scale, got nan"),
    "dim 0": (lambda: InverseSqrt(dim=0), InvalidValueError, "a dim above 0, got 0"),
    "dim -4": (lambda: InverseSqrt(dim=-4), InvalidValueError, "a dim above 0, got -4"),
    "multiplier": (lambda: InverseSqrt(multiplier=math.inf), InvalidValueError, "a finite multiplier, got inf"),
    "learned init": (lambda: Learned(init=-1.0), InvalidValueError, "initial scale above 0, got -1"),
    "learned per": (lambda: Learned(init=1.0, per="heads"), UnknownNameError, "Did you mean 'head'"),  # type: ignore[arg-type]
    "maximum without log": (lambda: Learned(init=1.0, maximum=9.0), InvalidValueError, "goes with log=True"),
    "maximum 0": (lambda: Learned(init=1.0, log=True, maximum=0.0), InvalidValueError, "a maximum above 0, got 0"),
    "train_length": (lambda: LogN(train_length=1), InvalidValueError, "at least 2, got 1"),
    "learned": (lambda: LogN(train_length=8, learned="row"), UnknownNameError, "learned factor"),  # type: ignore[arg-type]
    "clipped": (lambda: LogN(train_length=8, learned="head", clip=True), InvalidValueError, "no gradient"),
    "inner": (lambda: LogN(inner=2.0, train_length=8), InvalidTypeError, "a Scale as inner, got float"),  # type: ignore[arg-type]
    "temperature inner": (lambda: FloorLogTemperature(inner=None), InvalidTypeError, "a Scale as inner, got NoneType"),  # type: ignore[arg-type]
    "temperature floor": (lambda: FloorLogTemperature(floor=0), InvalidValueError, "a floor of at least 1, got 0"),
    "sigmoid bias": (lambda: Sigmoid(bias=math.nan), InvalidValueError, "a finite bias, got nan"),
    "softpick eps": (lambda: Softpick(eps=0.0), InvalidValueError, "eps above 0, got 0"),
    "sink NaN": (lambda: Sink(init=math.nan), InvalidValueError, "a sink that is a number below infinity, got nan"),
    "slot type": (lambda: AttentionSpec(norm="rms"), InvalidTypeError, "slot 'norm' takes a Norm object, got 'rms'"),  # type: ignore[arg-type]
    "slot class": (lambda: AttentionSpec(cap=Softcap), InvalidTypeError, "slot 'cap' takes a Cap object"),  # type: ignore[arg-type]
    "wrong slot": (lambda: AttentionSpec(scale=NoNorm()), InvalidTypeError, "slot 'scale' takes a Scale object"),  # type: ignore[arg-type]
    "slot name": (lambda: AttentionSpec().replace(norms=NoNorm()), UnknownNameError, "Did you mean 'norm'"),
    "odd head_dim": (lambda: Rope().check(7), ShapeError, "even number of dimensions; got 7"),
    "odd rotary": (lambda: Rope(rotary=0.25).check(12), ShapeError, "even number of dimensions; got 3"),
}


@each_row("make, kind, says", BAD.values(), ids=list(BAD))
def test_a_bad_setting_is_refused_with_what_was_expected(
    make: Callable[[], Any], kind: type[QkeelError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        make()


def test_each_error_is_also_the_matching_builtin() -> None:
    for make, builtin in (
        (lambda: Softcap(0.0), ValueError),
        (lambda: AttentionSpec(norm=1), TypeError),  # type: ignore[arg-type]
        (lambda: RMSNorm(over="x"), KeyError),  # type: ignore[arg-type]
        (lambda: Rope().check(7), ValueError),
    ):
        with pytest.raises(builtin) as caught:
            make()
        assert isinstance(caught.value, QkeelError)


# Values: immutable, comparable, hashable, copyable.

VALUES = [
    AttentionSpec(),
    AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope(base=500.0), scale=Sqrt(), cap=Softcap(3.0)),
    AttentionSpec(scale=LogN(inner=Learned(init=2.0), train_length=8), normalizer=Sink()),
]


@each_row("spec", VALUES, ids=range(len(VALUES)))
def test_a_spec_and_its_slots_are_immutable(spec: AttentionSpec) -> None:
    for value in (spec, spec.norm, spec.position, spec.scale, spec.cap, spec.normalizer):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
        # Neither frozen-instance nor slots let a new name in.
        with pytest.raises((AttributeError, TypeError)):
            value.other = 1  # type: ignore[union-attr]


@each_row("spec", VALUES, ids=range(len(VALUES)))
def test_a_copy_of_a_spec_equals_it_and_hashes_alike(spec: AttentionSpec) -> None:
    for twin in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), dataclasses.replace(spec), spec.replace()):
        assert twin == spec
        assert hash(twin) == hash(spec)
        assert twin.explain() == spec.explain()
    assert len(set(VALUES)) == len(VALUES)


def test_replace_changes_the_named_slot_alone() -> None:
    spec = VALUES[1].replace(cap=Softcap(7.0), normalizer=Softmax())
    assert spec == AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope(base=500.0), scale=Sqrt(), cap=Softcap(7.0))
    assert VALUES[1].cap == Softcap(3.0)


def test_the_empty_spec_is_scaled_dot_product_attention() -> None:
    q, k, v = qkv(4, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(reference.attend(AttentionSpec(), q, k, v).out, expected, rtol=0, atol=1e-14)
    assert AttentionSpec().init_params(4, 2, 8) == {}
    assert AttentionSpec().position == NoPosition()


class Nothing(TorchFunctionMode):
    """Under it no torch function may be called."""

    def __torch_function__(self, func: object, *rest: Any) -> object:
        raise AssertionError(f"{func} was called")


# What slots answer, so that nobody has to look at their classes.


@each_row("slot, kind",
    [
        (NoNorm(), "none"), (RMSNorm(), "rms"), (L2Norm(), "l2"), (LayerNorm(), "layer"),
        (NoPosition(), "none"), (Rope(), "rope"), (ALiBi(), "alibi"), (ReRope(window=4), "rerope"),
        (LeakyReRope(window=4), "rerope"), (XPos(), "xpos"), (SlidingWindow(window=4), "window"),
        (NoCap(), "none"), (Softcap(50.0), "softcap"),
        (Softmax(), "softmax"), (Sink(), "sink"), (Sigmoid(bias=0.0), "sigmoid"), (Softpick(), "softpick"),
        (Fixed(1.0), "fixed"), (Learned(init=1.0), "learned"), (LogN(train_length=8), "log_n"),
    ],
)  # fmt: skip
def test_each_slot_says_its_kind_and_a_subclass_of_it_is_another(slot: Slot, kind: str) -> None:
    assert slot.kind == kind  # type: ignore[attr-defined]
    assert type("Mine", (type(slot),), {"__slots__": ()}).kind == "other"


def test_a_norm_of_another_kind_is_computed_by_torch_and_never_taken_for_rms() -> None:
    class Halved(RMSNorm):
        def normalise(self, x: Tensor) -> Tensor:
            return x / 2

    spec, (q, k, v) = AttentionSpec(norm=Halved(), position=Rope()), qkv()
    assert encode.fused(spec, q.float(), k.float(), torch.arange(6)[None], torch.arange(6)[None], {}) is None
    expected = reference.attend(AttentionSpec(position=Rope(), scale=Fixed(8**-0.5 / 4)), q, k, v).out
    torch.testing.assert_close(attention(q, k, v, spec=spec), expected)


def test_slots_say_what_they_are_without_one_part_of_them() -> None:
    plain, other = RMSNorm(gain="dim"), type("Mine", (NoNorm,), {"__slots__": (), "sides": "k"})()
    assert plain.without_keys() == RMSNorm(gain="dim", on="q")
    assert (RMSNorm(on="q").without_keys(), RMSNorm(on="k").without_keys()) == (RMSNorm(on="q"), NoNorm())
    assert NoNorm().without_keys() == NoNorm()
    for norm in (RMSNorm(on="qkv"), other):
        with pytest.raises(RefusedError, match="without its norm of the keys"):
            norm.without_keys()
    assert InverseSqrt(multiplier=3.0).with_multiplier(2.0) == InverseSqrt(multiplier=6.0)
    assert LogN(train_length=8).with_multiplier(2.0) == LogN(train_length=8, inner=InverseSqrt(multiplier=2.0))
    assert Fixed(3.0).with_multiplier(2.0) == Fixed(3.0)
    temperature = FloorLogTemperature(inner=LogN(train_length=8))
    assert [scale.last_position for scale in (Fixed(1.0), LogN(train_length=8), temperature)] == [0, 7, 7]


def test_shapes_of_parameters_are_those_of_the_tensors_and_make_none() -> None:
    for name in PRESETS:
        spec, heads = preset(name), (4, 4, 8)
        made = {n: tuple(p.shape) for n, p in spec.init_params(*heads).items()}
        with Nothing():
            assert spec.parameter_shapes(*heads) == made
    kerple = AttentionSpec(position=Kerple(), norm=LayerNorm(gain="head_dim", bias=True))
    assert kerple.parameter_shapes(4, 2, 8) == {
        "q_norm": (4, 8), "q_norm_bias": (4, 8), "k_norm": (2, 8), "k_norm_bias": (2, 8),
        "kerple_a": (4,), "kerple_p": (4,),
    }  # fmt: skip


def test_checking_a_position_makes_no_table() -> None:
    with Nothing():
        for position in (Rope(rotary=0.5), ReRope(window=4), XPos(), SlidingWindow(window=3)):
            position.check(8)
            with pytest.raises(ShapeError, match="even number"):
                position.check(9 if position != Rope(rotary=0.5) else 6)
