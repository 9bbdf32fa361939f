"""The throughput of a run: tokens a second, and the share of the device's arithmetic that the model needs."""

from __future__ import annotations

import torch
from torch import nn

from qkeel.nn.spec_module import SpecModule

# Dense bf16 operations a second by the vendors' data sheets; the first name that is part of the device's counts.
PEAKS: dict[str, float] = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "L4": 121e12,
}


def flops_per_token(model: nn.Module, context: int) -> float:
    """Operations of one training token: 6 per weight of every matrix product, and those of the visible pairs.

    3 · 2 · h (d + d') per visible key: forward and twice that backward, scores and weighted values of h heads. A causal
    query at i sees i + 1 keys, under a window at most so many. The embedding's look-up, norms and what is computed
    twice count nothing.

    Args:
        model: whose attention modules are qkeel's. context: tokens of a training sequence.

    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B (which takes all T keys as visible).
    """
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += 6 * module.weight.numel()
        if isinstance(module, SpecModule):
            reach = module.spec.position.reach or context
            keys = sum(min(i + 1, reach) for i in range(context)) / context
            out = module.get_submodule("o_proj")
            assert isinstance(out, nn.Linear)
            total += 6 * keys * (module.n_heads * module.head_dim + out.in_features)
    return total


def peak(device: torch.device, dtype: str) -> float | None:
    """Operations a second that the device can do in bf16, None where that is not known or not what is computed in."""
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for known, value in PEAKS.items() if known in name), None)


def speed(tokens: int, seconds: float, flops: float, limit: float | None) -> dict[str, float | None]:
    """The tokens_per_second and mfu of records.STEP_FIELDS; None where nothing was trained or the limit is unknown."""
    rate = tokens / seconds if tokens and seconds > 0 else None
    share = None if rate is None or limit is None else rate * flops / limit
    return {"tokens_per_second": rate, "mfu": share}
