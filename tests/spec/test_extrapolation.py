"""A trained spec gets another position or scale by name, and says no where that makes no sense."""

from __future__ import annotations

import pytest
import torch

from qkeel import attention, preset
from qkeel.errors import InvalidValueError, RefusedError, UnknownNameError
from qkeel.spec import (
    METHODS,
    NTK,
    PI,
    ALiBi,
    AttentionSpec,
    DynamicNTK,
    LeakyReRope,
    LogN,
    NoStretch,
    ReRope,
    RMSNorm,
    Rope,
    SlidingWindow,
    YaRN,
)

SPEC = AttentionSpec(position=Rope(base=5e4, rotary=0.5))
OTHERS_OPTIONS = (  # methods, and options of other methods
    *(
        ("pi", "window"),
        ("abf", "power"),
        ("ntk", "power"),
        ("dynamic_ntk", "base"),
        ("rerope", "leak"),
    ),
    *(("yarn", "window"), ("window", "leak"), ("none", "leak"), ("rope", "leak")),
)


def test_every_method_gives_a_spec_that_attends_and_the_weights_stay() -> None:
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    trained = preset("kna", train_length=16)
    for method in METHODS:
        spec = trained.extrapolate(method, factor=8, train_length=16)
        assert spec.norm == trained.norm
        assert spec.init_params(2).keys() == trained.init_params(2).keys()
        assert attention(q, k, v, spec=spec).isfinite().all()
        assert (spec == trained) == (method in ("none", "rope"))


@pytest.mark.parametrize(
    ("method", "options", "stretch"),
    [
        ("pi", {}, PI(factor=8)),
        ("ntk", {}, NTK(factor=8)),
        ("ntk_fixed", {}, NTK(factor=8, kind="fixed")),
        ("ntk_mixed", {"power": 0.75}, NTK(factor=8, kind="mixed", power=0.75)),
        ("dynamic_ntk", {"train_length": 64}, DynamicNTK(train_length=64)),
        (
            "yarn",
            {"train_length": 64, "ramp": "paper"},
            YaRN(factor=8, train_length=64, ramp="paper"),
        ),
        ("none", {}, NoStretch()),
    ],
)
def test_a_stretch_keeps_the_rest_of_the_rotation(
    method: str, options: dict, stretch: object
) -> None:
    assert SPEC.extrapolate(method, factor=8, **options) == SPEC.replace(
        position=Rope(base=5e4, rotary=0.5, stretch=stretch)  # type: ignore[arg-type]
    )


def test_windows_default_to_half_of_the_training_length_and_leaks_to_twice_the_factor() -> (
    None
):
    far = SPEC.extrapolate("rerope", train_length=64).position
    assert far == ReRope(window=32, base=5e4, rotary=0.5)
    assert SPEC.extrapolate(
        "leaky_rerope", factor=8, train_length=64, window=16
    ).position == LeakyReRope(window=16, base=5e4, rotary=0.5, factor=16)
    assert SPEC.extrapolate(
        "self_extend", train_length=64, window=16, leak=4
    ).position == LeakyReRope(window=16, base=5e4, rotary=0.5, factor=4, rounded=True)
    assert SPEC.extrapolate("abf", base=1e6).position == Rope(base=1e6, rotary=0.5)


def test_log_n_at_test_time_leaves_lengths_up_to_that_of_training_alone() -> None:
    spec = SPEC.extrapolate("log_n", train_length=64)
    assert spec.scale == LogN(inner=SPEC.scale, train_length=64, clip=True)
    assert spec.position == SPEC.position
    both = SPEC.extrapolate("rerope", train_length=64).extrapolate(
        "log_n", train_length=64
    )
    assert isinstance(both.position, ReRope)


def test_factor_one_changes_no_score() -> None:
    q, k, at = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    plain = SPEC.logits(q, k, at, at, {})
    for method in ("pi", "ntk", "ntk_fixed", "ntk_mixed", "dynamic_ntk", "yarn"):
        same = SPEC.extrapolate(method, train_length=64).logits(q, k, at, at, {})
        assert torch.allclose(same, plain, atol=1e-6), method
    for position in (
        ReRope(window=5),
        LeakyReRope(window=5),
        LeakyReRope(window=2, factor=1.0),
    ):
        whole, near = (
            AttentionSpec(position=p).logits(q, k, at, at, {})
            for p in (Rope(), position)
        )
        assert torch.allclose(near, whole, atol=1e-5), position


