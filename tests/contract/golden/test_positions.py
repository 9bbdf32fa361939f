"""Positions for long contexts: numbers worked by hand or taken from the sources."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from qkeel.functional.position_biases import (
    alibi_slopes,
    kerple_log,
    kerple_power,
    xpos_decay,
)
from qkeel.functional.rope import (
    interpolate,
    llama3,
    ntk,
    ntk_mixed,
    rope_frequencies,
    yarn,
    yarn_magnitude,
)
from qkeel.spec import (
    ALiBi,
    AttentionSpec,
    Kerple,
    LeakyReRope,
    ReRope,
    Rope,
    XPos,
    YaRN,
)

THETA = rope_frequencies(128)


def multipliers(theta: Tensor, places: list[int]) -> list[float]:
    return [float((theta / THETA)[i]) for i in places]


def test_ntk_multiplies_the_base_by_k_or_by_what_turns_the_last_pair_one_kth_as_fast() -> (
    None
):
    at = [m - 1 for m in (1, 2, 8, 16, 32, 64)]
    assert multipliers(ntk(THETA, 8), at) == pytest.approx(
        [1, 0.96803, 0.79657, 0.61424, 0.36523, 0.12913], abs=1e-5
    )
    exact = ntk(THETA, 8, exact=True)
    assert float(exact[-1] / THETA[-1]) == pytest.approx(1 / 8)
    assert torch.allclose(exact, rope_frequencies(128, 10_000 * 8.268462), rtol=1e-6)
    assert torch.allclose(ntk(THETA, 8), rope_frequencies(128, 80_000), rtol=1e-12)


@pytest.mark.parametrize(
    ("power", "expected"),
    [
        (1.0, [0.96803, 0.93708, 0.77111, 0.59460, 0.35355, 0.125]),
        (0.625, [0.85680, 0.78792, 0.56727, 0.41715, 0.25967, 0.125]),
        (0.75, [0.91220, 0.85680, 0.64588, 0.47941, 0.29042, 0.125]),
        (0.0, [0.125] * 6),
    ],
)
def test_ntk_mixed_lies_between_interpolation_and_ntk_fixed(
    power: float, expected: list[float]
) -> None:
    at = [m - 1 for m in (1, 2, 8, 16, 32, 64)]
    assert multipliers(ntk_mixed(THETA, 8, power), at) == pytest.approx(
        expected, abs=1e-5
    )
    assert torch.allclose(ntk_mixed(THETA, 8, 0.0), interpolate(THETA, 8))


@pytest.mark.parametrize(
    ("length", "ramp", "expected"),
    [
        (512, "code", [1, 0.93, 0.65, 0.37, 0.125, 0.125, 0.125]),
        (512, "paper", [1, 0.8241, 0.3268, 0.1695, 0.125, 0.125, 0.125]),
        (2048, "code", [1, 1, 1, 0.72, 0.44, 0.16, 0.125]),
        (2048, "paper", [1, 1, 1, 0.3877, 0.1888, 0.1259, 0.125]),
    ],
)
def test_yarn_leaves_fast_pairs_and_interpolates_slow_ones(
    length: int, ramp: str, expected: list[float]
) -> None:
    found = yarn(THETA, 8, length, base=10_000, ramp=ramp)  # type: ignore[arg-type]
    assert multipliers(found, [0, 8, 16, 24, 32, 40, 63]) == pytest.approx(
        expected, abs=5e-5
    )


def test_yarn_raises_logits_by_the_square_of_its_magnitude() -> None:
    for factor, m in {
        2: 1.069315,
        4: 1.138629,
        8: 1.207944,
        16: 1.277259,
        32: 1.346574,
    }.items():
        assert yarn_magnitude(factor) == pytest.approx(m, abs=1e-6)
    q, k, at = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16), torch.zeros(1, 1)
    plain = AttentionSpec(position=Rope()).logits(q, k, at, at, {})
    stretched = AttentionSpec(
        position=Rope(stretch=YaRN(factor=8, train_length=64))
    ).logits(q, k, at, at, {})
    assert torch.allclose(stretched, plain * 1.459129, rtol=1e-5)


def clipped(distance: Tensor, window: float, leak: float = math.inf) -> Tensor:
    """r where |r| < w, else ±(w + (|r| - w)/leak): Su 2023, kexue.fm 9708."""
    r = distance.abs().to(torch.promote_types(distance.dtype, torch.float32))
    return torch.where(r < window, r, window + (r - window) / leak) * distance.sign()


def test_clipped_distances_of_a_row() -> None:
    r = torch.arange(7, -1, -1)
    assert clipped(r, 3).tolist() == [3, 3, 3, 3, 3, 2, 1, 0]
    assert clipped(r, 3, 4).tolist() == [4, 3.75, 3.5, 3.25, 3, 2, 1, 0]
    assert clipped(-r, 3, 4).tolist() == [-4, -3.75, -3.5, -3.25, -3, -2, -1, 0]


@pytest.mark.parametrize(
    ("position", "distance"),
    [
        (ReRope(window=3), lambda r: clipped(r, 3)),
        (ReRope(window=4, rotary=0.5), lambda r: clipped(r, 4)),
        (LeakyReRope(window=3, factor=4), lambda r: clipped(r, 3, 4)),
        (LeakyReRope(window=2, factor=1 / 16), lambda r: clipped(r, 2, 1 / 16)),
    ],
    ids=["rerope", "partial", "leaky", "inverse leaky"],
)
def test_a_score_is_that_of_rope_at_the_clipped_distance(
    position: ReRope, distance
) -> None:
    """Against q turned by each pair's own distance, in both directions of time."""
    q, k = (
        torch.randn(2, 3, 7, 16, dtype=torch.float64),
        torch.randn(2, 1, 9, 16, dtype=torch.float64),
    )
    pos_q, pos_k = torch.arange(4, 11)[None], torch.arange(9)[None]
    found = AttentionSpec(position=position).scores(q, k, pos_q, pos_k, {})
    plain = Rope(rotary=position.rotary)
    for i in range(7):
        for j in range(9):
            r = distance(pos_q[0, i] - pos_k[0, j]).to(torch.float64)
            turned, still = plain.encode(
                q[:, :, i : i + 1], k[:, :, j : j + 1], r.view(1, 1), torch.zeros(1, 1)
            )
            expected = (turned * still).sum(-1)[..., 0] / 4
            assert torch.allclose(found[:, :, i, j], expected, atol=1e-10), (i, j)


