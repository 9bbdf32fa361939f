"""Slots: what they take, refuse, compute, print and start with; neutral settings are the identity."""

import dataclasses
import inspect
import itertools
import math
import unicodedata
from typing import get_args, get_type_hints

import pytest
import torch
from tests.each_row import each_row
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from qkeel import attention, preset, reference
from qkeel import spec as slots
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    ShapeError,
    UnknownNameError,
)
from qkeel.functional import rope as f
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
    Softpick,
    Sqrt,
    XPos,
    YaRN,
)
from qkeel.spec.norm import Norm
from qkeel.spec.position import rerope
from qkeel.spec.slot import ParameterSizes

NAN, INF = math.nan, math.inf
LATE = Rope(order="rotate_then_norm")
SIZES = ParameterSizes(n_heads=4, n_kv_heads=2, head_dim=8)


def qkv(h=4, g=2):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, 6, 8, dtype=torch.float64, generator=generator)
        for heads in (h, g, g)
    )


def attend(spec, **params):
    return reference.attend(spec, *qkv(), params=params).out


def exactly(a, b):
    assert_close(a, b, rtol=1e-12, atol=1e-12)


# What a slot takes: of each option, what else the slot needs, values just inside of its range, and values outside.

YARN = {"factor": 8, "train_length": 64}
BOUNDS = [
    (RMSNorm, {}, "eps", (0.0,), (-1e-6,)),
    (LayerNorm, {"bias": True}, "gain", ("dim", "head_dim"), ()),
    (Rope, {}, "base", (1.01,), (1.0,)),
    (Rope, {}, "rotary", (0.01, 1.0), (0.0, 1.5)),
    (ReRope, {}, "window", (1,), (0,)),
    (ReRope, {"window": 3}, "base", (1.01,), (1.0,)),
    (ReRope, {"window": 3}, "rotary", (0.01, 1.0), (0.0, 1.5)),
    (LeakyReRope, {"window": 1}, "factor", (1e-3,), (0.0, INF)),
    (SlidingWindow, {}, "window", (1,), (0,)),
    (XPos, {}, "base", (1.01,), (1.0,)),
    (XPos, {}, "scale", (0.5,), (0.0,)),
    (PI, {}, "factor", (1.0,), (0.5, INF)),
    (NTK, {}, "factor", (1.0,), (0.5, INF)),
    (NTK, {"factor": 8}, "power", (0.0,), (-1.0,)),
    (DynamicNTK, {}, "train_length", (2,), (1,)),
    (YaRN, {"factor": 1.0}, "train_length", (2,), (1,)),
    (YaRN, YARN, "slow", (0.1, 31.0), (0.0, 32.0)),
    (YaRN, YARN, "attention_factor", (0.1,), (0.0,)),
    (Llama3, {"factor": 1.0}, "train_length", (2,), (1,)),
    (Llama3, YARN, "low", (0.1, 3.9), (0.0, 4.0)),
    (InverseSqrt, {}, "dim", (1,), (0, -4)),
    (InverseSqrt, {}, "multiplier", (-1.0,), (INF,)),
    (GradientMax, {}, "keys", (1.5,), (1.0,)),
    (Learned, {}, "init", (1e-3,), (0.0, -1.0)),
    (Learned, {"init": 1.0}, "maximum", (None,), (9.0,)),
    (Learned, {"init": 1.0, "log": True}, "maximum", (1e-2,), (0.0,)),
    (LogN, {}, "train_length", (2,), (1,)),
    (FloorLogTemperature, {}, "floor", (1,), (0,)),
    (FloorLogTemperature, {}, "alpha", (0.0,), (INF,)),
    (Softcap, {}, "cap", (1e-3, INF), (0.0,)),
    (Softpick, {}, "eps", (1e-30,), (0.0,)),
    (Sink, {}, "init", (-INF,), (INF,)),
]  # fmt: skip
REFUSED = [
    (InvalidValueError, LayerNorm, {"bias": True, "gain": "none"}),
    (InvalidValueError, LayerNorm, {"bias": True, "gain": "scalar"}),
    (InvalidValueError, LayerNorm,
     {"bias": True, "gain": "dim", "on": "qkv", "value_gain": "none"}),
    (InvalidValueError, LogN, {"train_length": 8, "learned": "head", "clip": True}),
    (InvalidValueError, Rope, {"order": "rotate_then_norm", "stretch": YaRN(**YARN)}),
    (InvalidTypeError, LogN, {"inner": 2.0, "train_length": 8}),
    (InvalidTypeError, Rope, {"stretch": 8}),
    (InvalidTypeError, SlidingWindow, {"window": 2, "inner": "rope"}),
    *((InvalidTypeError, AttentionSpec, {slot: value}) for slot, value in
      {"norm": "rms", "position": Rope, "scale": NoNorm(), "cap": Softcap, "normalizer": None}.items()),
    (RefusedError, SlidingWindow, {"window": 2, "inner": SlidingWindow(window=3)}),
]  # fmt: skip


