"""The compiled gradient of attention is that of the oracle, whose float64 run is the truth here."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qkeel
from qkeel import reference
from qkeel.functional.distances import alibi_slopes
from qkeel.kernels.native import attention, attention_backward
from qkeel.spec import ALiBi, AttentionSpec, NoPosition, SlidingWindow, Softcap
from qkeel.spec.cap import NoCap

Gradients = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _ready(library: object) -> None:
    assert attention.ready()
    assert attention_backward.ready()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call; mask says how it is made."""

    t: int = 129
    s: int | None = None
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (64, 64)
    causal: bool = True
    window: int = 0
    cap: float = 0.0
    alibi: bool = False
    mask: str = ""
    size: float = 1.0  # of q

    def mask_of(self, b: int) -> Tensor | None:
        t, s = self.t, self.s or self.t
        if self.mask == "padding":
            return (torch.arange(s) < torch.tensor([s, max(1, s // 2)])[:, None])[:, None, None].expand(b, 1, 1, s)
        if self.mask == "pairs":
            return torch.rand(b, self.heads[0], t, s) > 0.4
        if self.mask == "no key":
            return torch.rand(b, 1, t, 1).expand(b, 1, t, s) > 0.5
        if self.mask == "added":
            return torch.randn(1, self.heads[0], t, s).mT.contiguous().mT
        if self.mask == "added, hiding":
            kept = torch.rand(b, 1, t, s) > 0.3
            return torch.randn(b, 1, t, s).masked_fill(~kept, torch.finfo(torch.float32).min)
        return None

    @property
    def spec(self) -> AttentionSpec:
        inner = ALiBi() if self.alibi else NoPosition()
        position = SlidingWindow(window=self.window, inner=inner) if self.window else inner
        return AttentionSpec(position=position, cap=Softcap(self.cap) if self.cap else NoCap())


CASES = [
    *(Case(t=t) for t in (1, 7, 64, 129, 512)),
    *(Case(t=t, causal=False, widths=(40, 24)) for t in (1, 7, 64, 129)),
    Case(t=200, s=333, heads=(6, 1), widths=(32, 8)),
    Case(t=1, s=129, widths=(128, 128)),
    Case(t=129, s=70),  # the first queries see nothing
    Case(t=512, heads=(1, 1), widths=(8, 16)),  # few heads: cut by keys
    Case(t=300, window=50),
    Case(t=129, s=300, causal=False, window=33),
    Case(t=129, cap=5.0),
    Case(t=129, cap=30.0, mask="added", widths=(16, 48)),
    Case(t=200, alibi=True),
    Case(t=129, alibi=True, causal=False, window=40, cap=10.0, mask="pairs"),
    *(Case(t=129, s=160, mask=m, causal=c) for m in ("padding", "pairs", "added", "added, hiding") for c in (True, False)),
    Case(t=129, mask="no key"),
    Case(t=64, size=3e4),
    Case(t=129, size=1e4, cap=50.0),
    Case(t=129, size=1e4, widths=(48, 64)),
]
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.contiguous(),
    lambda x: torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]],
    lambda x: x.mT.contiguous().mT,
    lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
]


def given(case: Case, dtype: torch.dtype, layout: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient from above."""
    (h, g), (d, e), t, s = case.heads, case.widths, case.t, case.s or case.t
    shapes = [(2, h, t, d), (2, g, s, d), (2, g, s, e), (2, h, t, e)]
    made = [LAYOUTS[(layout + i) % len(LAYOUTS)](torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)]
    return made[0] * case.size, made[1], made[2], made[3]


def torchs(case: Case, tensors: tuple[Tensor, ...], mask: Tensor | None, dtype: torch.dtype) -> Gradients:
    """In float64 the oracle's; else those of SDPA where it takes the call, or of full rows of logits."""
    impl = "chunked" if case.cap or case.alibi or (mask is not None and mask.is_floating_point()) else "sdpa"
    *qkv, up = (x.detach().to(dtype).contiguous() for x in tensors)  # dense ones go to the fused kernel of torch
    leaves = [x.requires_grad_() for x in qkv]
    if dtype == torch.float64:
        out = reference.attend(case.spec, *leaves, causal=case.causal, mask=mask).out
    else:
        out = qkeel.attention(*leaves, spec=case.spec, causal=case.causal, mask=mask, impl=impl)
    dq, dk, dv = torch.autograd.grad(out, leaves, up)
    return dq, dk, dv


def arguments(case: Case, tensors: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Any, ...]:
    """What the operator takes, with the output and lse of the compiled way there."""
    q, k, v, up = tensors
    slopes = alibi_slopes(q.shape[1]).float() if case.alibi else None
    rest = (mask, slopes, q.shape[-1] ** -0.5, case.causal, case.window, case.cap)
    out, lse, *_ = torch.ops.qkeel_native.attention(q, k, v, *rest, False)
    return up, q, k, v, out, lse, *rest


def native(case: Case, tensors: tuple[Tensor, ...], mask: Tensor | None) -> Gradients:
    return torch.ops.qkeel_native.attention_backward(*arguments(case, tensors, mask))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_gradients_are_those_of_the_oracle(case: Case) -> None:
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        if case.size > 1e3 and dtype == torch.float16:
            continue  # q does not fit
        tensors, mask = given(case, dtype, i + CASES.index(case)), case.mask_of(2)
        truth, theirs = torchs(case, tensors, mask, torch.float64), torchs(case, tensors, mask, dtype)
        for name, mine, other, true in zip("qkv", native(case, tensors, mask), theirs, truth):
            assert mine.dtype == dtype
            assert mine.isfinite().all()
            allowed = 2 * ((other - true).abs().max() + torch.finfo(dtype).eps * true.abs().max())
            assert (mine.double() - true).abs().max() <= allowed, f"d{name}, {dtype}"