def test_self_extend_groups_positions_outside_its_window() -> None:
    """Distances of row 11, window 4, groups of 3: ⌊11/3⌋ - ⌊j/3⌋ + 4 - ⌊4/3⌋ beyond it."""
    position = LeakyReRope(window=4, factor=3, rounded=True)
    q, k = (
        torch.randn(1, 1, 1, 2, dtype=torch.float64),
        torch.randn(1, 1, 12, 2, dtype=torch.float64),
    )
    found = AttentionSpec(position=position).scores(
        q, k, torch.tensor([[11]]), torch.arange(12)[None], {}
    )
    for j, r in enumerate([6, 6, 6, 5, 5, 5, 4, 4, 3, 2, 1, 0]):
        cos, sin = math.cos(r), math.sin(r)
        a, b = q[0, 0, 0].tolist()
        x, y = k[0, 0, j].tolist()
        expected = ((a * cos - b * sin) * x + (b * cos + a * sin) * y) / math.sqrt(2)
        assert float(found[0, 0, 0, j]) == pytest.approx(expected, abs=1e-12), j


def test_alibi_slopes_of_powers_of_two_and_of_others() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == alibi_slopes(8).tolist()
    assert twelve[8:].tolist() == pytest.approx(
        [0.707107, 0.353553, 0.176777, 0.088388], abs=1e-6
    )
    assert alibi_slopes(16)[:3].tolist() == pytest.approx(
        [0.707107, 0.5, 0.353553], abs=1e-6
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_biases_by_hand() -> None:
    q = k = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    at = torch.arange(3)[None]
    alibi = AttentionSpec(position=ALiBi()).scores(q, k, at, at, {})
    assert alibi[0, :, 2].tolist() == [[-2 / 16, -1 / 16, 0], [-2 / 256, -1 / 256, 0]]
    params = {
        "kerple_a": torch.tensor([0.5, -1.0]),
        "kerple_p": torch.tensor([1.5, 3.0]),
    }
    log = AttentionSpec(position=Kerple()).scores(q, k, at, at, params)
    assert log[0, 0, 2].tolist() == pytest.approx(
        [-1.5 * math.log(2), -1.5 * math.log(1.5), 0]
    )
    assert log[0, 1, 2].tolist() == pytest.approx(
        [-3 * math.log(1.02), -3 * math.log(1.01), 0], rel=1e-6
    )  # a ≥ 0.01
    power = AttentionSpec(position=Kerple(kind="power")).scores(q, k, at, at, params)
    assert power[0, 0, 2].tolist() == pytest.approx([-0.5 * 2**1.5, -0.5, 0], rel=1e-6)
    assert power[0, 1, 2].tolist() == pytest.approx(
        [-0.01 * 4, -0.01, 0], rel=1e-6
    )  # p ≤ 2


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_has_finite_gradients_at_distance_zero(kind: str) -> None:
    spec = AttentionSpec(position=Kerple(kind=kind))  # type: ignore[arg-type]
    params = {name: p.requires_grad_() for name, p in spec.init_params(2).items()}
    q, at = torch.randn(1, 2, 3, 4), torch.arange(3)[None]
    spec.scores(q, q, at, at, params).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in params.values())


