"""Definitions that are easy to get wrong, as facts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkeel import reference
from qkeel.functional.norms import l2_norm, layer_norm, rms_norm
from qkeel.functional.rope import rope_frequencies, rope_table, rotate
from qkeel.spec import AttentionSpec, Fixed, L2Norm, LayerNorm, RMSNorm, Rope, preset

NORM_FIRST, ROTATE_FIRST = (
    Rope(order="norm_then_rotate"),
    Rope(order="rotate_then_norm"),
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# L2: sum or mean; where eps goes.


def test_l2_divides_by_the_root_of_the_sum_and_rms_by_the_root_of_the_mean() -> None:
    assert l2_norm(f64(3, 4)).tolist() == pytest.approx([0.6, 0.8], rel=1e-15)
    assert rms_norm(f64(3, 4), eps=0.0).tolist() == pytest.approx(
        [3 / math.sqrt(12.5), 4 / math.sqrt(12.5)], rel=1e-14
    )


def test_rms_norm_is_root_d_times_l2_norm() -> None:
    x = randn(5, 16)
    torch.testing.assert_close(rms_norm(x, eps=0.0), 4 * l2_norm(x), rtol=1e-14, atol=0)


def test_what_llama4_calls_l2_norm_is_gain_free_rms_and_its_logits_reach_root_d() -> (
    None
):
    spec = preset("llama4", eps=0.0)
    assert isinstance(spec.norm, RMSNorm)
    assert spec.norm.gain == "none"
    x, pos = randn(1, 1, 1, 16), torch.zeros(1, 1, dtype=torch.int64)
    assert spec.logits(x, x, pos, pos, {}).item() == pytest.approx(4.0, rel=1e-12)
    assert preset("cosa").replace(scale=Fixed(1.0)).logits(
        x, x, pos, pos, {}
    ).item() == pytest.approx(1.0, rel=1e-12)


def test_eps_of_l2_is_a_floor_and_eps_of_rms_and_layer_norm_is_added_to_the_mean_square() -> (
    None
):
    small = f64(1e-3, -1e-3)
    assert rms_norm(small, eps=1e-6).tolist() == pytest.approx(
        [2**-0.5, -(2**-0.5)], rel=1e-12
    )
    assert layer_norm(small, eps=1e-6).tolist() == pytest.approx(
        [2**-0.5, -(2**-0.5)], rel=1e-12
    )
    assert l2_norm(small, eps=1e-6).tolist() == pytest.approx(
        [2**-0.5, -(2**-0.5)], rel=1e-12
    )
    assert l2_norm(f64(3e-7, 4e-7), eps=1e-6).tolist() == pytest.approx(
        [0.3, 0.4], rel=1e-12
    )


def test_layer_norm_uses_the_population_variance() -> None:
    # Mean 3, deviations -2, 0, 2: variance 8/3.
    expected = [-math.sqrt(1.5), 0.0, math.sqrt(1.5)]
    assert layer_norm(f64(1, 3, 5), eps=0.0).tolist() == pytest.approx(
        expected, abs=1e-14
    )


# Gain: w or 1 + w.


def test_gemma_gain_stores_w_and_multiplies_by_one_plus_w_and_both_start_neutral() -> (
    None
):
    q = randn(1, 2, 3, 8)
    plain = RMSNorm().apply("q", q, {})
    for gain, start in (("dim", 1.0), ("one_plus_dim", 0.0)):
        norm = RMSNorm(gain=gain)
        params = AttentionSpec(norm=norm).init_params(2, 2, 8)
        assert params["q_norm"].tolist() == [start] * 8
        assert torch.equal(norm.apply("q", q, params), plain)
        stored = {"q_norm": torch.full((8,), 0.5), "k_norm": torch.full((8,), 0.5)}
        factor = {"dim": 0.5, "one_plus_dim": 1.5}[gain]
        torch.testing.assert_close(
            norm.apply("q", q, stored), factor * plain, rtol=1e-15, atol=0
        )
    assert {
        name: preset(name).norm.gain
        for name in ("qwen3", "qwen3_next", "gemma3", "gemma4")
    } == {
        "qwen3": "dim",
        "qwen3_next": "one_plus_dim",
        "gemma3": "one_plus_dim",
        "gemma4": "dim",
    }


def test_weight_decay_pulls_a_plain_gain_to_zero_and_a_gemma_gain_to_one() -> None:
    q = randn(1, 1, 1, 4)
    zero = {"q_norm": torch.zeros(4), "k_norm": torch.zeros(4)}
    assert RMSNorm(gain="dim").apply("q", q, zero).abs().max() == 0
    assert torch.equal(
        RMSNorm(gain="one_plus_dim").apply("q", q, zero), RMSNorm().apply("q", q, {})
    )


# Order of norm and RoPE.


def logits(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    pos_q: int,
    pos_k: int,
    params: dict[str, Tensor],
) -> Tensor:
    return spec.logits(q, k, torch.tensor([[pos_q]]), torch.tensor([[pos_k]]), params)


@pytest.mark.parametrize(
    "norm",
    [
        L2Norm(),
        RMSNorm(),
        RMSNorm(over="layer"),
        L2Norm(gain="scalar"),
        RMSNorm(gain="head"),
    ],
)
def test_norms_without_a_gain_per_dimension_commute_with_rope(
    norm: L2Norm | LayerNorm | RMSNorm,
) -> None:
    q, k = randn(1, 2, 1, 16), randn(1, 2, 1, 16, seed=1)
    params = {
        name: p + 0.7
        for name, p in AttentionSpec(norm=norm).init_params(2, 2, 16).items()
    }
    first = logits(AttentionSpec(norm=norm, position=NORM_FIRST), q, k, 5, 2, params)
    after = logits(AttentionSpec(norm=norm, position=ROTATE_FIRST), q, k, 5, 2, params)
    torch.testing.assert_close(first, after, rtol=0, atol=5e-15)


def test_l2_norm_before_and_after_rope_agree_to_the_last_bits() -> None:
    x, pos = randn(1, 1, 50, 128), torch.arange(50)[None]
    a, _ = AttentionSpec(norm=L2Norm(), position=NORM_FIRST).encode(x, x, pos, pos, {})
    b, _ = AttentionSpec(norm=L2Norm(), position=ROTATE_FIRST).encode(
        x, x, pos, pos, {}
    )
    assert (a - b).abs().max() <= 3e-16


@pytest.mark.parametrize(
    "norm", [RMSNorm(gain="dim"), L2Norm(gain="head_dim"), LayerNorm()]
)
def test_a_gain_per_dimension_and_layer_norm_do_not_commute_with_rope(
    norm: L2Norm | LayerNorm | RMSNorm,
) -> None:
    q, k = randn(1, 2, 1, 16), randn(1, 2, 1, 16, seed=1)
    params = {
        name: 1 + 0.5 * randn(*p.shape, seed=2)
        for name, p in AttentionSpec(norm=norm).init_params(2, 2, 16).items()
    }
    first = logits(AttentionSpec(norm=norm, position=NORM_FIRST), q, k, 5, 2, params)
    after = logits(AttentionSpec(norm=norm, position=ROTATE_FIRST), q, k, 5, 2, params)
    assert (first - after).abs().max() > 1e-3


def test_gain_before_rope_keeps_logits_a_function_of_the_distance_and_gain_after_rope_does_not() -> (
    None
):
    q, k = randn(1, 1, 1, 16), randn(1, 1, 1, 16, seed=1)
    params = {
        "q_norm": 1 + 0.5 * randn(16, seed=2),
        "k_norm": 1 + 0.5 * randn(16, seed=3),
    }
    norm = RMSNorm(gain="dim")
    before, after = (
        AttentionSpec(norm=norm, position=p) for p in (NORM_FIRST, ROTATE_FIRST)
    )
    shift = {
        spec: (logits(spec, q, k, 5, 2, params) - logits(spec, q, k, 105, 102, params))
        .abs()
        .item()
        for spec in (before, after)
    }
    assert shift[before] <= 1e-13
    assert shift[after] > 1e-2


def test_gain_after_rope_keeps_the_distance_if_it_is_equal_inside_each_rotated_pair() -> (
    None
):
    q, k = randn(1, 1, 1, 16), randn(1, 1, 1, 16, seed=1)
    half = 1 + 0.5 * randn(8, seed=2)
    for pairing, gain in (
        ("half", half.repeat(2)),
        ("interleaved", half.repeat_interleave(2)),
    ):
        spec = AttentionSpec(
            norm=RMSNorm(gain="dim"),
            position=Rope(pairing=pairing, order="rotate_then_norm"),
        )
        params = {"q_norm": gain, "k_norm": gain}
        a, b = logits(spec, q, k, 5, 2, params), logits(spec, q, k, 105, 102, params)
        assert (a - b).abs().item() <= 1e-13


def test_a_factor_on_cos_and_sin_grows_logits_by_its_square_unless_a_norm_follows() -> (
    None
):
    # YaRN's m = 0.1 ln s + 1, put on the rotary tables.
    m, pos = 0.1 * math.log(8) + 1, torch.arange(4)[None]
    q, k = randn(1, 1, 4, 16), randn(1, 1, 4, 16, seed=1)
    cos, sin = rope_table(pos[:, None], rope_frequencies(16), torch.float64)
    plain = [rotate(x, cos, sin) for x in (q, k)]
    grown = [rotate(x, m * cos, m * sin) for x in (q, k)]
    torch.testing.assert_close(
        grown[0] @ grown[1].mT, 1.459129 * plain[0] @ plain[1].mT, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        l2_norm(grown[0]) @ l2_norm(grown[1]).mT,
        l2_norm(plain[0]) @ l2_norm(plain[1]).mT,
        rtol=0,
        atol=1e-14,
    )
    # Only one side normed (KNA): the other side's factor stays.
    torch.testing.assert_close(
        grown[0] @ l2_norm(grown[1]).mT,
        m * plain[0] @ l2_norm(plain[1]).mT,
        rtol=0,
        atol=1e-13,
    )


# O20: logits at initialisation.


@pytest.mark.parametrize(
    ("name", "std"),
    [("baseline", 0.997), ("qna", 0.998), ("kna", 0.998), ("cosa", 1.960)],
)
def test_standard_deviation_of_logits_at_initialisation(name: str, std: float) -> None:
    q, k, pos = (
        randn(1, 4, 256, 128),
        randn(1, 4, 256, 128, seed=1),
        torch.arange(256)[None],
    )
    found = preset(name).logits(q, k, pos, pos, {}).std().item()
    assert found == pytest.approx(std, rel=0.015)


# O26: edges.


@pytest.mark.parametrize("name", ["baseline_logn", "qna_logn", "kna_logn", "cosa_logn"])
def test_log_n_of_a_single_key_is_zero_and_harmless(name: str) -> None:
    q, k, v = (randn(1, 2, 5, 16, seed=s) for s in range(3))
    seen = reference.attend(preset(name), q, k, v)
    assert (seen.logits[:, :, 0, 0] == 0).all()
    assert (seen.weights[:, :, 0, 0] == 1).all()
    assert torch.equal(seen.out[:, :, 0], v[:, :, 0])


def test_log_n_dynamic_cosine_scale_is_four_ln_of_keys_seen() -> None:
    q, k = randn(1, 1, 5, 16), randn(1, 1, 5, 16, seed=1)
    found = reference.attend(preset("cosa_logn"), q, k, k).logits[0, 0, 4]
    plain = preset("cosa").replace(scale=Fixed(4 * math.log(5)))
    torch.testing.assert_close(
        found, reference.attend(plain, q, k, k).logits[0, 0, 4], rtol=1e-13, atol=0
    )
