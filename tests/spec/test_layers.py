"""Positions by name and by layer: one spec for each layer, windows among them."""

import dataclasses
import itertools
import math

import pytest
import torch
from tests.each_row import each_row

from qkeel import attention, preset
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    UnknownNameError,
)
from qkeel.nn import DecoderConfig
from qkeel.spec import (
    PI,
    POSITIONS,
    ALiBi,
    AttentionSpec,
    Kerple,
    LeakyReRope,
    LogN,
    NoPosition,
    ReRope,
    Rope,
    SlidingWindow,
    XPos,
    layer_specs,
    positions,
)
from qkeel.spec.call import make_call

BASE, FORM = preset("baseline"), preset("kna", train_length=64)


def near(window, inner=BASE.position):
    return AttentionSpec(position=SlidingWindow(window=window, inner=inner))


@pytest.mark.parametrize("impl", ["sdpa", "chunked"])
def test_keys_outside_every_window_are_not_read_and_own_positions_decide(
    impl,
):
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 100, 8)
    k[:, :, :90] = math.nan
    assert attention(q, k, k, spec=near(10), impl=impl).isfinite().all()
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    pos = torch.tensor([[0, 5, 6, 20]])
    out = attention(q, k, v, spec=near(3), pos_q=pos, pos_k=pos, impl=impl)
    sees_itself = ((out - v).abs().amax((0, 1, 3)) < 1e-12).tolist()
    assert sees_itself == [True, True, False, True]


def test_whether_one_fused_call_does_and_how_far_a_query_sees():
    for t, s, causal, masked, given, window in itertools.product(
        (3, 5), (3, 5), (False, True), (False, True), (False, True), (None, 3, 4, 5)
    ):
        q, k = torch.zeros(1, 1, t, 2), torch.zeros(1, 1, s, 2)
        call = make_call(
            AttentionSpec() if window is None else near(window),
            q,
            k,
            k,
            causal=causal,
            mask=torch.ones(1, 1, t, s, dtype=torch.bool) if masked else None,
            pos_k=torch.arange(s) if given else None,
        )
        hides = window is not None and (given or window < max(t, s))
        assert (call.plain, call.window) == (not given, window if hides else None)
        fits = not causal or (not given and t == s)
        assert call.whole == (fits and not masked and not hides)


@each_row(
    "text, position",
    {
        "rope": Rope(),
        "rope:base=500,rotary=0.5": Rope(base=500, rotary=0.5),
        "xpos": XPos(),
        "xpos:base=500,scale=64": XPos(base=500, scale=64),
        "nope": NoPosition(),
        "alibi": ALiBi(),
        "kerple_log": Kerple(),
        "kerple_power": Kerple(kind="power"),
        "inv_leaky": LeakyReRope(window=16, factor=1 / 16),
        "inv_leaky:window=63,leak=0.5": LeakyReRope(window=63, factor=0.5),
        "window:window=1": SlidingWindow(window=1, inner=FORM.position),
        "pi:factor=2": dataclasses.replace(FORM.position, stretch=PI(factor=2)),
        "": FORM.position,
    }.items(),
)
def test_a_position_of_all_layers(text, position):
    assert layer_specs(FORM, 2, text, 64) == (FORM.replace(position=position),) * 2


@each_row(
    "n, length, text, width",
    [
        (24, 512, "hwfa", 16),  # 23 windows of 16 see 346 of 512, the source's numbers
        (2, 64, "hwfa", 48),
        (24, 4, "hwfa", 1),
        (2, 64, "hwfa:window=1", 1),
        (2, 64, "hwfa:window=63", 63),
        (3, None, "hwfa:window=5,train_length=64", 5),
    ],
)
def test_hwfa_ends_with_a_full_layer_with_log_n_and_no_position(n, length, text, width):
    scale = LogN(train_length=length or 64)
    last = AttentionSpec(scale=scale)
    assert layer_specs(BASE, n, text, length) == (*[near(width)] * (n - 1), last)
    logged = BASE.replace(scale=scale)
    assert layer_specs(logged, n, text, length)[-1] == last


@each_row(
    "n, options, full, width",
    [
        (2, "", {1}, 32),
        (4, "", {2}, 32),
        (12, "", {6}, 16),
        (12, ":full=3", {3, 6, 9}, 16),
        (3, ":full=2", {1, 2}, 32),
        (24, ":full=2,window=7", {8, 16}, 7),
    ],
)
def test_hwfa2_keeps_a_few_full_layers_evenly_spaced_and_only_those_change_post_hoc(
    n, options, full, width
):
    specs = layer_specs(BASE, n, f"hwfa2{options}", 64)
    assert specs == tuple(BASE if i in full else near(width) for i in range(n))
    later = [s.extrapolate("rerope", factor=8, train_length=64) for s in specs]
    clipped = AttentionSpec(position=ReRope(window=32))
    assert later == [clipped if i in full else near(width) for i in range(n)]


def test_positions_of_several_layers_are_repeated():
    specs = layer_specs(BASE, 5, "window:window=4/window:window=4/nope")
    assert specs == (near(4), near(4), AttentionSpec(), near(4), near(4))


REFUSED = [
    *((InvalidValueError, f"hwfa2:full={full}", 4, 64) for full in (0, 4)),
    *((InvalidValueError, name, 1, 64) for name in ("hwfa", "hwfa2")),
    *(
        (InvalidValueError, f"{name}:window={window}", 4, 64)
        for name in ("hwfa", "hwfa2", "inv_leaky")
        for window in (0, 64)  # windows as wide as the training length hide nothing
    ),
    (InvalidValueError, "hwfa", 4, None),
    (InvalidValueError, "window", 4, 64),
    (InvalidValueError, "rope+nope", 4, 64),
    *((UnknownNameError, name, 4, 64) for name in ("alibii", "xpos:bass=3")),
    *((UnknownNameError, name, 4, 64) for name in ("none", "log_n")),
    *((InvalidTypeError, name, 4, 64) for name in ("rope:base=big", "xpos:base=true")),
]


@each_row("error, text, n, length", REFUSED)
def test_what_cannot_be_is_refused(error, text, n, length):
    with pytest.raises(error):
        layer_specs(FORM, n, text, length)


def test_positions_need_a_rotation_a_spec_for_each_layer_and_a_source():
    with pytest.raises(RefusedError):
        layer_specs(preset("vit22b"), 4, "pi:factor=2")
    with pytest.raises(InvalidValueError):
        DecoderConfig(vocab_size=5, n_layers=3, spec=(FORM, FORM))
    lines = positions()
    assert {*POSITIONS, "pi", "yarn", "rope", "window"} <= set(lines)
    assert not {"none", "log_n"} & set(lines)
    for line in lines.values():
        assert line.rpartition("[")[2].startswith(("arXiv", "kexue", "transformers"))
