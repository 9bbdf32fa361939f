"""Remedies on q and k that gains make of one projection (nn.GAU)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.monitor.weight_norms import WeightNorms
from qkeel.nn import GAU, GAUBlock
from qkeel.sites import Tap

WIDTH, SIZE, LR, TAU = 12, 8, 0.5, 0.3


def gau(bias: bool = False) -> GAU:
    torch.manual_seed(0)
    module = GAU(WIDTH, size=SIZE, bias=bias).double()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0.2, 0.8)
    return module


def largest(module: nn.Module, x: Tensor) -> float:
    with Tap(module.eval()) as tap, torch.no_grad():
        module(x)
        (stats,) = tap.read().values()
    module.train()
    return float(stats.max_logit)


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_lalr_gives_each_weight_the_product_of_what_else_is_on_the_way(
    norm: str,
) -> None:
    """logit ~ |W_z|^2 |g_q| |g_k|: W_z is its own partner on the other side."""
    module = gau()
    w, q, k = module.qk_proj.z_proj.weight, module.qk_proj.q_gain, module.qk_proj.k_gain
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    with qkeel.apply(module, f"lalr:tau={TAU},norm={norm}", optimizer):
        with torch.no_grad():
            for p, factor in ((w, 2.0), (q, 5.0), (k, 3.0)):
                p.mul_(factor)
        before = [p.detach().clone() for p in (w, q, k, module.o_proj.weight)]
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    moved = [
        (b - p.detach()) / LR for b, p in zip(before, (w, q, k, module.o_proj.weight))
    ]
    for found, expected in zip(
        moved, (TAU / (2 * 5 * 3), TAU / (2 * 2 * 3), TAU / (2 * 2 * 5), 1.0)
    ):
        assert torch.allclose(found, torch.full_like(found, expected), rtol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_a_clip_scales_gains_and_offsets_by_the_root_and_gives_exactly_the_threshold(
    bias: bool,
) -> None:
    module, x = gau(bias), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    top = largest(module, x)
    assert top > 4
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with qkeel.apply(module, "qk_clip:threshold=2", optimizer):
        module(x).sum().backward()
        optimizer.step()
    assert largest(module, x) == pytest.approx(2.0, rel=1e-12)
    for name, p in module.named_parameters():
        gains = name.startswith(("qk_proj.q_", "qk_proj.k_"))
        factor = (2.0 / top) ** 0.5 if gains else 1.0
        assert torch.allclose(p, before[name] * factor, rtol=1e-12, atol=0), name


@pytest.mark.parametrize(
    "remedy", ["qk_lr:factor=0.5", "qk_weight_decay:decay=0.1", "spectral_cap:cap=0.5"]
)
def test_other_remedies_on_steps_take_both_gains_and_the_projection(
    remedy: str,
) -> None:
    module = gau()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    plain = gau()
    ordinary = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    with qkeel.apply(module, remedy, optimizer):
        for model, stepper in ((module, optimizer), (plain, ordinary)):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            stepper.step()
    changed = {
        n
        for (n, a), b in zip(module.named_parameters(), plain.parameters())
        if not torch.equal(a, b)
    }
    assert changed == {"qk_proj.z_proj.weight", "qk_proj.q_gain", "qk_proj.k_gain"}


def test_the_monitors_spectral_norm_is_that_of_the_matrices_written_out() -> None:
    module = gau()
    w, q, k = (
        p.detach()
        for p in (
            module.qk_proj.z_proj.weight,
            module.qk_proj.q_gain,
            module.qk_proj.k_gain,
        )
    )
    numbers = WeightNorms(module, qkeel.find_sites(module), None).read()
    expected = torch.linalg.matrix_norm((q[:, None] * w).mT @ (k[:, None] * w), 2)
    assert torch.allclose(numbers["", "qk_spectral_norm"], expected[None], rtol=1e-9)
    assert torch.allclose(numbers["", "query_weight_norm"], q.norm()[None], rtol=1e-12)


def test_the_norm_before_a_gated_unit_is_dropped_where_values_are_normed_too() -> None:
    torch.manual_seed(0)
    block, x = GAUBlock(GAU(WIDTH, size=SIZE)), torch.randn(2, 7, WIDTH)
    first, norm = block(x), block.norm
    with qkeel.apply(block, "qkv_norm:kind=rms,gain=none"):
        assert isinstance(block.norm, nn.Identity)
        assert torch.equal(block(x), x + block.attention(x))
    assert block.norm is norm
    assert torch.equal(block(x), first)
