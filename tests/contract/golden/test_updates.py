"""QK-Clip and Newton-Schulz."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkeel.functional.bounds import newton_schulz, qk_clip_gamma, repeat_groups


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def max_logits(w_q: Tensor, w_k: Tensor, x: Tensor) -> Tensor:
    """Largest scaled logit per query head; w [h d m], x [t m], grouped keys repeated."""
    q, k = x @ w_q.mT, x @ w_k.mT
    k = k.repeat_interleave(len(w_q) // len(w_k), dim=0)
    return (q @ k.mT / math.sqrt(w_q.shape[1])).amax((-2, -1))


# O18


def test_qk_clip_factor_by_hand() -> None:
    s = torch.tensor([400.0, 100.0, 99.9, 0.0, -250.0, -math.inf, math.nan])
    assert qk_clip_gamma(s, 100.0).tolist() == [0.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_qk_clip_leaves_a_head_whose_logits_overflowed() -> None:
    # τ/∞ = 0 would set the head's weights to zero for good.
    assert qk_clip_gamma(torch.tensor([math.inf]), 100.0).tolist() == [1.0]


def test_after_one_clip_triggered_heads_sit_at_the_threshold_and_others_are_bit_identical() -> (
    None
):
    w_q, w_k, x = randn(4, 8, 12), randn(4, 8, 12, seed=1), randn(30, 12, seed=2)
    w_q[2:] *= 0.1
    before = max_logits(w_q, w_k, x)
    tau = before.sort().values[1:3].mean().item()
    root = qk_clip_gamma(before, tau).sqrt()[:, None, None]
    after = max_logits(w_q * root, w_k * root, x)
    over = before > tau
    assert over.tolist() == [True, True, False, False]
    torch.testing.assert_close(
        after[over], torch.full_like(after[over], tau), rtol=1e-13, atol=0
    )
    assert torch.equal((w_q * root)[~over], w_q[~over])
    assert torch.equal((w_k * root)[~over], w_k[~over])


def test_with_grouped_keys_clipping_the_query_alone_is_exact_and_the_group_rule_over_clips() -> (
    None
):
    w_q, w_k, x = randn(4, 8, 12), randn(2, 8, 12, seed=1), randn(30, 12, seed=2)
    w_q[1] *= 0.7
    before = max_logits(w_q, w_k, x)
    tau = 0.5 * before.min().item()
    exact = max_logits(w_q * qk_clip_gamma(before, tau)[:, None, None], w_k, x)
    torch.testing.assert_close(exact, torch.full_like(exact, tau), rtol=1e-13, atol=0)
    # Megatron: one factor per key group, from the largest of its query heads.
    per_group = qk_clip_gamma(before.view(2, -1).amax(1), tau).sqrt()
    per_head = repeat_groups(per_group, 4)
    grouped = max_logits(
        w_q * per_head[:, None, None], w_k * per_group[:, None, None], x
    )
    worst = before == repeat_groups(before.view(2, -1).amax(1), 4)
    torch.testing.assert_close(
        grouped[worst], torch.full_like(grouped[worst], tau), rtol=1e-13, atol=0
    )
    assert (grouped[~worst] < 0.99 * tau).all()


def test_latent_attention_clipped_root_root_and_whole_scales_the_logit_by_gamma() -> (
    None
):
    # K2: √γ on the per-head nope parts of q and k, γ on the rope part of q, the shared rope key untouched.
    q_nope, k_nope, q_rope, k_rope = (randn(10, 8, seed=s) for s in range(4))
    logit = (q_nope @ k_nope.mT + q_rope @ k_rope.mT) / 4
    gamma = qk_clip_gamma(logit.amax()[None], 0.5)
    root = gamma.sqrt()
    clipped = ((root * q_nope) @ (root * k_nope).mT + (gamma * q_rope) @ k_rope.mT) / 4
    assert clipped.amax().item() == pytest.approx(0.5, rel=1e-13)
    torch.testing.assert_close(clipped, gamma * logit, rtol=1e-12, atol=1e-15)


def test_groups_are_consecutive_query_heads() -> None:
    assert repeat_groups(torch.tensor([1.0, 2.0]), 6).tolist() == [
        1.0,
        1.0,
        1.0,
        2.0,
        2.0,
        2.0,
    ]


# O24


def quintic(x: float, steps: int = 5) -> float:
    """What each singular value goes through."""
    for _ in range(steps):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (6, 6)])
def test_newton_schulz_moves_singular_values_by_the_quintic_and_keeps_the_vectors(
    shape: tuple[int, int],
) -> None:
    g = randn(*shape)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    moved = torch.tensor(
        [quintic(x) for x in (s / (s.norm() + 1e-7)).tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(newton_schulz(g), u * moved @ vt, rtol=0, atol=1e-9)


def test_newton_schulz_brings_singular_values_to_one_within_a_third() -> None:
    s = torch.linalg.svdvals(newton_schulz(randn(3, 32, 128)))
    assert s.min() > 0.65
    assert s.max() < 1.25


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 96)])
def test_a_full_rank_orthogonal_update_has_rms_one_over_root_of_the_longer_side(
    shape: tuple[int, int],
) -> None:
    g = randn(*shape)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    longer = max(shape)
    assert (u @ vt).square().mean().sqrt().item() == pytest.approx(
        longer**-0.5, rel=1e-12
    )
    # Moonlight's factor 0.2·√max(A, B) therefore gives an update of RMS 0.2; Newton-Schulz comes within 30 %.
    update = 0.2 * math.sqrt(longer) * newton_schulz(g)
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.3)


def test_newton_schulz_treats_tall_and_wide_alike_and_maps_zero_to_zero() -> None:
    g = randn(5, 9)
    torch.testing.assert_close(newton_schulz(g.mT), newton_schulz(g).mT, rtol=0, atol=0)
    assert torch.equal(newton_schulz(torch.zeros(3, 4)), torch.zeros(3, 4))
