"""What lalr and qk_clip add to an optimizer step: ratios to torch's fused AdamW on the same weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.measure import Row, interleave
from qkeel.nn import Attention
from qkeel.remedies import apply

BASE = "AdamW, fused"


def _model(layers: int, heads: int, dim: int) -> nn.Module:
    """Attention and an MLP of 4·dim a layer, as large as a transformer's matrices are; never run forward."""
    blocks = []
    for _ in range(layers):
        block = nn.Module()
        block.attention = Attention(dim, heads)
        block.up, block.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        blocks.append(block)
    return nn.ModuleList(blocks)


def bench(layers: int, heads: int, dim: int, rounds: int) -> list[Row]:
    """One optimizer step each: the same weights, the same fixed gradients."""

    def case(remedy: str, **options: bool) -> Callable[[], object]:
        model = _model(layers, heads, dim)
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
        apply(remedy, model, optimizer)
        return optimizer.step

    cases = {
        BASE: case("none", fused=True),
        "AdamW, fused + lalr": case("lalr", fused=True),
        "AdamW, fused + lalr (spectral)": case("lalr:norm=spectral", fused=True),
        "AdamW, fused + qk_lr": case("qk_lr", fused=True),
        "AdamW, foreach": case("none", foreach=True),
    }
    return interleave(cases, BASE, rounds)
