"""Numbers of the scales, worked out by hand or with a calculator."""

from __future__ import annotations

import math

import pytest
import torch

from qkeel.errors import InvalidValueError
from qkeel.functional.logits import (
    cosine_scale,
    floor_log_temperature,
    gradient_scale,
    log_n,
    qk_norm_init,
    sigmoid_bias,
)
from qkeel.spec import GradientMax, LogN, preset


@pytest.mark.parametrize(
    ("length", "g0"),
    [(72, 12.319672), (75, 12.438272), (79, 12.589183), (512, 17.997179), (2, 1.0)],
)
def test_qknorm_2020_starts_at_log2_of_length_squared_minus_length(
    length: int, g0: float
) -> None:
    assert qk_norm_init(length) == pytest.approx(g0, abs=5e-7)
    params = preset("qknorm_2020", length=length).init_params(4, 4, 8)
    assert params["logit_scale"].shape == ()
    assert params["logit_scale"].item() == pytest.approx(g0, abs=1e-5)


@pytest.mark.parametrize(
    ("n", "value"), [(256, 22.180710), (512, 24.953299), (4096, 33.271065)]
)
def test_cosine_attention_scales_by_four_ln_n(n: int, value: float) -> None:
    assert cosine_scale(2 * n) == pytest.approx(value, abs=5e-7)
    fixed = preset("cosa", train_length=2 * n).scale.factor(
        torch.tensor([[0]]), 128, {}
    )
    assert fixed == pytest.approx(value, abs=5e-7)
    # The log-n twin has 4 ln n at the query that sees n keys, whatever the training length.
    for train_length in (64, 512):
        dynamic = preset("cosa_logn", train_length=train_length).scale.factor(
            torch.tensor([[n - 1]]), 128, {}
        )
        assert dynamic.item() == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize(
    ("n", "value"),
    [
        (64, 1.5494),
        (256, 1.8635),
        (512, 2.0084),
        (1024, 2.1465),
        (4096, 2.4055),
        (20_000, 2.6782),
    ],
)
def test_most_gradient_passes_gaussian_similarities_near_root_ln_n(
    n: int, value: float
) -> None:
    assert gradient_scale(n) == pytest.approx(value, abs=5e-5)
    # Where the derivative 1 - e^(λ²)(1 + 2λ²)/n vanishes.
    assert math.exp(value**2) * (1 + 2 * value**2) == pytest.approx(n, rel=1e-3)


@pytest.mark.parametrize(
    ("head_dim", "values"),
    [
        (64, (15, 16.75, 18.25, 21.25, 22.75)),
        (128, (20.25, 22.25, 24.25, 28, 29.75)),
        (256, (28, 30.75, 33.25, 38, 40.25)),
    ],
)
def test_most_gradient_passes_cosines_at_a_scale_that_grows_with_the_head(
    head_dim: int, values: tuple[float]
) -> None:
    for n, value in zip((128, 256, 512, 2048, 4096), values):
        assert gradient_scale(n, head_dim) == pytest.approx(value, abs=0.126), (
            n
        )  # found on a grid of 0.25
    assert preset("cosa", gradient=True).scale.factor(
        torch.tensor([[0]]), head_dim, {}
    ) == gradient_scale(256, head_dim)


def test_log_n_is_four_thirds_at_eight_times_a_training_length_of_512() -> None:
    # ln 4096 / ln 512 = 12/9.
    n = torch.tensor([4096], dtype=torch.int64)
    assert log_n(n, 512, clip=True, dtype=torch.float64).item() == pytest.approx(
        4 / 3, abs=1e-15
    )
    assert log_n(n, 512, dtype=torch.float64).item() == pytest.approx(4 / 3, abs=1e-15)


def test_log_n_without_clip_is_under_one_inside_the_training_length_and_zero_at_one_key() -> (
    None
):
    n = torch.tensor([1, 8, 512, 4096])
    expected = [0.0, 3 / 9, 1.0, 12 / 9]
    assert log_n(n, 512, dtype=torch.float64).tolist() == pytest.approx(
        expected, abs=1e-15
    )
    assert log_n(n, 512, clip=True, dtype=torch.float64).tolist() == pytest.approx(
        [1.0, 1.0, 1.0, 12 / 9], abs=1e-15
    )


