"""The compiled gradient of attention is that of the oracle, whose float64 run is the truth here."""

from __future__ import annotations

import dataclasses
import math
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.quick import quick
from torch import Tensor

import qkeel
from qkeel import reference
from qkeel.functional.bounds import alibi_slopes
from qkeel.kernels import compiled_attention as attention
from qkeel.spec import ALiBi, AttentionSpec, NoPosition, SlidingWindow, Softcap
from qkeel.spec.logits import NoCap

Gradients = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _ready(library: object) -> None:
    assert attention.ready()
    assert attention.backward_ready()


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
    Case(t=2048, heads=(1, 1), widths=(16, 16)),
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
    *(
        Case(t=129, s=160, mask=m, causal=c)
        for m in ("padding", "pairs", "added", "added, hiding")
        for c in (True, False)
    ),
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


@pytest.mark.parametrize("case", quick(CASES, lambda case: case.t < 512), ids=repr)
def test_gradients_are_those_of_the_oracle(case: Case) -> None:
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        if case.size > 1e3 and dtype == torch.float16:
            continue  # q does not fit
        tensors, mask = given(case, dtype, i + CASES.index(case)), case.mask_of(2)
        truth, theirs = torchs(case, tensors, mask, torch.float64), torchs(case, tensors, mask, dtype)
        for name, mine, other, true in zip("qkv", native(case, tensors, mask), theirs, truth):
            assert mine.dtype == dtype
            assert mine.isfinite().all()
            # The weights exp(z - lse) carry the rounding of lse, a logarithm and a sum of about ln s.
            rounding = max(1.0, math.log(case.s or case.t)) * torch.finfo(dtype).eps * true.abs().max()
            allowed = 2 * ((other - true).abs().max() + rounding)
            assert (mine.double() - true).abs().max() <= allowed, f"d{name}, {dtype}"


def test_a_row_with_all_its_weight_on_one_key_passes_nothing_to_q_and_k() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for case in (Case(t=1), Case(t=64, size=1e8), *(Case(t=t, window=1) for t in range(2, 15))):
            dq, dk, dv = native(case, given(case, dtype), None)
            assert not dq.any()
            assert not dk.any()
            assert dv.any()


def test_two_keys_by_hand() -> None:
    # z = (ln 3, 0): weights 3/4 and 1/4, values 8 and 0, so out 6; dz = 3/4 · (8 - 6) = 1.5 and 1/4 · (0 - 6) = -1.5.
    q, k, v = (torch.zeros(1, 1, n, 8) for n in (1, 2, 2))
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = 1.0, math.log(3), 8.0
    up = torch.zeros(1, 1, 1, 8)
    up[..., 0] = 1.0
    rest = (None, None, 1.0, False, 0, 0.0)
    out, lse, *_ = torch.ops.qkeel_native.attention(q, k, v, *rest, False)
    dq, dk, dv = torch.ops.qkeel_native.attention_backward(up, q, k, v, out, lse, *rest)
    torch.testing.assert_close(dq[0, 0, 0, 0], torch.tensor(1.5 * math.log(3)))
    torch.testing.assert_close(dk[0, 0, :, 0], torch.tensor([1.5, -1.5]))
    torch.testing.assert_close(dv[0, 0, :, 0], torch.tensor([0.75, 0.25]))


def test_threads_change_no_bit(assert_threads_change_no_bit: Callable[..., None]) -> None:
    for case in (Case(t=300, heads=(4, 4)), Case(t=500, heads=(3, 1), widths=(16, 16)), Case(t=64)):
        tensors = given(case, torch.float32)
        assert_threads_change_no_bit(lambda case=case, tensors=tensors: native(case, tensors, None))


@pytest.mark.usefixtures("_poisoned")
def test_every_number_is_written() -> None:
    for case in (Case(t=129), Case(t=500, heads=(2, 1), widths=(8, 16)), Case(t=130, s=70, window=20), Case(t=1)):
        for layout in range(len(LAYOUTS)):
            assert all(x.isfinite().all() for x in native(case, given(case, torch.float32, layout), None))


