"""A trained spec gets another position or scale by name, and says no where that makes no sense."""

import pytest
from tests.each_row import each_row

from qkeel.errors import InvalidValueError, RefusedError, UnknownNameError
from qkeel.spec import (
    NTK,
    PI,
    ALiBi,
    AttentionSpec,
    DynamicNTK,
    LeakyReRope,
    NoStretch,
    ReRope,
    RMSNorm,
    Rope,
    SlidingWindow,
    YaRN,
)

SPEC = AttentionSpec(position=Rope(base=5e4, rotary=0.5))
LATE = AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm"))
ROPE = {"base": 5e4, "rotary": 0.5}
L = {"train_length": 64}
FAST = {"fast": 16.0, "slow": 2.0}


def rope(stretch):
    return Rope(**ROPE, stretch=stretch)


def windowed(window, inner=SPEC.position):
    return AttentionSpec(position=SlidingWindow(window=window, inner=inner))


# The trained spec, the method with its options, and the position afterwards; as of the golden formulas where nothing
# else is said.
METHODS_BY_HAND = [
    (SPEC, "rope", {"factor": 2}, rope(NoStretch())),
    (SPEC, "pi", {}, rope(PI(factor=1.0))),
    (SPEC, "ntk_mixed", {"factor": 8, "power": 0.75}, rope(NTK(factor=8, kind="mixed", power=0.75))),
    (SPEC, "dynamic_ntk", {"factor": 8, **L}, rope(DynamicNTK(**L))),
    (SPEC, "abf", {"factor": 8}, Rope(base=4e5, rotary=0.5)),
    (SPEC, "abf", {"base": 1e6}, Rope(base=1e6, rotary=0.5)),
    (SPEC, "yarn", {"factor": 8, **L, "ramp": "paper"}, rope(YaRN(factor=8, **L, ramp="paper"))),
    (SPEC, "yarn", {"factor": 8, **L, **FAST}, rope(YaRN(factor=8, **L, **FAST))),
    # A factor of 1 on cos and sin: nothing that the norm could cancel.
    (LATE, "yarn", L, Rope(order="rotate_then_norm", stretch=YaRN(factor=1.0, **L))),
    (SPEC, "rerope", L, ReRope(window=32, **ROPE)),
    (SPEC, "rerope", {"window": 63, **L}, ReRope(window=63, **ROPE)),
    (SPEC, "leaky_rerope", {"factor": 3, "train_length": 9}, LeakyReRope(window=4, factor=6.0, **ROPE)),
    (SPEC, "leaky_rerope", {"factor": 8, "window": 16, **L}, LeakyReRope(window=16, factor=16, **ROPE)),
    (SPEC, "self_extend", {"window": 16, "leak": 4, **L},
     LeakyReRope(window=16, factor=4, rounded=True, **ROPE)),
    (SPEC.extrapolate("rerope", train_length=8), "rope", {}, SPEC.position),
    (AttentionSpec(position=LeakyReRope(window=128)), "rope", {}, Rope()),
    (SPEC, "window", L, windowed(64).position),
    (windowed(9), "window", L, windowed(9).position),
    (windowed(80), "window", L, windowed(64).position),
    (AttentionSpec(position=ALiBi()), "window", L, windowed(64, ALiBi()).position),
    # Training has seen all distances inside of a window that is no wider than its length.
    (windowed(64), "pi", {"factor": 8, **L}, windowed(64).position),
    (windowed(65), "pi", {"factor": 8, **L}, windowed(65, rope(PI(factor=8))).position),
]  # fmt: skip


@each_row("spec, method, options, position", METHODS_BY_HAND)
def test_a_method_changes_the_position_alone(spec, method, options, position):
    assert spec.extrapolate(method, **options) == spec.replace(position=position)


INTERLEAVED = AttentionSpec(position=Rope(pairing="interleaved"))
REFUSED = [
    (UnknownNameError, SPEC, "nkt", {}),
    (UnknownNameError, SPEC, "yarn", {"ramp": "steep", **L}),
    *((InvalidValueError, SPEC, "pi", {"factor": x}) for x in (0.5, float("inf"))),
    (InvalidValueError, SPEC, "yarn", {"factor": float("nan"), **L}),
    *((InvalidValueError, SPEC, name, {}) for name in ("yarn", "rerope", "window")),
    (InvalidValueError, SPEC, "rerope", {"window": 64, **L}),
    (InvalidValueError, SPEC, "rerope", {"window": 0}),
    (InvalidValueError, SPEC, "window", {"window": 65, **L}),
    (InvalidValueError, windowed(128), "pi", {"factor": 8}),
    *((RefusedError, AttentionSpec(), name, {}) for name in ("pi", "rope")),
    (RefusedError, AttentionSpec(position=ALiBi()), "yarn", L),
    (RefusedError, SPEC.extrapolate("pi", factor=2), "ntk", {"factor": 2}),
    (RefusedError, SPEC.extrapolate("log_n", **L), "log_n", L),
    (RefusedError, INTERLEAVED, "rerope", {"window": 3}),
    (RefusedError, LATE, "yarn", {"factor": 8, **L}),
    *(
        (UnknownNameError, SPEC, method, {option: 1.0})  # an option of another method
        for option, methods in {
            "window": ("pi", "yarn"),
            "power": ("abf", "ntk"),
            "base": ("dynamic_ntk",),
            "leak": ("rerope", "window", "none", "rope"),
        }.items()
        for method in methods
    ),
]


@each_row("error, spec, method, options", REFUSED)
def test_what_cannot_be_is_refused(error, spec, method, options):
    with pytest.raises(error):
        spec.extrapolate(method, **options)
