"""Every preset: builds, explains itself, has the parameters its source has, and starts neutral."""

import inspect
import math

import pytest
from tests.each_row import each_row

from qkeel.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from qkeel.spec import (
    PRESETS,
    AttentionSpec,
    Fixed,
    GradientMax,
    L2Norm,
    LayerNorm,
    Learned,
    LogN,
    Rope,
    Sqrt,
    preset,
)

LATE = Rope(order="rotate_then_norm")

every_preset = each_row("name", PRESETS)


@every_preset
def test_options_change_the_spec(name):
    for option, parameter in inspect.signature(PRESETS[name].build).parameters.items():
        value = parameter.default
        assert preset(name, **{option: value}) == preset(name)
        other = not value if isinstance(value, bool) else type(value)(value / 2)
        # Only the scale of CosA, and that of log n, depends on the training length.
        idle = option == "train_length" and name in ("baseline", "qna", "kna")
        assert (preset(name, **{option: other}) == preset(name)) == idle, option


# The constants of presets that tests/contract/parity compares with no other code, written out once more.
PUBLISHED = {
    "baseline": AttentionSpec(position=Rope(base=10_000.0)),
    "baseline_logn": AttentionSpec(
        position=Rope(), scale=LogN(train_length=512, clip=False)
    ),
    "qna": AttentionSpec(
        norm=L2Norm(on="q", eps=1e-12), position=LATE, scale=Fixed(1.0)
    ),
    "kna": AttentionSpec(norm=L2Norm(on="k"), position=LATE, scale=Fixed(1.0)),
    "cosa": AttentionSpec(
        norm=L2Norm(on="qk"), position=LATE, scale=Fixed(4 * math.log(256))
    ),
    "qna_logn": AttentionSpec(
        norm=L2Norm(on="q"),
        position=LATE,
        scale=LogN(train_length=512, inner=Fixed(1.0)),
    ),
    "kna_logn": AttentionSpec(
        norm=L2Norm(on="k"),
        position=LATE,
        scale=LogN(train_length=512, inner=Fixed(1.0)),
    ),
    "cosa_logn": AttentionSpec(
        norm=L2Norm(on="qk"),
        position=LATE,
        scale=LogN(train_length=512, inner=Fixed(4 * math.log(512))),
    ),
    "qknorm_2020": AttentionSpec(
        norm=L2Norm(), scale=Learned(init=math.log2(72 * 72 - 72), per="layer")
    ),
    "vit": AttentionSpec(),
    "vit22b": AttentionSpec(norm=LayerNorm(gain="dim", eps=1e-6)),
    "ngpt": AttentionSpec(
        norm=L2Norm(gain="head_dim", shared=True), position=LATE, scale=Sqrt()
    ),
    "swin_v2": AttentionSpec(
        norm=L2Norm(), scale=Learned(init=10.0, per="head", log=True, maximum=100.0)
    ),
}


def test_the_constants_of_presets_are_the_published_ones():
    assert {name: preset(name) for name in PUBLISHED} == PUBLISHED


def test_options_of_presets_do_what_they_name():
    for on in ("q", "k", "qk"):
        name = {"q": "qna", "k": "kna", "qk": "cosa"}[on]
        gained = {
            "norm": L2Norm(on=on, gain="dim"),
            "position": Rope(order="norm_then_rotate"),
        }
        assert preset(name, gain=True) == PUBLISHED[name].replace(**gained)
        assert preset(f"{name}_logn", gain=True) == PUBLISHED[f"{name}_logn"].replace(
            **gained
        )
    assert preset("cosa", gradient=True).scale == GradientMax(keys=256)
    assert preset("cosa_logn", gradient=True).scale == LogN(
        train_length=512, inner=GradientMax(keys=512)
    )
    assert preset("cosa", train_length=64).scale == Fixed(4 * math.log(32))
    assert preset("olmo2", rotary=0.5).position == Rope(base=5e5, rotary=0.5)


def test_what_no_preset_takes_is_refused():
    for error, name, options in (
        (UnknownNameError, "qwen", {}),
        (UnknownNameError, "kna", {"trainlength": 64}),
        (InvalidTypeError, 3, {}),
        (InvalidTypeError, "cosa", {"train_length": "512"}),
        (InvalidTypeError, "kna_logn", {"clip": 1}),
        (InvalidValueError, "cosa", {"train_length": 1}),
        (InvalidValueError, "gemma2", {"query_scalar": 0}),
        (InvalidValueError, "qwen3", {"base": 0.5}),
        (InvalidValueError, "qwen3", {"eps": math.nan}),
    ):
        with pytest.raises(error):
            preset(name, **options)