# What an option is given where its slot does not do without.
NEEDED = {"factor": 8, "train_length": 64, "window": 3, "init": 1.0, "keys": 8.0}
NEEDED |= {"bias": 0.0, "value": 1.0, "cap": 5.0}
SLOTS = [
    slot
    for name in slots.__all__
    if dataclasses.is_dataclass(slot := getattr(slots, name))
    and not name.startswith("Attention")
]


@each_row("slot, needed, option, inside, outside", BOUNDS)
def test_an_option_has_a_range(slot, needed, option, inside, outside):
    for value in inside:
        assert getattr(slot(**{**needed, option: value}), option) == value
    for value in outside:
        with pytest.raises(InvalidValueError):
            slot(**{**needed, option: value})


@each_row("slot", SLOTS)
def test_an_option_by_name_is_one_of_a_list_and_numbers_are_finite(slot):
    parameters = inspect.signature(slot).parameters.values()
    needed = {p.name: NEEDED[p.name] for p in parameters if p.default is p.empty}
    for option, hint in get_type_hints(slot.__init__).items():
        choices = [hint, *get_args(hint)]
        names = [x for some in choices for x in get_args(some) if isinstance(x, str)]
        for name in names:
            assert getattr(slot(**{**needed, option: name}), option) == name
        if names:
            with pytest.raises((UnknownNameError, RefusedError)):
                slot(**{**needed, option: "nope"})
        if hint is int:
            with pytest.raises(InvalidValueError):
                slot(**{**needed, option: NAN})
        if hint is float:
            takes = [row[3] for row in BOUNDS if (row[0], row[2]) == (slot, option)]
            for value in {NAN, INF, -INF} - {*itertools.chain(*takes)}:
                with pytest.raises(InvalidValueError):
                    slot(**{**needed, option: value})


@each_row("error, slot, options", REFUSED)
def test_options_that_do_not_go_together_are_refused(error, slot, options):
    with pytest.raises(error):
        slot(**options)


def test_a_shared_gain_needs_equal_heads_and_a_rotation_an_even_size():
    with pytest.raises(InvalidValueError):
        L2Norm(gain="head_dim", shared=True).parameters(SIZES)
    with pytest.raises(UnknownNameError):
        AttentionSpec().replace(norms=NoNorm())
    positions = (
        Rope(),
        ReRope(window=4),
        LeakyReRope(window=2),
        XPos(),
        SlidingWindow(window=3),
    )
    with NoTorch():  # a table would be built for nothing
        for position in positions:
            position.check(8)
            with pytest.raises(ShapeError):
                position.check(9)
        with pytest.raises(ShapeError):
            Rope(rotary=0.25).check(12)


class NoTorch(TorchFunctionMode):
    """Under it no torch function may be called."""

    def __torch_function__(self, func, *_):
        raise AssertionError(f"{func} was called")


# A neutral hyperparameter is the identity.

NEUTRAL = [
    ({"cap": Softcap(INF)}, {}),
    ({"scale": InverseSqrt(multiplier=1.0)}, {}),
    ({"scale": InverseSqrt(dim=8)}, {}),
    ({"scale": FloorLogTemperature(alpha=0.0)}, {}),
    ({"scale": FloorLogTemperature(floor=100)}, {}),
    ({"scale": LogN(train_length=6, clip=True)}, {}),
    (
        {"scale": LogN(train_length=6, learned="head")},
        {"scale": LogN(train_length=6)},
    ),
    ({"normalizer": Sink(learned=False, init=-INF)}, {}),
    ({"scale": Learned(init=2.0)}, {"scale": Fixed(2.0)}),
    ({"scale": Learned(init=2.0, log=True, per="head")}, {"scale": Fixed(2.0)}),
]


