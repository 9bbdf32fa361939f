"""Attention of a few queries to many keys as one compiled operator, without a gradient."""

from __future__ import annotations

from torch import Tensor

from qkeel.kernels.native.operator import OperatorSource


def _shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    b, h, t, _d = q.shape
    return q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)


OPERATORS = OperatorSource("decode", {"decode": _shape})
ready = OPERATORS.ready
