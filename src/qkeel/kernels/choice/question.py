"""What of a call its fastest kernel depends on, told in well under a microsecond."""

from __future__ import annotations

from typing import Literal

import torch

from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap
from qkeel.spec.normalizer import Softmax

Form = Literal["folded", "masked", "capped", "distance"]
Statistics = Literal["none", "exact", "bracket"]
# Device, dtype, class of head_dim, form, whether a gradient is wanted, which statistics are asked.
Question = tuple[torch.device, torch.dtype, int, Form, bool, Statistics]

HEAD_DIMS = (64, 128)  # up to 64, and beyond
TOKENS = (1, 128, 512, 2048)  # query tokens up to each; beyond the last as at the last


def question(call: AttentionCall, statistics: Statistics) -> tuple[Question, int]:
    """The row of the tables that a call asks for, and its number of query tokens."""
    q = call.q
    _, _, tokens, head_dim = q.shape
    gradient = (q.requires_grad or call.k.requires_grad or call.v.requires_grad) and torch.is_grad_enabled()
    size = HEAD_DIMS[0] if head_dim <= HEAD_DIMS[0] else HEAD_DIMS[1]
    return (q.device, q.dtype, size, form(call), gradient, statistics), tokens


def form(call: AttentionCall) -> Form:
    """What stands between q·k and the weights.

    "distance": the position does not fold into q and k (ReRoPE, biases); "capped": a cap, or no softmax; "masked": a
    mask or a window; "folded": nothing but the scale and causality.
    """
    spec = call.spec
    if not spec.position.folds:
        return "distance"
    if type(spec.cap) is not NoCap or type(spec.normalizer) is not Softmax:
        return "capped"
    if call.mask is not None or spec.position.reach is not None:
        return "masked"
    return "folded"