@each_row("neutral, plain", NEUTRAL)
def test_a_neutral_hyperparameter_is_the_identity(neutral, plain):
    spec = AttentionSpec(**neutral)
    params = {name: p.double() for name, p in spec.init_params(4, 2, 8).items()}
    assert_close(
        attend(spec, **params),
        attend(AttentionSpec(**plain)),
        rtol=0,
        atol=1e-7 if params else 1e-14,
    )


# Norms


def test_a_norm_of_another_kind_is_computed_by_torch_and_never_taken_for_rms():
    class Halved(RMSNorm):
        def normalise(self, x):
            return x / 2

    spec, (q, k, v), at = (
        AttentionSpec(norm=Halved(), position=Rope()),
        qkv(),
        torch.arange(6)[None],
    )
    assert encode.fused(spec, q.float(), k.float(), at, at, {}) is None
    halves = AttentionSpec(position=Rope(), scale=Fixed(8**-0.5 / 4))
    exactly(attention(q, k, v, spec=spec), reference.attend(halves, q, k, v).out)


def test_what_a_norm_multiplies_by_and_with_which_eps():
    x = qkv()[0]
    for norm in (RMSNorm(eps=0.5), L2Norm(eps=3.0)):
        exactly(x * norm.inverse(x), norm.normalise(x))
        assert norm.with_eps(0.25) == type(norm)(eps=0.25)
    with pytest.raises(RefusedError):
        LayerNorm().inverse(x)
    slots = (RMSNorm(), L2Norm(), LayerNorm(), Softpick())
    assert [slot.eps for slot in slots] == [1e-6, 1e-12, 1e-5, 1e-8]
    unknown = type("Mine", (NoNorm,), {"__slots__": (), "sides": Norm.sides})()
    assert (unknown.sides, unknown.with_eps(1.0) is unknown) == ("qkv", True)
    assert unknown.weight("q", {}) is None
    assert RMSNorm(on="q", gain="dim").weight("k", {}) is None
    assert RMSNorm().weight("q", {}) is None
    for whole, left in (
        (RMSNorm(gain="dim"), RMSNorm(gain="dim", on="q")),
        (RMSNorm(on="q"), RMSNorm(on="q")),
        (RMSNorm(on="k"), NoNorm()),
        (NoNorm(), NoNorm()),
    ):
        assert whole.without_keys() == left
    for norm in (RMSNorm(on="qkv"), unknown):
        with pytest.raises(RefusedError):
            norm.without_keys()


# Scales and normalizers


def test_which_scales_are_one_number_and_what_is_left_without_the_position():
    best = GradientMax(keys=256)
    for scale, constant, moves in (
        (InverseSqrt(), 0.25, False),
        (InverseSqrt(dim=64, multiplier=2.0), 0.25, False),
        (Sqrt(), 4.0, False),
        (Fixed(3), 3.0, False),
        (best, best.factor(torch.zeros(1, 1), 16, {}), False),
        (Learned(init=2.0), None, False),
        (LogN(train_length=8), None, True),
        (FloorLogTemperature(), None, True),
    ):
        assert (scale.constant(16), scale.follows_position) == (constant, moves), scale
    both, rooted = (
        LogN(train_length=8, clip=True, inner=FloorLogTemperature(inner=inner, floor=4))
        for inner in (Fixed(2.0), Sqrt())
    )
    assert (both.base, both.with_base(Sqrt())) == (Fixed(2.0), rooted)
    assert (Sqrt().base, Sqrt().with_base(Fixed(2.0))) == (Sqrt(), Fixed(2.0))


def test_factors_of_the_position_multiply_in_float32_or_wider():
    at, n = torch.tensor([[0, 3, 7]]), torch.tensor([1.0, 4.0, 8.0]).double()
    floors = FloorLogTemperature(inner=Fixed(2.0), floor=4)
    both = LogN(train_length=8, clip=True, inner=floors)
    ratio = (n.log() / math.log(8)).clamp_min(1)
    steps = torch.tensor([0.0, 1.0, 2.0]).double().log1p()
    exactly(both.factor(at, 16, {}).flatten(), 2 * ratio * (1 + 0.1 * steps))
    learned = LogN(train_length=8, inner=Learned(init=2.0))
    half = learned.factor(at, 16, {"logit_scale": torch.tensor(2.0).half()})
    assert half.dtype == torch.float32


# Values: immutable, comparable, hashable, copyable.


# Parameters