def test_what_cannot_be_is_refused() -> None:
    interleaved = AttentionSpec(position=Rope(pairing="interleaved"))
    for error, spec, method, options in (
        (UnknownNameError, SPEC, "nkt", {}),
        (UnknownNameError, SPEC, "yarn", {"train_length": 64, "ramp": "steep"}),
        (InvalidValueError, SPEC, "pi", {"factor": 0.5}),
        (InvalidValueError, SPEC, "pi", {"factor": float("inf")}),
        (InvalidValueError, SPEC, "yarn", {"factor": float("nan"), "train_length": 64}),
        (InvalidValueError, SPEC, "yarn", {"factor": 8}),
        (InvalidValueError, SPEC, "rerope", {}),
        (InvalidValueError, SPEC, "rerope", {"train_length": 64, "window": 64}),
        (InvalidValueError, SPEC, "rerope", {"window": 0}),
        (InvalidValueError, SPEC, "window", {"train_length": 64, "window": 65}),
        (RefusedError, AttentionSpec(), "pi", {"factor": 8}),
        (RefusedError, AttentionSpec(), "rope", {}),
        (RefusedError, AttentionSpec(position=ALiBi()), "yarn", {"train_length": 9}),
        (RefusedError, SPEC.extrapolate("pi", factor=2), "ntk", {"factor": 2}),
        (
            RefusedError,
            preset("kna_logn", train_length=16),
            "log_n",
            {"train_length": 16},
        ),
        (RefusedError, interleaved, "rerope", {"window": 3}),
        *(
            (UnknownNameError, SPEC, method, {option: 1.0})
            for method, option in OTHERS_OPTIONS
        ),
    ):
        with pytest.raises(error):
            spec.extrapolate(method, **options)


def test_a_norm_behind_the_rotation_would_cancel_yarns_factor() -> None:
    with pytest.raises(InvalidValueError, match="cancels the factor"):
        Rope(order="rotate_then_norm", stretch=YaRN(factor=8, train_length=64))
    Rope(
        order="rotate_then_norm",
        stretch=YaRN(factor=8, train_length=64, attention_factor=1.0),
    )


def test_yarn_moves_a_norm_that_commutes_before_the_rotation_and_refuses_others() -> (
    None
):
    kna = preset("kna", train_length=16)
    assert isinstance(kna.position, Rope)
    assert kna.position.order == "rotate_then_norm"
    q, k, at = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    yarn = kna.extrapolate(
        "yarn", factor=8, train_length=10**6
    )  # all pairs stay: only the factor acts
    assert torch.allclose(
        yarn.logits(q, k, at, at, {}),
        kna.logits(q, k, at, at, {}) * 1.459129,
        rtol=1e-4,
    )
    gained = AttentionSpec(
        norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm")
    )
    with pytest.raises(RefusedError, match="does not commute"):
        gained.extrapolate("yarn", factor=8, train_length=64)


def test_what_a_method_takes_where_nothing_is_said_and_at_the_border_of_what_it_takes() -> (
    None
):
    assert SPEC.extrapolate("ntk_mixed", factor=8).position == Rope(
        base=5e4, rotary=0.5, stretch=NTK(factor=8, kind="mixed", power=0.625)
    )
    assert SPEC.extrapolate("abf", factor=8).position == Rope(base=4e5, rotary=0.5)
    assert SPEC.extrapolate("pi").position == Rope(
        base=5e4, rotary=0.5, stretch=PI(factor=1.0)
    )
    yarn = {"fast": 16.0, "slow": 2.0}
    assert SPEC.extrapolate("yarn", factor=8, train_length=64, **yarn).position == Rope(
        base=5e4, rotary=0.5, stretch=YaRN(factor=8, train_length=64, **yarn)
    )
    assert SPEC.extrapolate(
        "leaky_rerope", factor=3, train_length=9
    ).position == LeakyReRope(window=4, base=5e4, rotary=0.5, factor=6.0)
    assert SPEC.extrapolate("rerope", window=63, train_length=64).position == ReRope(
        window=63, base=5e4, rotary=0.5
    )
    assert SPEC.extrapolate("rope", factor=2) == SPEC
    assert SPEC.extrapolate("rerope", train_length=8).extrapolate("rope") == SPEC
    late = AttentionSpec(
        norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm")
    )
    unchanged = late.extrapolate(
        "yarn", factor=1.0, train_length=64
    )  # a factor of 1 on cos and sin: nothing to cancel
    assert unchanged.position == Rope(
        order="rotate_then_norm", stretch=YaRN(factor=1.0, train_length=64)
    )
    for window, changed in ((63, False), (64, False), (65, True)):
        spec = AttentionSpec(position=SlidingWindow(window=window))
        assert (spec.extrapolate("pi", factor=8, train_length=64) != spec) == changed
    assert SPEC.extrapolate(
        "window", window=64, train_length=64
    ).position == SlidingWindow(window=64, inner=SPEC.position)
    wide = AttentionSpec(position=SlidingWindow(window=80)).extrapolate(
        "window", train_length=64
    )
    assert wide.position == SlidingWindow(window=64)
