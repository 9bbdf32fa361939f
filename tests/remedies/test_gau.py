"""Remedies on q and k that gains make of one projection (nn.GAU)."""

import pytest
import torch

import qkeel
from qkeel.nn import GAU
from qkeel.sites import Tap

WIDTH, SIZE, LR, TAU = 12, 8, 0.5, 0.3


def gau(bias=False):
    torch.manual_seed(0)
    module = GAU(WIDTH, size=SIZE, bias=bias).double()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0.2, 0.8)
    return module


def largest(module, x):
    with Tap(module.eval()) as tap, torch.no_grad():
        module(x)
        (stats,) = tap.read().values()
    module.train()
    return float(stats.max_logit)


@pytest.mark.parametrize("bias", [False, True])
def test_a_clip_scales_gains_and_offsets_by_the_root_and_gives_exactly_the_threshold(
    bias,
):
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