def test_learned_numbers_start_where_the_slot_says():
    norm = LayerNorm(on="qkv", gain="head_dim", bias=True, value_gain="dim")
    scale = LogN(inner=Learned(init=3.0, log=True), train_length=8, learned="layer")
    spec = AttentionSpec(norm=norm, scale=scale, normalizer=Sink(init=-1.5))
    sigmoid = AttentionSpec(normalizer=Sigmoid(bias=-3.0, learned=True))
    kerple, gemma4 = AttentionSpec(position=Kerple()), preset("gemma4")
    begins = {
        name: (tuple(p.shape), sorted(set(p.flatten().tolist())))
        for s in (spec, sigmoid, kerple)
        for name, p in s.init_params(4, 2, 8).items()
    }
    assert begins == {
        "q_norm": ((4, 8), [1.0]), "q_norm_bias": ((4, 8), [0.0]),
        "k_norm": ((2, 8), [1.0]), "k_norm_bias": ((2, 8), [0.0]),
        "v_norm": ((8,), [1.0]), "v_norm_bias": ((8,), [0.0]),
        "logit_scale": ((), [torch.tensor(math.log(3.0)).item()]),
        "log_n_scale": ((), [torch.tensor(1 / math.log(8)).item()]),
        "sink": ((4, 1, 1), [-1.5]), "logit_bias": ((4, 1, 1), [-3.0]),
        "kerple_a": ((4,), [0.125, 0.375, 0.625, 0.875]), "kerple_p": ((4,), [0.25, 0.75, 1.25, 1.75]),
    }  # fmt: skip
    assert kerple.init_params(4)["kerple_p"].tolist() == [1.75, 1.25, 0.75, 0.25]
    assert sorted(gemma4.init_params(4, 2, 8)) == ["k_norm", "q_norm"]


def test_the_numbers_of_slots_where_nothing_is_said_are_the_published_ones():
    rope = {"base": 1e4, "rotary": 1.0}
    numbers = {
        Rope: rope, ReRope: rope, LeakyReRope: {**rope, "factor": 16.0}, XPos: {"base": 1e4, "scale": 512.0},
        DynamicNTK: {"factor": 1.0}, NTK: {"power": 0.625}, Llama3: {"low": 1.0, "high": 4.0},
        YaRN: {"fast": 32.0, "slow": 1.0}, FloorLogTemperature: {"alpha": 0.1, "floor": 8192},
        L2Norm: {"eps": 1e-12}, LayerNorm: {"eps": 1e-5}, RMSNorm: {"eps": 1e-6},
        Sink: {"init": 0.0}, Softpick: {"eps": 1e-8},
    }  # fmt: skip
    assert numbers == {
        slot: {
            field.name: field.default
            for field in dataclasses.fields(slot)
            if type(field.default) in (int, float)
        }
        for slot in numbers
    }


def test_shapes_of_parameters_are_those_of_the_tensors_and_make_none():
    for name in PRESETS:
        spec = preset(name)
        shapes = {n: tuple(p.shape) for n, p in spec.init_params(4, 4, 8).items()}
        with NoTorch():
            assert spec.parameter_shapes(4, 4, 8) == shapes
    heads = AttentionSpec(norm=RMSNorm(gain="head_dim"))
    assert heads.parameter_shapes(4) == {"q_norm": (4, 64), "k_norm": (4, 64)}


def test_a_spec_of_encoded_keys_is_without_norm_and_rotation():
    spec = AttentionSpec(
        norm=RMSNorm(gain="dim"),
        position=SlidingWindow(window=3),
        scale=Learned(init=2.0),
        normalizer=Sink(),
    )
    core, left = spec.core(spec.init_params(4, 2, 8))
    unrotated = SlidingWindow(window=3, inner=NoPosition())
    assert core == spec.replace(norm=NoNorm(), position=unrotated)
    assert set(left) == {"logit_scale", "sink"}
    for position, keeps in (
        (Rope(), True),
        (XPos(), True),
        (NoPosition(), True),
        (ALiBi(), False),
        (Kerple(), False),
        (ReRope(window=2), False),
        (Rope(stretch=DynamicNTK(train_length=8)), False),
    ):
        windowed = SlidingWindow(window=2, inner=position)
        assert (position.keeps, windowed.keeps) == (keeps, keeps)
        assert (windowed.folds, windowed.unwindowed) == (position.folds, position)
        if keeps:
            assert AttentionSpec(position=position).core({})[0] == AttentionSpec()
        else:
            with pytest.raises(RefusedError):
                AttentionSpec(position=position).core({})
    assert SlidingWindow(window=2, inner=LATE).order == "rotate_then_norm"
    ropes = [position.rope for position in (Rope(), XPos(), SlidingWindow(window=2))]
    assert ropes == [Rope(), None, None]
    assert (rerope(ReRope(window=2)), rerope(Rope())) == (ReRope(window=2), None)
    assert (Softcap(INF).limit, Softcap(3.0).limit) == (None, 3.0)


