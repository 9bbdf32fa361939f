"""A trial of Triton's step of AdamW on a device, against torch's fused one."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from qkeel.kernels.native.adamw import AdamOptions, AdamTensors
from qkeel.kernels.triton import adam_lines

ROUNDING = 1e-5  # of weights of size 1: ten times what two ways of rounding differ by after these steps
_STEPS = 3
_SHAPES, _AXES = ((7, 600), (40, 70)), (0, 1)  # rows of the first, columns of the second: both end inside a tile


@torch.no_grad()
def deviation(device: torch.device) -> float:
    """Returns the largest difference from torch's fused AdamW after steps of small weights on the device, whose lines
    have rate 1, or 0 in every third; or that of the sums of squares, relative, if it is larger. Waits for the device.
    """
    drawn = torch.Generator().manual_seed(0)
    like = {"generator": drawn, "dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    weights, *gradients = ([torch.randn(s, **like).to(device) for s in _SHAPES] for _ in range(_STEPS + 1))
    rates = [(torch.arange(s[a], device=device) % 3 > 0).float() for s, a in zip(_SHAPES, _AXES)]
    means, variances, their_means, their_variances = ([torch.zeros_like(w) for w in weights] for _ in range(4))
    steps, their_steps = ([w.new_zeros(()) for w in weights] for _ in range(2))
    squares = [torch.zeros(len(rate), dtype=torch.float64, device=device) for rate in rates]
    own, theirs = ([w.clone() for w in weights] for _ in range(2))
    t = AdamTensors(
        weights=own, gradients=own, means=means, variances=variances, maxima=[], steps=steps, rates=rates,
        squares=squares, axes=_AXES,
    )  # fmt: skip
    o = AdamOptions(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, decoupled=True, maximize=False)
    for given in gradients:
        adam_lines.adam_lines(dataclasses.replace(t, gradients=given), o)
        adamw(
            theirs, given, their_means, their_variances, [], their_steps, fused=True, amsgrad=False, maximize=False,
            lr=o.lr, beta1=o.beta1, beta2=o.beta2, weight_decay=o.decay, eps=o.eps,
        )  # fmt: skip
    return float(torch.stack([_off(*row) for row in zip(own, theirs, weights, rates, squares, _AXES)]).max())


def _off(own: Tensor, theirs: Tensor, before: Tensor, rate: Tensor, squares: Tensor, axis: int) -> Tensor:
    expected = torch.where(rate.unsqueeze(1 - axis) > 0, theirs, before)
    sums = own.double().square().sum(1 - axis)
    return torch.maximum((own - expected).abs().max().double(), (squares / sums - 1).abs().max())