def test_rows_that_see_no_key_have_no_gradient_and_give_none() -> None:
    case = Case(t=10, s=10, causal=False)
    tensors, mask = given(case, torch.float32), torch.ones(1, 1, 10, 10, dtype=torch.bool)
    mask[..., 3:5, :] = False
    mask[..., 7] = False
    dq, dk, dv = native(case, tensors, mask)
    assert not dq[:, :, 3:5].any()
    assert not dk[:, :, 7].any()
    assert not dv[:, :, 7].any()
    tensors[3][:, :, 3:5] = 1e30  # what a row that sees nothing is told
    assert all(map(torch.equal, (dq, dk, dv), native(case, tensors, mask)))
    nothing = native(case, tensors, torch.zeros(1, 1, 1, 10, dtype=torch.bool))
    assert not any(x.any() for x in nothing)


def test_attention_takes_it_for_its_derivative() -> None:
    case = Case(t=70, window=20, cap=8.0, mask="pairs")
    tensors, mask = given(case, torch.float32), case.mask_of(2)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = qkeel.attention(*leaves, spec=case.spec, mask=mask, impl="native")
    found = torch.autograd.grad(out, leaves, tensors[3])
    assert all(map(torch.equal, found, native(case, tensors, mask)))


def test_twice_differentiated_it_raises_and_says_so() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    out = qkeel.attention(q, k, v, spec=Case().spec, impl="native")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        first.sum().backward()


@pytest.mark.slow
def test_torch_accepts_the_operator() -> None:
    op = torch.ops.qkeel_native.attention_backward.default
    for case in (Case(t=5, widths=(16, 8)), Case(t=9, mask="pairs", cap=5.0, alibi=True)):
        args = arguments(case, given(case, torch.float32), case.mask_of(2))
        torch.library.opcheck(op, args)
        tracked = tuple(x.requires_grad_() if i in (1, 2, 3) else x for i, x in enumerate(args))
        torch.library.opcheck(op, tracked, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_wrong_shapes_and_dtypes_raise_and_do_not_crash() -> None:
    case = Case(t=6, s=9)
    right = arguments(case, given(case, torch.float32), None)
    up, q, k, v, out, lse = right[:6]
    wrong = [
        (up[..., :32], q, k, v, out, lse),
        (up, q[:, :3], k, v, out, lse),
        (up, q, k[:, :, :4], v, out, lse),
        (up, q, k, v.double(), out, lse),
        (up, q.long(), k.long(), v.long(), out, lse),
        (up, q, k, v, out.bfloat16(), lse),
        (up.half(), q, k, v, out, lse),
        (up, q, k, v, out, lse[..., :3]),
        (up, q, k, v, out, lse.double()),
        (up, q[..., :12], k[..., :12], v, out, lse),
    ]
    for args in wrong:
        with pytest.raises(RuntimeError, match="expected"):
            torch.ops.qkeel_native.attention_backward(*args, *right[6:])
    for rest in (
        (torch.ones(6, 9), None, 1.0, True, 0, 0.0),
        (None, torch.ones(3), 1.0, True, 0, 0.0),
        (None, None, 1.0, True, -1, 0.0),
    ):
        with pytest.raises(RuntimeError, match="expected"):
            torch.ops.qkeel_native.attention_backward(*right[:6], *rest)


def test_no_queries_and_no_keys_are_no_error() -> None:
    for t, s in ((0, 5), (5, 0)):
        q, k, up = torch.randn(1, 2, t, 8), torch.randn(1, 2, s, 8), torch.randn(1, 2, t, 8)
        found = torch.ops.qkeel_native.attention_backward(
            up, q, k, k, up, torch.zeros(1, 2, t), None, None, 1.0, True, 0, 0.0
        )
        assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
        assert not any(x.any() for x in found)


def test_ten_thousand_calls_keep_no_memory() -> None:
    case = Case(t=8, heads=(2, 1), widths=(8, 8))
    args = arguments(case, given(case, torch.float32), None)

    def call(times: int) -> int:
        for _ in range(times):
            torch.ops.qkeel_native.attention_backward(*args)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(200)
    assert call(10_000) - before < 4 * 1024  # one call's tensors are 2 KiB