# Rotations


def test_slower_frequencies_are_those_of_the_formulas():
    """With options besides those that the golden formulas have."""
    theta, at = f.rope_frequencies(16, 100.0), torch.arange(40)[None]
    yarn, two = {"factor": 4.0, "train_length": 64}, (theta, 4.0, 64)
    paper = {"fast": 6.0, "slow": 2.0, "ramp": "paper"}
    for stretch, expected in (
        (NTK(factor=4.0, kind="exact"), f.ntk(theta, 4.0, exact=True)),
        (DynamicNTK(train_length=8, factor=3.0), f.ntk(theta, 13.0, exact=True)),
        (DynamicNTK(train_length=80, factor=3.0), theta),
        (YaRN(**yarn, **paper), f.yarn(*two, base=100.0, **paper)),
        (Llama3(**yarn), f.llama3(*two, 1.0, 4.0)),
        (Llama3(**yarn, low=2.0, high=9.0), f.llama3(*two, 2.0, 9.0)),
        (NoStretch(), theta),
    ):
        exactly(stretch.frequencies(theta, 100.0, at), expected)
        assert stretch.follows_length == isinstance(stretch, DynamicNTK)
        assert stretch.changes != isinstance(stretch, NoStretch)
    dynamic = DynamicNTK(train_length=8, factor=3.0)
    exactly(dynamic.frequencies(theta, 100.0, at[:, :0]), theta)  # no key yet
    own, zero = YaRN(**yarn, attention_factor=0.9), torch.zeros(1, 1)
    ones = [torch.ones(1, 1, 1, 4)] * 2
    for x in Rope(stretch=own).encode(*ones, zero, zero):
        assert x.flatten().tolist() == pytest.approx([0.9] * 4)


FORMULAS = {
    RMSNorm(gain="dim", over="layer"): "q̃ = RMS(q) · w, k̃ = RMS(k) · w over all heads of a token",
    LayerNorm(on="q", gain="head_dim", bias=True): "q̃ = LN(q) · w_h + b, k̃ = k",
    L2Norm(on="k", gain="scalar"): "q̃ = q, k̃ = L2(k) · g",
    RMSNorm(on="qkv", gain="one_plus_dim", value_gain="head"):
        "q̃ = RMS(q) · (1 + w), k̃ = RMS(k) · (1 + w), ṽ = RMS(v) · g_h",
    Sink(learned=False, init=0.5): "exp(z)/(exp(0.5) + Σ exp(z))",
    Sigmoid(bias=2.0, learned=True): "σ(z +2) (bias learned)",
    InverseSqrt(dim=256, multiplier=1.44): "1.44/√256",
    Learned(init=2.0): "g (learned, starts at 2)",
    Learned(init=2.0, per="head", log=True): "exp(g_h) (learned, starts at 2)",
    Learned(init=10.0, log=True, maximum=100.0): "exp(g) (learned, starts at 10, at most 100)",
    LogN(train_length=8, clip=True): "1/√d · max(1, ln n/ln 8)",
    LogN(train_length=8, learned="layer"): "1/√d · s · ln n (learned, starts at 1/ln 8)",
    LogN(train_length=8, learned="head"): "1/√d · s_h · ln n (learned, starts at 1/ln 8)",
    Rope(rotary=0.5, pairing="half_reversed"): "RoPE(base 10000, first 0.5 of each head, half reversed pairs)",
    Rope(order="rotate_then_norm", stretch=PI(factor=8)): "RoPE(base 10000, PI ×8) before the norm",
    Rope(stretch=NTK(factor=8, kind="mixed")): "RoPE(base 10000, NTK mixed ×8, power 0.625)",
    Kerple(): "KERPLE (- p_h ln(1 + a_h|i - j|))",
    LeakyReRope(window=3, rounded=True): "Self-Extend(window 3, 1/16 beyond, base 10000)",
}  # fmt: skip


@each_row("slot, formula", FORMULAS.items())
def test_a_slot_prints_its_formula(slot, formula):
    printed, expected = (
        unicodedata.normalize("NFC", text) for text in (slot.formula(), formula)
    )
    assert printed == expected