def test_xpos_scores_are_those_of_rope_faded_by_the_distance() -> None:
    d, at = 8, torch.arange(6)[None]
    assert xpos_decay(d).tolist() == pytest.approx(
        [(i + 3.2) / 11.2 for i in (0, 2, 4, 6)]
    )
    for pair in range(4):
        q = torch.zeros(1, 1, 6, d, dtype=torch.float64)
        q[..., 2 * pair : 2 * pair + 2] = torch.randn(6, 2, dtype=torch.float64)
        plain = AttentionSpec(position=Rope(pairing="interleaved")).logits(
            q, q, at, at, {}
        )
        faded = AttentionSpec(position=XPos()).logits(q, q, at, at, {})
        distance = (at[0, :, None] - at[0]).double()
        assert torch.allclose(
            faded, plain * xpos_decay(d)[pair] ** (distance / 512), rtol=1e-9
        )


def test_scores_depend_on_the_distance_only() -> None:
    q, k = (
        torch.randn(1, 2, 5, 8, dtype=torch.float64),
        torch.randn(1, 2, 5, 8, dtype=torch.float64),
    )
    at = torch.arange(5)[None]
    for position in (
        ReRope(window=2),
        LeakyReRope(window=2, factor=3),
        ALiBi(),
        XPos(),
    ):
        spec = AttentionSpec(position=position)
        near, far = (
            spec.logits(q, k, at + start, at + start, {}) for start in (0, 100)
        )
        assert torch.allclose(near, far, atol=1e-9), position.formula()


def test_yarn_of_the_released_code_at_any_length_and_base() -> None:
    """Its loop over pairs, written out; also where both ends of the ramp are clamped, or one."""
    for base, length, half in itertools.product(
        (1.5, 10.0, 1e4), (2.0, 6.0, 40.0, 512.0, 1e7), (1, 5, 16)
    ):
        theta = rope_frequencies(2 * half, base)
        ends = [
            2 * half * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (32, 1)
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), 2 * half - 1)
        width = 0.001 if low == high else high - low
        expected = []
        for i, own in enumerate(theta.tolist()):
            slowed = min(max((i - low) / width, 0.0), 1.0)
            expected.append(own / 8 * slowed + own * (1 - slowed))
        found = yarn(theta, 8.0, length, base=base)
        assert found.tolist() == pytest.approx(expected, rel=1e-12), (
            base,
            length,
            half,
        )


def test_slowed_pairs_by_hand() -> None:
    # Pairs that turn so often in 100 tokens: those of at most 1 turn are slowed 8 times, those of 4 and more stay.
    turns = torch.tensor([0.5, 1.0, 2.5, 4.0, 6.0], dtype=torch.float64)
    theta = turns * 2 * math.pi / 100
    expected = [1 / 8, 1 / 8, 0.5 + 0.5 / 8, 1.0, 1.0]
    assert (llama3(theta, 8.0, 100) / theta).tolist() == pytest.approx(
        expected, rel=1e-12
    )
    assert (yarn_magnitude(0.5), yarn_magnitude(1.0)) == (1.0, 1.0)
    one, two = torch.tensor([1.0]), torch.tensor([1.0, 0.01])
    assert ntk(one, 8.0).tolist() == [1.0]
    assert ntk(two, 8.0, exact=True).tolist() == pytest.approx([1.0, 0.01 / 8])
    assert torch.equal(ntk_mixed(THETA, 8.0), ntk_mixed(THETA, 8.0, 0.625))


def test_the_kernels_of_a_distance_by_hand_also_behind_the_query_and_beyond_their_ranges() -> (
    None
):
    r = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)
    for a, p in ((0.5, 1.5), (-1.0, 1.5), (0.5, -1.0), (0.5, 0.005), (2.0, 3.0)):
        at_least_a, at_least_p = max(a, 0.01), max(p, 0.01)
        log = [-at_least_p * math.log(1 + at_least_a * abs(x)) for x in r.tolist()]
        power = [
            -at_least_a * abs(x) ** min(at_least_p, 2.0) if x else 0.0
            for x in r.tolist()
        ]
        given = r, torch.tensor(a), torch.tensor(p)
        assert kerple_log(*given).tolist() == pytest.approx(log, rel=1e-6), (a, p)
        assert kerple_power(*given).tolist() == pytest.approx(power, rel=1e-6), (a, p)
