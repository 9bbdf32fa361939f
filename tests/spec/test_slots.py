"""Slots: neutral settings are the identity, bad ones are refused by name, values are immutable."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.each_row import each_row
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qkeel import attention, preset, reference
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    RefusedError,
    ShapeError,
    UnknownNameError,
)
from qkeel.functional import rope as f
from qkeel.functional.rope import rope_frequencies
from qkeel.kernels.norm_rope import encode
from qkeel.spec import (
    NTK,
    PI,
    PRESETS,
    ALiBi,
    AttentionSpec,
    DynamicNTK,
    Fixed,
    FloorLogTemperature,
    GradientMax,
    InverseSqrt,
    Kerple,
    L2Norm,
    LayerNorm,
    LeakyReRope,
    Learned,
    Llama3,
    LogN,
    NoCap,
    NoNorm,
    NoPosition,
    NoStretch,
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
    SquaredReLU,
    XPos,
    YaRN,
)
from qkeel.spec.norm import Norm
from qkeel.spec.position import rerope
from qkeel.spec.slot import ParameterSizes, Slot

LATE = Rope(order="rotate_then_norm")
GAINS = ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")


def qkv(
    h: int = 4, g: int = 2, t: int = 6, d: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(2, heads, t, d, dtype=torch.float64, generator=generator)
        for heads in (h, g, g)
    )


def attend(spec: AttentionSpec, **params: Tensor) -> Tensor:
    return reference.attend(spec, *qkv(), params=params).out


# A neutral hyperparameter is the identity.

NEUTRAL: dict[str, tuple[AttentionSpec, AttentionSpec]] = {
    "infinite cap": (AttentionSpec(cap=Softcap(math.inf)), AttentionSpec()),
    "multiplier 1": (AttentionSpec(scale=InverseSqrt(multiplier=1.0)), AttentionSpec()),
    "dim = head_dim": (AttentionSpec(scale=InverseSqrt(dim=8)), AttentionSpec()),
    "temperature alpha 0": (
        AttentionSpec(scale=FloorLogTemperature(alpha=0.0)),
        AttentionSpec(),
    ),
    "temperature under its floor": (
        AttentionSpec(scale=FloorLogTemperature(floor=100)),
        AttentionSpec(),
    ),
    "log n clipped inside the training length": (
        AttentionSpec(scale=LogN(train_length=6, clip=True)),
        AttentionSpec(),
    ),
    "a learned factor of log n at its start": (
        AttentionSpec(scale=LogN(train_length=6, learned="head")),
        AttentionSpec(scale=LogN(train_length=6)),
    ),
    "sink at minus infinity": (
        AttentionSpec(normalizer=Sink(learned=False, init=-math.inf)),
        AttentionSpec(),
    ),
    "the whole head rotated": (
        AttentionSpec(position=Rope(rotary=1.0)),
        AttentionSpec(position=Rope()),
    ),
    "learned scale at its start": (
        AttentionSpec(scale=Learned(init=2.0)),
        AttentionSpec(scale=Fixed(2.0)),
    ),
    "logarithm of a learned scale at its start": (
        AttentionSpec(scale=Learned(init=2.0, log=True, per="head")),
        AttentionSpec(scale=Fixed(2.0)),
    ),
}


@each_row("neutral, plain", NEUTRAL.values(), ids=list(NEUTRAL))
def test_a_neutral_hyperparameter_is_the_identity(
    neutral: AttentionSpec, plain: AttentionSpec
) -> None:
    params = {name: p.double() for name, p in neutral.init_params(4, 2, 8).items()}
    torch.testing.assert_close(
        attend(neutral, **params), attend(plain), rtol=0, atol=1e-7
    )
    if not params:
        torch.testing.assert_close(attend(neutral), attend(plain), rtol=0, atol=1e-14)


# What a slot does, where no preset shows it.


@pytest.mark.parametrize("on", ["q", "k", "qk", "qkv"])
def test_a_norm_touches_the_named_parts_and_no_other(on: Any) -> None:
    norm = L2Norm(on=on)
    for part, x in zip("qkv", qkv()):
        y = norm.apply(part, x, {})  # type: ignore[arg-type]
        assert (y is x) == (part not in on)
        if part in on:
            torch.testing.assert_close(
                y.norm(dim=-1), torch.ones(y.shape[:-1], dtype=y.dtype)
            )


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
    assert torch.equal(
        shared, reference.attend(both, *x, params={"q_norm": gain, "k_norm": gain}).out
    )


def test_values_may_have_a_gain_of_their_own_kind() -> None:
    norm = RMSNorm(on="qkv", gain="dim", value_gain="none")
    assert sorted(AttentionSpec(norm=norm).init_params(4, 2, 8)) == ["k_norm", "q_norm"]
    norm = RMSNorm(on="qkv", value_gain="head")
    assert {
        name: tuple(p.shape)
        for name, p in AttentionSpec(norm=norm).init_params(4, 2, 8).items()
    } == {"v_norm": (2, 1)}


def test_a_learned_scale_per_head_scales_its_head() -> None:
    spec, scales = (
        AttentionSpec(scale=Learned(init=1.0, per="head")),
        torch.tensor([1.0, 2.0, 0.5, 0.0]).double(),
    )
    found = reference.attend(
        spec, *qkv(), params={"logit_scale": scales.view(4, 1, 1)}, causal=False
    ).logits
    plain = reference.attend(
        AttentionSpec(scale=Fixed(1.0)), *qkv(), causal=False
    ).logits
    torch.testing.assert_close(found, plain * scales.view(4, 1, 1), rtol=1e-12, atol=0)


def test_a_learned_sink_takes_its_share_per_head() -> None:
    sink = torch.tensor([-1e30, 0.0, 3.0, 1e30]).double().view(4, 1, 1)
    found = reference.attend(
        AttentionSpec(normalizer=Sink()), *qkv(), params={"sink": sink}
    )
    share = torch.sigmoid(sink[..., 0] - found.logits.logsumexp(-1))
    torch.testing.assert_close(found.weights.sum(-1), 1 - share, rtol=0, atol=1e-14)
    assert share[0, 0].max() == 0
    assert share[0, 3].min() == 1


def test_sigmoid_attention_at_its_published_bias_starts_with_a_row_sum_near_one() -> (
    None
):
    n = 256
    generator = torch.Generator().manual_seed(0)
    q, k = (0.1 * torch.randn(1, 2, n, 16, generator=generator) for _ in range(2))
    spec = AttentionSpec(normalizer=Sigmoid(bias=-math.log(n)))
    total = reference.attend(spec, q, k, k, causal=False).weights.sum(-1)
    assert total.mean().item() == pytest.approx(1.0, rel=0.05)


def test_rotating_after_a_gain_per_head_dim_is_not_rotating_before() -> None:
    params = {
        "q_norm": torch.rand(8).double() + 0.5,
        "k_norm": torch.rand(8).double() + 0.5,
    }
    norm = RMSNorm(gain="dim")
    outs = [
        attend(AttentionSpec(norm=norm, position=Rope(order=order)), **params)
        for order in ("norm_then_rotate", "rotate_then_norm")
    ]
    assert (outs[0] - outs[1]).abs().max() > 1e-3


# Bad input: which error.

BAD: dict[type[QkeelError], list[Callable[[], Any]]] = {
    UnknownNameError: [
        lambda: L2Norm(on="kq"),  # type: ignore[arg-type]
        lambda: RMSNorm(over="heads"),  # type: ignore[arg-type]
        lambda: RMSNorm(gain="dims"),  # type: ignore[arg-type]
        lambda: RMSNorm(value_gain=["heads"]),  # type: ignore[arg-type]
        lambda: Rope(pairing="interleave"),  # type: ignore[arg-type]
        lambda: Rope(order="norm_rotate"),  # type: ignore[arg-type]
        lambda: Learned(init=1.0, per="heads"),  # type: ignore[arg-type]
        lambda: LogN(train_length=8, learned="row"),  # type: ignore[arg-type]
        lambda: NTK(factor=2, kind="new"),  # type: ignore[arg-type]
        lambda: Kerple(kind="cubic"),  # type: ignore[arg-type]
        lambda: AttentionSpec().replace(norms=NoNorm()),
    ],
    InvalidTypeError: [
        lambda: LogN(inner=2.0, train_length=8),  # type: ignore[arg-type]
        lambda: FloorLogTemperature(inner=None),  # type: ignore[arg-type]
        lambda: Rope(stretch=8),  # type: ignore[arg-type]
        lambda: SlidingWindow(window=2, inner="rope"),  # type: ignore[arg-type]
        lambda: AttentionSpec(norm="rms"),  # type: ignore[arg-type]
        lambda: AttentionSpec(cap=Softcap),  # type: ignore[arg-type]
        lambda: AttentionSpec(scale=NoNorm()),  # type: ignore[arg-type]
    ],
    RefusedError: [
        lambda: RMSNorm(over="nope"),  # type: ignore[arg-type]
        lambda: SlidingWindow(window=2, inner=SlidingWindow(window=3)),
    ],
    ShapeError: [lambda: Rope().check(7), lambda: Rope(rotary=0.25).check(12)],
    InvalidValueError: [
        *(lambda eps=eps: RMSNorm(eps=eps) for eps in (-1e-6, math.nan)),
        *(
            lambda gain=gain: LayerNorm(bias=True, gain=gain)
            for gain in ("none", "scalar")
        ),
        lambda: LayerNorm(on="qkv", gain="dim", value_gain="none", bias=True),
        *(lambda cap=cap: Softcap(cap) for cap in (0.0, math.nan)),
        *(lambda kind=kind: kind(base=1.0) for kind in (Rope, XPos)),
        *(lambda share=share: Rope(rotary=share) for share in (0.0, 2.0)),
        *(lambda share=share: ReRope(window=3, rotary=share) for share in (0.0, 1.5)),
        lambda: ReRope(window=3, base=1.0),
        *(lambda kind=kind: kind(window=0) for kind in (ReRope, SlidingWindow)),
        *(
            lambda factor=factor: LeakyReRope(window=2, factor=factor)
            for factor in (0.0, math.inf)
        ),
        lambda: XPos(scale=0.0),
        lambda: PI(factor=0.5),
        lambda: NTK(factor=math.inf),
        lambda: NTK(factor=8, power=-1.0),
        lambda: DynamicNTK(train_length=1),
        lambda: YaRN(factor=8, train_length=1),
        *(
            lambda slow=slow: YaRN(factor=8, train_length=64, slow=slow)
            for slow in (0.0, 32.0)
        ),
        lambda: YaRN(factor=8, train_length=64, attention_factor=0.0),
        *(
            lambda low=low: Llama3(factor=8, train_length=64, low=low)
            for low in (0.0, 4.0)
        ),
        lambda: Fixed(math.nan),
        *(lambda dim=dim: InverseSqrt(dim=dim) for dim in (0, -4)),
        lambda: InverseSqrt(multiplier=math.inf),
        lambda: Learned(init=-1.0),
        lambda: Learned(init=1.0, maximum=9.0),
        lambda: Learned(init=1.0, log=True, maximum=0.0),
        lambda: LogN(train_length=1),
        lambda: LogN(train_length=8, learned="head", clip=True),
        lambda: FloorLogTemperature(floor=0),
        lambda: FloorLogTemperature(alpha=math.inf),
        lambda: Sigmoid(bias=math.nan),
        lambda: Softpick(eps=0.0),
        lambda: Sink(init=math.nan),
        lambda: L2Norm(gain="head_dim", shared=True).parameters(
            ParameterSizes(n_heads=4, n_kv_heads=2, head_dim=8)
        ),
    ],
}


@each_row("kind", BAD)
def test_a_bad_setting_is_refused(kind: type[QkeelError]) -> None:
    for make in BAD[kind]:
        with pytest.raises(kind):
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
    AttentionSpec(
        norm=RMSNorm(gain="dim"),
        position=Rope(base=500.0),
        scale=Sqrt(),
        cap=Softcap(3.0),
    ),
    AttentionSpec(
        scale=LogN(inner=Learned(init=2.0), train_length=8), normalizer=Sink()
    ),
]


@each_row("spec", VALUES, ids=range(len(VALUES)))
def test_a_spec_and_its_slots_are_immutable(spec: AttentionSpec) -> None:
    for value in (
        spec,
        spec.norm,
        spec.position,
        spec.scale,
        spec.cap,
        spec.normalizer,
    ):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
        # Neither frozen-instance nor slots let a new name in.
        with pytest.raises((AttributeError, TypeError)):
            value.other = 1  # type: ignore[union-attr]


@each_row("spec", VALUES, ids=range(len(VALUES)))
def test_a_copy_of_a_spec_equals_it_and_hashes_alike(spec: AttentionSpec) -> None:
    for twin in (
        copy.deepcopy(spec),
        pickle.loads(pickle.dumps(spec)),
        dataclasses.replace(spec),
        spec.replace(),
    ):
        assert twin == spec
        assert hash(twin) == hash(spec)
        assert twin.explain() == spec.explain()
    assert len(set(VALUES)) == len(VALUES)


def test_replace_changes_the_named_slot_alone() -> None:
    spec = VALUES[1].replace(cap=Softcap(7.0), normalizer=Softmax())
    assert spec == AttentionSpec(
        norm=RMSNorm(gain="dim"),
        position=Rope(base=500.0),
        scale=Sqrt(),
        cap=Softcap(7.0),
    )
    assert VALUES[1].cap == Softcap(3.0)


def test_the_empty_spec_is_scaled_dot_product_attention() -> None:
    q, k, v = qkv(4, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(
        reference.attend(AttentionSpec(), q, k, v).out, expected, rtol=0, atol=1e-14
    )
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
def test_each_slot_says_its_kind_and_a_subclass_of_it_is_another(
    slot: Slot, kind: str
) -> None:
    assert slot.kind == kind  # type: ignore[attr-defined]
    assert type("Mine", (type(slot),), {"__slots__": ()}).kind == "other"


def test_a_norm_of_another_kind_is_computed_by_torch_and_never_taken_for_rms() -> None:
    class Halved(RMSNorm):
        def normalise(self, x: Tensor) -> Tensor:
            return x / 2

    spec, (q, k, v) = AttentionSpec(norm=Halved(), position=Rope()), qkv()
    assert (
        encode.fused(
            spec, q.float(), k.float(), torch.arange(6)[None], torch.arange(6)[None], {}
        )
        is None
    )
    expected = reference.attend(
        AttentionSpec(position=Rope(), scale=Fixed(8**-0.5 / 4)), q, k, v
    ).out
    torch.testing.assert_close(attention(q, k, v, spec=spec), expected)


def test_slots_say_what_they_are_without_one_part_of_them() -> None:
    plain, other = (
        RMSNorm(gain="dim"),
        type("Mine", (NoNorm,), {"__slots__": (), "sides": "k"})(),
    )
    assert plain.without_keys() == RMSNorm(gain="dim", on="q")
    assert (RMSNorm(on="q").without_keys(), RMSNorm(on="k").without_keys()) == (
        RMSNorm(on="q"),
        NoNorm(),
    )
    assert NoNorm().without_keys() == NoNorm()
    for norm in (RMSNorm(on="qkv"), other):
        with pytest.raises(RefusedError, match="no form without the norm of the keys"):
            norm.without_keys()
    assert (Softcap(math.inf).limit, Softcap(3.0).limit) == (None, 3.0)
    assert InverseSqrt(multiplier=3.0).with_multiplier(2.0) == InverseSqrt(
        multiplier=6.0
    )
    assert LogN(train_length=8).with_multiplier(2.0) == LogN(
        train_length=8, inner=InverseSqrt(multiplier=2.0)
    )
    assert Fixed(3.0).with_multiplier(2.0) == Fixed(3.0)
    temperature = FloorLogTemperature(inner=LogN(train_length=8))
    assert [
        scale.last_position for scale in (Fixed(1.0), LogN(train_length=8), temperature)
    ] == [0, 7, 7]


def test_shapes_of_parameters_are_those_of_the_tensors_and_make_none() -> None:
    for name in PRESETS:
        spec, heads = preset(name), (4, 4, 8)
        made = {n: tuple(p.shape) for n, p in spec.init_params(*heads).items()}
        with Nothing():
            assert spec.parameter_shapes(*heads) == made
    kerple = AttentionSpec(
        position=Kerple(), norm=LayerNorm(gain="head_dim", bias=True)
    )
    assert kerple.parameter_shapes(4, 2, 8) == {
        "q_norm": (4, 8), "q_norm_bias": (4, 8), "k_norm": (2, 8), "k_norm_bias": (2, 8),
        "kerple_a": (4,), "kerple_p": (4,),
    }  # fmt: skip


def test_checking_a_position_makes_no_table() -> None:
    with Nothing():
        for position in (
            Rope(rotary=0.5),
            ReRope(window=4),
            LeakyReRope(window=2),
            XPos(),
            SlidingWindow(window=3),
        ):
            position.check(8)
            with pytest.raises(ShapeError, match="even number"):
                position.check(9 if position != Rope(rotary=0.5) else 6)


def test_the_formula_that_a_slot_prints() -> None:
    for slot, formula in {
        RMSNorm(
            gain="dim", over="layer"
        ): "q̃ = RMS(q) · w, k̃ = RMS(k) · w over all heads of a token",
        LayerNorm(on="q", gain="head_dim", bias=True): "q̃ = LN(q) · w_h + b, k̃ = k",
        L2Norm(on="k", gain="scalar"): "q̃ = q, k̃ = L2(k) · g",
        RMSNorm(on="qkv", gain="one_plus_dim", value_gain="head"): (
            "q̃ = RMS(q) · (1 + w), k̃ = RMS(k) · (1 + w), ṽ = RMS(v) · g_h"
        ),
        NoCap(): "z",
        Softcap(30.0): "30·tanh(z/30)",
        Sink(): "exp(z)/(exp(s_h) + Σ exp(z))",
        Sink(learned=False, init=0.5): "exp(z)/(exp(0.5) + Σ exp(z))",
        Sigmoid(bias=-2.0): "σ(z -2)",
        Sigmoid(bias=2.0, learned=True): "σ(z +2) (bias learned)",
        SquaredReLU(): "relu(z)²/n",
        Softpick(): "relu(e^z - 1)/(Σ|e^z - 1| + ε)",
        InverseSqrt(): "1/√d",
        InverseSqrt(dim=256, multiplier=1.44): "1.44/√256",
        GradientMax(keys=64): "λ(d) of most gradient for 64 keys",
        Learned(init=2.0): "g (learned, starts at 2)",
        Learned(init=2.0, per="head", log=True): "exp(g_h) (learned, starts at 2)",
        Learned(
            init=10.0, log=True, maximum=100.0
        ): "exp(g) (learned, starts at 10, at most 100)",
        LogN(train_length=8): "1/√d · ln n/ln 8",
        LogN(train_length=8, clip=True): "1/√d · max(1, ln n/ln 8)",
        LogN(
            train_length=8, learned="layer"
        ): "1/√d · s · ln n (learned, starts at 1/ln 8)",
        LogN(
            train_length=8, learned="head"
        ): "1/√d · s_h · ln n (learned, starts at 1/ln 8)",
        FloorLogTemperature(): "1/√d · (1 + 0.1 ln(1 + ⌊n/8192⌋))",
        Rope(
            rotary=0.5, pairing="half_reversed"
        ): "RoPE(base 10000, first 0.5 of each head, half reversed pairs)",
        Rope(
            order="rotate_then_norm", stretch=PI(factor=8)
        ): "RoPE(base 10000, PI ×8) before the norm",
        Rope(stretch=NTK(factor=8)): "RoPE(base 10000, NTK old ×8)",
        Rope(
            stretch=NTK(factor=8, kind="mixed")
        ): "RoPE(base 10000, NTK mixed ×8, power 0.625)",
        Rope(
            stretch=DynamicNTK(train_length=64)
        ): "RoPE(base 10000, dynamic NTK from 64 tokens on, ×1)",
        Rope(stretch=YaRN(factor=8, train_length=64)): (
            "RoPE(base 10000, YaRN ×8 from 64 tokens, code ramp, cos and sin ×1.208)"
        ),
        Rope(
            stretch=Llama3(factor=8, train_length=64)
        ): "RoPE(base 10000, Llama 3 ×8 from 64 tokens)",
        Kerple(): "KERPLE (- p_h ln(1 + a_h|i - j|))",
        Kerple(kind="power"): "KERPLE (- a_h|i - j|^p_h)",
        ReRope(window=3): "ReRoPE(window 3, base 10000)",
        LeakyReRope(window=3): "Leaky ReRoPE(window 3, 1/16 beyond, base 10000)",
        LeakyReRope(
            window=3, rounded=True
        ): "Self-Extend(window 3, 1/16 beyond, base 10000)",
        XPos(): "xPos(base 10000, scale 512)",
        SlidingWindow(window=3): "RoPE(base 10000), |i - j| < 3",
    }.items():
        assert unicodedata.normalize("NFC", slot.formula()) == unicodedata.normalize(
            "NFC", formula
        ), slot


def test_what_lies_just_inside_of_what_a_slot_takes_is_taken() -> None:
    for make in (
        lambda: RMSNorm(eps=0.0),
        lambda: Sink(init=-math.inf),
        lambda: Softpick(eps=1e-30),
        lambda: Softcap(1e-3),
        lambda: InverseSqrt(dim=1),
        lambda: Learned(init=1e-3, log=True, maximum=1e-2),
        lambda: LogN(train_length=2),
        lambda: Rope(base=1.01, rotary=0.01),
        lambda: ReRope(window=1, base=1.01, rotary=0.01),
        lambda: LeakyReRope(window=1, factor=1e-3),
        lambda: SlidingWindow(window=1),
        lambda: XPos(base=1.01, scale=0.5),
        lambda: PI(factor=1.0),
        lambda: NTK(factor=1.0, kind="mixed", power=0.0),
        lambda: DynamicNTK(train_length=2),
        lambda: YaRN(
            factor=1.0, train_length=2, slow=0.1, fast=0.2, attention_factor=0.1
        ),
        lambda: Llama3(factor=1.0, train_length=2, low=0.1, high=0.2),
        lambda: GradientMax(keys=1.5),
        lambda: LayerNorm(gain="head_dim", bias=True),
        lambda: Rope(
            order="rotate_then_norm", stretch=YaRN(factor=1.0, train_length=8)
        ),
    ):
        make()


def test_learned_numbers_start_where_the_slot_says() -> None:
    spec = AttentionSpec(
        norm=LayerNorm(on="qkv", gain="head_dim", bias=True, value_gain="dim"),
        scale=LogN(inner=Learned(init=3.0, log=True), train_length=8, learned="layer"),
        normalizer=Sink(init=-1.5),
    )
    start = {
        name: (tuple(p.shape), set(p.flatten().tolist()))
        for name, p in spec.init_params(4, 2, 8).items()
    }
    assert start == {
        "q_norm": ((4, 8), {1.0}), "q_norm_bias": ((4, 8), {0.0}),
        "k_norm": ((2, 8), {1.0}), "k_norm_bias": ((2, 8), {0.0}),
        "v_norm": ((8,), {1.0}), "v_norm_bias": ((8,), {0.0}),
        "logit_scale": ((), {torch.tensor(math.log(3.0)).item()}),
        "log_n_scale": ((), {torch.tensor(1 / math.log(8)).item()}),
        "sink": ((4, 1, 1), {-1.5}),
    }  # fmt: skip
    assert (
        AttentionSpec(normalizer=Sigmoid(bias=-3.0, learned=True))
        .init_params(2)["logit_bias"]
        .tolist()
        == [[[-3.0]]] * 2
    )
    heads = AttentionSpec(norm=RMSNorm(gain="head_dim"))
    assert heads.parameter_shapes(4) == {"q_norm": (4, 64), "k_norm": (4, 64)}
    assert {
        n: tuple(p.shape) for n, p in heads.init_params(4).items()
    } == heads.parameter_shapes(4)
    own = RMSNorm(gain="dim", on="q").init_params(
        ParameterSizes(n_heads=2, n_kv_heads=1, head_dim=3)
    )
    assert {name: p.tolist() for name, p in own.items()} == {"q_norm": [1.0] * 3}


@each_row("gain", ["dim", "head_dim"])
def test_gains_and_biases_are_those_of_their_part_and_head(gain: Any) -> None:
    rng = torch.Generator().manual_seed(3)
    q, k, v = qkv()
    norm = LayerNorm(on="qkv", gain=gain, bias=True, eps=1e-5)
    params = {
        name: torch.randn(p.shape, generator=rng, dtype=torch.float64)
        for name, p in AttentionSpec(norm=norm).init_params(4, 2, 8).items()
    }
    for part, x in (("q", q), ("k", k), ("v", v)):
        found = norm.apply(part, x, params)  # type: ignore[arg-type]
        for h in range(x.shape[1]):
            w, b = (
                p if p.ndim == 1 else p[h]
                for p in (params[f"{part}_norm"], params[f"{part}_norm_bias"])
            )
            centred = x[:, h] - x[:, h].mean(-1, keepdim=True)
            expected = (
                centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
                + b
            )
            torch.testing.assert_close(found[:, h], expected, rtol=1e-12, atol=1e-12)


def test_what_a_norm_multiplies_by_and_with_which_eps() -> None:
    x = qkv()[0]
    for norm in (RMSNorm(eps=0.5), L2Norm(eps=3.0)):
        torch.testing.assert_close(
            x * norm.inverse(x), norm.normalise(x), rtol=1e-12, atol=0
        )
        assert norm.with_eps(0.25) == type(norm)(eps=0.25)
    with pytest.raises(
        RefusedError,
        match="LayerNorm does not define the factor by which it multiplies a vector",
    ):
        LayerNorm().inverse(x)
    assert (RMSNorm().eps, L2Norm().eps, LayerNorm().eps, Softpick().eps) == (
        1e-6,
        1e-12,
        1e-5,
        1e-8,
    )
    mine = type("Mine", (NoNorm,), {"__slots__": (), "sides": Norm.sides})()
    assert (mine.sides, mine.with_eps(1.0) is mine, mine.weight("q", {})) == (
        "qkv",
        True,
        None,
    )
    assert RMSNorm(on="q", gain="dim").weight("k", {}) is None
    assert RMSNorm().weight("q", {}) is None


def test_which_scales_are_one_number_and_what_is_left_without_factors_of_the_position() -> (
    None
):
    for scale, constant, moves in (
        (InverseSqrt(), 0.25, False),
        (InverseSqrt(dim=64, multiplier=2.0), 0.25, False),
        (Sqrt(), 4.0, False),
        (Fixed(3), 3.0, False),
        (
            GradientMax(keys=256),
            GradientMax(keys=256).factor(torch.zeros(1, 1), 16, {}),
            False,
        ),
        (Learned(init=2.0), None, False),
        (LogN(train_length=8), None, True),
        (LogN(train_length=8, inner=Learned(init=2.0)), None, True),
        (FloorLogTemperature(), None, True),
    ):
        assert (scale.constant(16), scale.follows_position) == (constant, moves), scale
    both = LogN(
        train_length=8, clip=True, inner=FloorLogTemperature(inner=Fixed(2.0), floor=4)
    )
    assert both.base == Fixed(2.0)
    assert both.with_base(Sqrt()) == LogN(
        train_length=8, clip=True, inner=FloorLogTemperature(inner=Sqrt(), floor=4)
    )
    assert (Sqrt().base, Sqrt().with_base(Fixed(2.0)), Sqrt().last_position) == (
        Sqrt(),
        Fixed(2.0),
        0,
    )
    at = torch.tensor([[0, 3, 7]])
    n = torch.tensor([1.0, 4.0, 8.0], dtype=torch.float64)
    expected = (
        2
        * (n.log() / math.log(8)).clamp_min(1)
        * (1 + 0.1 * (1 + torch.tensor([0.0, 1.0, 2.0]).double()).log())
    )
    torch.testing.assert_close(
        both.factor(at, 16, {})[0, 0, :, 0], expected, rtol=1e-12, atol=0
    )  # type: ignore[index]
    assert LogN(train_length=8).factor(at, 16, {}).dtype == torch.float64
    half = LogN(train_length=8, inner=Learned(init=2.0)).factor(
        at, 16, {"logit_scale": torch.tensor(2.0).half()}
    )
    assert half.dtype == torch.float32


def test_a_spec_of_encoded_keys_is_without_norm_and_rotation_and_keeps_its_window_and_other_parameters() -> (
    None
):
    spec = AttentionSpec(
        norm=RMSNorm(gain="dim"),
        position=SlidingWindow(window=3),
        scale=Learned(init=2.0),
        normalizer=Sink(),
    )
    params = spec.init_params(4, 2, 8)
    core, left = spec.core(params)
    assert core == spec.replace(
        norm=NoNorm(), position=SlidingWindow(window=3, inner=NoPosition())
    )
    assert set(left) == {"logit_scale", "sink"}
    assert AttentionSpec(position=Rope()).core({})[0].position == NoPosition()
    for position in (
        ALiBi(),
        Kerple(),
        ReRope(window=2),
        Rope(stretch=DynamicNTK(train_length=8)),
    ):
        assert not position.keeps
        assert not SlidingWindow(window=2, inner=position).keeps
        with pytest.raises(RefusedError, match="needs raw keys"):
            AttentionSpec(position=position).core({})
    for position in (Rope(), XPos(), NoPosition(), SlidingWindow(window=2)):
        assert position.keeps
    assert [SlidingWindow(window=2, inner=p).folds for p in (Rope(), ALiBi())] == [
        True,
        False,
    ]
    assert SlidingWindow(window=2).unwindowed == Rope()
    assert SlidingWindow(window=2, inner=LATE).order == "rotate_then_norm"
    assert (Rope().rope, XPos().rope, SlidingWindow(window=2).rope) == (
        Rope(),
        None,
        None,
    )
    assert (rerope(ReRope(window=2)), rerope(Rope())) == (ReRope(window=2), None)


def test_slower_frequencies_are_those_of_the_formulas_with_the_settings_of_the_slot() -> (
    None
):
    theta, at = rope_frequencies(16, 100.0), torch.arange(40)[None]
    for stretch, expected in (
        (NoStretch(), theta),
        (PI(factor=4.0), theta / 4),
        (NTK(factor=4.0), f.ntk(theta, 4.0)),
        (NTK(factor=4.0, kind="exact"), f.ntk(theta, 4.0, exact=True)),
        (NTK(factor=4.0, kind="fixed"), f.ntk_mixed(theta, 4.0, 1.0)),
        (NTK(factor=4.0, kind="mixed"), f.ntk_mixed(theta, 4.0, 0.625)),
        (DynamicNTK(train_length=8), f.ntk(theta, 5.0, exact=True)),
        (DynamicNTK(train_length=8, factor=3.0), f.ntk(theta, 13.0, exact=True)),
        (DynamicNTK(train_length=80, factor=3.0), theta),
        (
            YaRN(factor=4.0, train_length=64),
            f.yarn(theta, 4.0, 64, base=100.0, fast=32.0, slow=1.0, ramp="code"),
        ),
        (
            YaRN(factor=4.0, train_length=64, fast=6.0, slow=2.0, ramp="paper"),
            f.yarn(theta, 4.0, 64, base=100.0, fast=6.0, slow=2.0, ramp="paper"),
        ),
        (Llama3(factor=4.0, train_length=64), f.llama3(theta, 4.0, 64, 1.0, 4.0)),
        (
            Llama3(factor=4.0, train_length=64, low=2.0, high=9.0),
            f.llama3(theta, 4.0, 64, 2.0, 9.0),
        ),
    ):
        torch.testing.assert_close(
            stretch.frequencies(theta, 100.0, at), expected, rtol=1e-12, atol=0
        )
        assert stretch.follows_length == isinstance(stretch, DynamicNTK)
        assert stretch.changes != isinstance(stretch, NoStretch)
    nothing = DynamicNTK(train_length=8, factor=3.0).frequencies(
        theta, 100.0, at[:, :0]
    )
    torch.testing.assert_close(nothing, theta, rtol=1e-12, atol=0)
    own = YaRN(factor=4.0, train_length=64, attention_factor=0.9)
    assert (own.magnitude, YaRN(factor=4.0, train_length=64).magnitude) == (
        0.9,
        pytest.approx(1.138629, abs=1e-6),
    )
    turned = Rope(stretch=own).encode(
        *[torch.ones(1, 1, 1, 4)] * 2, torch.zeros(1, 1), torch.zeros(1, 1)
    )
    assert [x.flatten().tolist() for x in turned] == [pytest.approx([0.9] * 4)] * 2


def test_the_tables_of_queries_and_of_keys_have_their_dtype_or_float32_and_their_positions() -> (
    None
):
    at, k_at = torch.arange(2, 5)[None], torch.arange(5)[None]
    q, k = (
        torch.zeros(1, 4, 3, 8, dtype=torch.bfloat16),
        torch.zeros(1, 2, 5, 8, dtype=torch.float64),
    )
    for first, second, positions in ((q, k, (at, k_at)), (k, q, (k_at, at))):
        tables = Rope().tables(first, second, *positions)
        for x, own, pos in zip((first, second), tables, positions):
            for found, of in zip(own, (math.cos, math.sin)):
                assert found.dtype == torch.promote_types(x.dtype, torch.float32)
                expected = [
                    [of(p * 10_000 ** (-i / 4)) for i in range(4)]
                    for p in pos[0].tolist()
                ]
                torch.testing.assert_close(
                    found[0, 0].double(),
                    torch.tensor(expected).double(),
                    rtol=0,
                    atol=1e-6,
                )


def test_kerple_starts_evenly_spread_a_rising_and_p_falling() -> None:
    params = AttentionSpec(position=Kerple()).init_params(
        n_heads=4, n_kv_heads=2, head_dim=8
    )
    torch.testing.assert_close(
        params["kerple_a"], torch.tensor([0.125, 0.375, 0.625, 0.875])
    )
    torch.testing.assert_close(
        params["kerple_p"], torch.tensor([1.75, 1.25, 0.75, 0.25])
    )


def test_a_temperature_may_grow_from_the_first_position_on() -> None:
    factor = FloorLogTemperature(floor=1, alpha=1.0).factor(
        torch.arange(3)[None], 4, {}
    )
    expected = 0.5 * (1 + torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64).log())
    torch.testing.assert_close(factor.flatten(), expected)