def test_log_n_counts_keys_per_query_as_position_plus_one() -> None:
    scale = LogN(train_length=8)
    pos = torch.tensor([[0, 1, 7, 63]])
    ratios = scale.factor(pos, 4, {}).flatten() / 0.5  # 1/√4
    assert ratios.tolist() == pytest.approx([0.0, 1 / 3, 1.0, 2.0], abs=1e-15)


def test_a_learned_factor_of_ln_n_multiplies_each_head_by_its_own() -> None:
    scale = LogN(train_length=8, learned="head")
    pos = torch.tensor([[0, 1, 7]])
    found = scale.factor(
        pos,
        4,
        {"log_n_scale": torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]},
    )
    # 1/√4 · s · ln n
    expected = [
        [0.0, 0.17328679513998632, 0.5198603854199589],
        [0.0, 0.6931471805599453, 2.0794415416798357],
    ]
    assert found.shape == (1, 2, 3, 1)
    torch.testing.assert_close(
        found[0, ..., 0],
        torch.tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=1e-15,
    )


@pytest.mark.parametrize(
    ("n", "bias"),
    [
        (512, -6.238325),
        (1024, -6.931472),
        (2048, -7.624619),
        (4096, -8.317766),
        (1, 0.0),
    ],
)
def test_sigmoid_bias_is_minus_ln_n(n: int, bias: float) -> None:
    assert sigmoid_bias(n) == pytest.approx(bias, abs=5e-7)


@pytest.mark.parametrize(
    ("pos", "factor"),
    [
        (0, 1.0),
        (8190, 1.0),
        (8191, 1.0693),
        (16382, 1.0693),
        (16383, 1.1099),
        (131071, 1.2833),
    ],
)
def test_llama4_temperature_steps_every_8192_positions(pos: int, factor: float) -> None:
    value = floor_log_temperature(torch.tensor([pos]), dtype=torch.float64).item()
    assert value == pytest.approx(factor, abs=5e-5)
    whole = preset("llama4_nope").scale.factor(torch.tensor([[pos]]), 64, {}).item()
    assert whole == pytest.approx(value / 8, abs=1e-15)


def test_llama4_temperature_of_a_query_before_the_first_key_is_one() -> None:
    # Queries longer than the keys are aligned to their end, so the first ones have negative positions.
    pos = torch.tensor([-1, -5, -8193, -100_000])
    assert floor_log_temperature(pos).tolist() == [1.0] * 4


def test_swin_v2_temperature_starts_at_ten_and_is_clamped_at_a_hundred() -> None:
    spec = preset("swin_v2")
    pos = torch.zeros(1, 1, dtype=torch.int64)
    start = spec.init_params(2, 2, 8)["logit_scale"]
    assert start.shape == (2, 1, 1)
    assert start.flatten().tolist() == pytest.approx([math.log(10)] * 2, abs=1e-6)
    stored = torch.tensor(
        [math.log(99.0), math.log(101.0), 50.0, -3.0], dtype=torch.float64
    ).view(4, 1, 1)
    factor = spec.scale.factor(pos, 8, {"logit_scale": stored}).flatten().tolist()
    assert factor == pytest.approx([99.0, 100.0, 100.0, math.exp(-3)], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("baseline", 1 / math.sqrt(128)),
        ("qna", 1.0),
        ("kna", 1.0),
        ("cosa", 22.180710),
        ("gemma2", 1 / 16),
        ("gemma3", 1 / 16),
        ("gemma4", 1.0),
        ("ngpt", math.sqrt(128)),
        ("nanochat", 1.44 / math.sqrt(128)),
        ("qwen3", 1 / math.sqrt(128)),
    ],
)
def test_published_scale_at_head_dim_128(name: str, expected: float) -> None:
    assert preset(name).scale.factor(torch.tensor([[9]]), 128, {}) == pytest.approx(
        expected, rel=1e-7
    )


@pytest.mark.parametrize(
    "call", [lambda: qk_norm_init(1), lambda: cosine_scale(2), lambda: sigmoid_bias(0)]
)
def test_lengths_without_a_logarithm_are_refused(call: object) -> None:
    with pytest.raises(InvalidValueError, match="length above"):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    "make",
    [
        lambda: gradient_scale(1.0),
        lambda: gradient_scale(64, 1),
        lambda: GradientMax(keys=0.5),
    ],
)
def test_the_scale_of_most_gradient_needs_keys_and_cosines(make) -> None:
    with pytest.raises(InvalidValueError):
        make()
