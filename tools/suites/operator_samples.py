"""torch's own OpInfo samples of scaled_dot_product_attention, asked of qkeel's: outputs, strides, gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from qkeel.nn import functional_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Of the sum of a row of products, against torch's own result; gradients come from larger numbers.
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question asked of one sample: what came, where that is not what torch gives."""

    what: str
    sample: str
    difference: str


def checks() -> Iterator[Check]:
    """Every sample of every dtype, without and with gradients."""
    (operator,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    for dtype in DTYPES:
        for gradient in (False, True):
            for number, sample in enumerate(operator.sample_inputs("cpu", dtype, requires_grad=gradient)):
                name = f"{dtype}, sample {number}, {'with' if gradient else 'without'} gradient"
                # Dropout draws; torch's function is called for it either way.
                if not sample.kwargs.get("dropout_p"):
                    yield from _of(sample, name, NEAR[dtype], gradient=gradient)


def _of(sample: Any, name: str, near: float, *, gradient: bool) -> Iterator[Check]:
    found = []
    for function in (F.scaled_dot_product_attention, functional_attention):
        try:
            found.append(function(sample.input, *sample.args, **sample.kwargs))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    theirs, ours = found
    if isinstance(theirs, str) or isinstance(ours, str):
        same = isinstance(theirs, str) and isinstance(ours, str)
        yield Check(what="errors", sample=name, difference="" if same else f"torch: {theirs}, qkeel: {ours}")
        return
    yield Check(what="outputs", sample=name, difference=_difference(theirs, ours, near))
    # The step along a dimension of one number means nothing.
    strides = [[step for step, size in zip(x.stride(), x.shape) if size > 1] for x in (theirs, ours)]
    yield Check(what="strides", sample=name, difference="" if strides[0] == strides[1] else f"{strides}")
    leaves = [x for x in (sample.input, *sample.args) if isinstance(x, Tensor) and x.requires_grad]
    if gradient and leaves and theirs.numel():
        grads = [torch.autograd.grad(out.double().cos().sum(), leaves, allow_unused=True) for out in found]
        for a, b in zip(*grads):
            missing = (a is None) != (b is None)
            yield Check(
                what="gradients", sample=name,
                difference="one is None" if missing else "" if a is None else _difference(a, b, 5 * near),
            )  # fmt: skip


def _difference(theirs: Tensor, ours: Tensor, near: float) -> str:
    if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
        return f"{theirs.dtype} {tuple(theirs.shape)} against {ours.dtype} {tuple(ours.shape)}"
    if not theirs.numel():
        return ""
    a, b = theirs.detach().double(), ours.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "not finite at other places"
    most = float((a - b).abs().nan_to_num(0.0).max()) / max(1.0, float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return "" if most <= near else f"off by {most:.2g} of the largest"


def outcomes() -> tuple[Counter[str], Counter[str], list[Check]]:
    """How many of each kind were asked and were the same, and those that were not."""
    asked, same, different = Counter[str](), Counter[str](), []
    for check in checks():
        asked[check.what] += 1
        same[check.what] += not check.difference
        if check.difference:
            different.append(check)
    return asked, same, different
