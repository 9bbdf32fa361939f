"""The compiled attention gives the oracle's numbers, and the statistics that the oracle's logits have."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.conformance.cases import SPECS, Geometry, fits, masking, random_params, tensors, truth_of
from tests.conformance.tolerance import allowed_error
from torch import Tensor

import qkeel
from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.functional.statistics import LogitBracket
from qkeel.kernels import compiled_attention as operator
from qkeel.kernels.torch_kernels import Chunked
from qkeel.ops import KERNELS, choose, run
from qkeel.sites.tap import BracketMode
from qkeel.spec import AttentionSpec, Fixed, Sigmoid, Softcap
from qkeel.spec.call import AttentionCall, make_call, with_query_mask

pytestmark = pytest.mark.usefixtures("compiled")
CASES = Path(__file__).parents[2] / "compile" / "cases.py"
NATIVE = KERNELS["native"]
OPS: Any = torch.ops.qkeel_native

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads beside each other": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads apart": lambda x: x.contiguous(),
    "dimensions apart": lambda x: x.mT.contiguous().mT,
    "part of a fused projection": lambda x: torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[
        ..., : x.shape[-1]
    ],
}  # fmt: skip
# Those whose numbers depend on what the kernel does, and not on encoding alone.
NAMES = ["qwen3", "gemma2", "alibi", "window", "cosa_logn", "window_log_n", "llama4", "capped_log_n"]
MASKS = ["causal", "full", "padding_left", "additive", "bool_per_head", "empty_rows", "additive_causal_per_head"]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Both operators, compiled and loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "1")
        if not (operator.ready() and operator.backward_ready()):
            pytest.skip("there is no C++ compiler here")


def made(name: str, kind: str, x: Geometry, dtype: torch.dtype, layout: str = "heads apart") -> AttentionCall:
    rng = torch.Generator().manual_seed(x.t)
    spec = SPECS[name]
    q, k, v = (LAYOUTS[layout](y) for y in tensors(x, dtype, rng))
    return make_call(spec, q, k, v, params=random_params(spec, x, dtype, rng), **masking(kind, x, dtype, rng))


def bracketed(call: AttentionCall) -> tuple[Tensor, LogitBracket]:
    assert NATIVE.supports(call) is None
    return NATIVE.bracketed(call)  # type: ignore[attr-defined]


def entropies(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_length_mask_layout_and_width(name: str, dtype: torch.dtype) -> None:
    shapes = [
        Geometry(2, 2, 2, 1, 1, 8),
        Geometry(2, 4, 2, 7, 7, 24),
        Geometry(2, 3, 1, 64, 100, 64),
        Geometry(2, 4, 2, 129, 129, 40),
        Geometry(2, 2, 1, 49, 20, 128),
    ]
    for i, x in enumerate(shapes):
        kind = MASKS[(i + NAMES.index(name)) % len(MASKS)]
        layout = list(LAYOUTS)[(i + NAMES.index(name)) % len(LAYOUTS)]
        if fits(SPECS[name], x):
            call = made(name, kind, x, dtype, layout)
            told, truth = f"{x} {kind} {layout}", truth_of(call)
            assert NATIVE.supports(call) is None, told
            out = NATIVE(call)
            assert out.dtype == dtype, told
            assert (out.double() - truth.out).abs().max() <= allowed_error(call, truth), told


@pytest.mark.parametrize(("t", "kind"), [(512, "causal"), (512, "bool_per_head"), (2048, "causal")])
@torch.no_grad()
def test_long_sequences(t: int, kind: str) -> None:
    call = made("qwen3", kind, Geometry(1, 2, 1, t, t, 64), torch.float32, "heads beside each other")
    truth = truth_of(call)
    assert (NATIVE(call).double() - truth.out).abs().max() <= allowed_error(call, truth)


@torch.no_grad()
def test_values_may_have_another_width() -> None:
    call = made("qwen3", "causal", Geometry(2, 4, 2, 30, 30, 64), torch.float32)
    call = dataclasses.replace(call, v=torch.randn(2, 2, 30, 24))
    truth = truth_of(call)
    assert (NATIVE(call).double() - truth.out).abs().max() <= allowed_error(call, truth)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_statistics_are_those_of_the_oracles_logits(name: str) -> None:
    for kind in MASKS:
        call = made(name, kind, Geometry(2, 4, 2, 70, 70, 24), torch.float32)
        if kind == "causal":
            call = with_query_mask(call, torch.rand(2, 70) < 0.7)
        over = torch.ones(2, 1, 70, dtype=torch.bool) if call.query_mask is None else call.query_mask[:, None]
        truth, theirs = truth_of(call), reference.attend_call(call)
        _, found = bracketed(call)
        over = over & (truth.logits > -torch.inf).any(-1)
        top = truth.logits.amax(-1).masked_fill(~over, -torch.inf).amax((0, 2))
        entropy, other = (
            entropies(a.weights.double()).masked_fill(~over, 0.0).sum((0, 2)) / over.sum((0, 2))
            for a in (truth, theirs)
        )
        eps = torch.finfo(torch.float32).eps
        size = truth.logits.masked_fill(truth.logits == -torch.inf, 0.0).abs().max()
        assert (found.lower - top).abs().max() <= 4 * eps * size, kind
        assert found.entropy is not None
        assert (found.entropy - entropy).abs().max() <= 2 * ((other - entropy).abs().max() + eps * (5 + size)), kind
        assert torch.equal(found.lower, found.upper), kind
        assert found.certified is not None
        assert found.certified.all(), kind


@pytest.mark.parametrize("size", [1e4, -1e4])
@torch.no_grad()
def test_logits_of_ten_thousand_keep_their_maximum_and_entropy(size: float) -> None:
    # Two keys in pairs: every row's largest weight is one of two equal ones or is alone.
    q = torch.full((1, 1, 9, 8), 1.0)
    k = torch.linspace(-1, 1, 9).repeat_interleave(2)[None, None, :, None].expand(1, 1, 18, 8)
    call = make_call(AttentionSpec(scale=Fixed(size / 8)), q, k, torch.randn(1, 1, 18, 8), causal=False)
    out, found = bracketed(call)
    assert found.lower.item() == pytest.approx(1e4)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(0.6931472)  # ln 2
    assert (out - reference.attend_call(call).out).abs().max() <= 1e-6


@torch.no_grad()
def test_entropy_does_not_cancel_at_large_logits() -> None:
    q, k = 60 * torch.randn(1, 2, 64, 64), 8 * torch.randn(1, 2, 64, 64)
    call = make_call(AttentionSpec(), q, k, k)
    truth = truth_of(call)
    largest = truth.logits.abs().masked_fill(truth.logits == -torch.inf, 0.0).max()
    assert largest > 1000
    out = torch.ops.qkeel_native.attention(q, k, k, None, None, 1 / 8, True, 0, 0.0, True)
    rounded = torch.finfo(torch.float32).eps * largest  # of one logit; entropy moves by at most ln n times that
    assert (out[3] - entropies(truth.weights)).abs().max() <= 5 * rounded
    assert (out[3] >= 0).all()


def test_a_hand_made_row() -> None:
    # Logits 0 and ln 3: weights 1/4 and 3/4.
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)
    q[..., 0], k[0, 0, 1, 0] = 1.0, 1.0986123
    v = torch.tensor([[0.0] * 8, [4.0] * 8])[None, None]
    out, lse, top, entropy = torch.ops.qkeel_native.attention(q, k, v, None, None, 1.0, False, 0, 0.0, True)
    torch.testing.assert_close(out, torch.full((1, 1, 1, 8), 3.0))
    assert [x.item() for x in (lse, top, entropy)] == pytest.approx([1.3862944, 1.0986123, 0.5623351])


def test_rows_that_see_no_key() -> None:
    for kind, shape in (("empty_rows", (2, 60)), ("causal", (60, 20))):
        x = Geometry(2, 2, 2, shape[0] if kind == "causal" else 60, shape[1], 16)
        call = made("baseline", kind, x, torch.float32)
        leaves = [y.requires_grad_() for y in (call.q, call.k, call.v)]
        how = (0.25, call.causal, 0, 0.0, True)
        out, lse, top, entropy = torch.ops.qkeel_native.attention(*leaves, call.mask, None, *how)
        empty = (truth_of(call).logits == -torch.inf).all(-1)
        assert empty.any()
        assert (out[empty] == 0).all()
        assert (lse[empty] == -torch.inf).all()
        assert (top[empty] == -torch.inf).all()
        assert (entropy[empty] == 0).all()
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][empty] == 0).all()


def gradients(call: AttentionCall, forward: Any, above: Tensor) -> tuple[Tensor, ...]:
    """Of q, k, v, in the dtype of the gradient from above."""
    leaves = [x.detach().to(above.dtype).requires_grad_() for x in (call.q, call.k, call.v)]
    params = {n: p.to(above.dtype) for n, p in call.params.items()}
    wanting = dataclasses.replace(call, q=leaves[0], k=leaves[1], v=leaves[2], params=params)
    assert forward is not NATIVE or NATIVE.supports(wanting) is None
    return torch.autograd.grad(forward(wanting), leaves, above)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    for i, kind in enumerate(MASKS):
        call = made(name, kind, Geometry(2, 4, 2, 50, 50, 16), torch.float32, list(LAYOUTS)[i % len(LAYOUTS)])
        above = torch.randn(2, 4, 50, 16, dtype=torch.float64)

        ours, theirs = gradients(call, NATIVE, above.float()), gradients(call, Chunked(), above.float())
        truth = gradients(call, lambda c: reference.attend_call(c).out, above)
        for mine, other, true in zip(ours, theirs, truth):
            # Terms of both signs cancel in a sum: rounding is that of the largest number anywhere.
            own, size = (other - true).abs().max(), max(g.abs().max() for g in truth)
            assert (mine - true).abs().max() <= 2 * (own + 4 * torch.finfo(torch.float32).eps * size), kind


def test_threads_change_no_bit(assert_threads_change_no_bit: Callable[..., None]) -> None:
    x = [torch.randn(1, n, 300, 64, requires_grad=True) for n in (4, 2, 2)]

    def both() -> list[Tensor]:
        out = torch.ops.qkeel_native.attention(*x, None, None, 0.125, True, 0, 0.0, True)
        return [*out, *torch.autograd.grad(out[0].square().sum(), x)]

    assert_threads_change_no_bit(both)


@pytest.mark.usefixtures("_poisoned")
def test_every_number_is_written() -> None:
    assert torch.empty(3).isnan().all()
    for kind in MASKS:
        call = made("gemma2", kind, Geometry(2, 4, 2, 61, 61, 24), torch.float32)
        slopes = torch.rand(4)
        found = OPS.attention(call.q, call.k, call.v, call.mask, slopes, 0.2, call.causal, 30, 5.0, True)
        assert not any(x.isnan().any() for x in found), kind


def test_nan_in_a_visible_key_shows_and_in_a_later_one_does_not() -> None:
    q, k, v = (torch.randn(1, 1, 60, 8) for _ in range(3))
    k[0, 0, 50, 3] = torch.nan
    out, lse, _, entropy = OPS.attention(q, k, v, None, None, 1.0, True, 0, 0.0, True)
    for x in (out[0, 0, :, 0], lse[0, 0], entropy[0, 0]):
        assert x[50:].isnan().all()
        assert x[:50].isfinite().all()


def test_torch_accepts_the_operator() -> None:
    q, k, v = (torch.randn(1, n, 5, 16, requires_grad=True) for n in (4, 2, 2))
    mask, slopes = torch.rand(1, 1, 5, 5) < 0.8, torch.rand(4)
    for args in [
        (q, k, v, None, None, 0.25, True, 0, 0.0, True),
        (q.detach(), k.detach(), v.detach(), mask, slopes, 0.25, False, 3, 5.0, False),
    ]:
        torch.library.opcheck(OPS.attention.default, args)


def test_wrong_shapes_and_dtypes_raise_and_do_not_crash() -> None:
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    rest = (None, None, 1.0, True, 0, 0.0, True)
    for args in [
        (q[..., :6], k[..., :6], v, *rest),
        (q, k, v[..., :4], *rest),
        (q.double(), k.double(), v.double(), *rest),
        (q, k.bfloat16(), v, *rest),
        (q.int(), k.int(), v.int(), *rest),
        (q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), *rest),
        (q[:, :3], k, v, *rest),
        (q[0], k, v, *rest),
        (q, k[:, :, :3], v, *rest),
        (q, k.expand(2, -1, -1, -1), v, *rest),
        (q, k, v, torch.ones(5, 5), *rest[1:]),
        (q, k, v, torch.ones(1, 1, 5, 4), *rest[1:]),
        (q, k, v, torch.ones(1, 1, 5, 5, dtype=torch.int64), *rest[1:]),
        (q, k, v, None, torch.ones(3), *rest[2:]),
        (q, k, v, None, torch.ones(4).double(), *rest[2:]),
        (q, k, v, None, None, 1.0, True, -1, 0.0, True),
    ]:
        with pytest.raises((RuntimeError, NotImplementedError)):
            OPS.attention(*args)
    for shape in ((0, 4, 5, 8), (1, 4, 0, 8)):
        found = OPS.attention(torch.randn(shape), k.expand(shape[0], -1, -1, -1), v.expand(shape[0], -1, -1, -1), *rest)
        assert found[0].shape == shape
    nothing = OPS.attention(q, k[:, :, :0], v[:, :, :0], *rest)
    assert (nothing[0] == 0).all()


@pytest.mark.slow
def test_ten_thousand_calls_keep_no_memory() -> None:
    q, k, v = (torch.randn(1, 1, 32, 8, requires_grad=True) for _ in range(3))

    def call(times: int) -> int:
        for _ in range(times):
            OPS.attention(q, k, v, None, None, 1.0, True, 0, 0.0, True)[0].sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(500)
    assert call(10_000) - before < 16 * 1024


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    def why(spec: AttentionSpec, d: int = 8, dtype: torch.dtype = torch.float32, **given: Any) -> str:
        q = torch.randn(1, 2, 3, d, dtype=dtype)
        call = make_call(spec, q, q, q, params=spec.init_params(2, 2, d), **given)
        refusal = NATIVE.supports(call)
        assert refusal is not None
        with pytest.raises(RefusedError, match="native"):
            run(call, "native")
        return refusal.reason

    plain = AttentionSpec()
    assert "softmax only" in why(dataclasses.replace(plain, normalizer=Sigmoid(bias=0.0)))
    assert "neither a rotation nor ALiBi" in why(SPECS["kerple_log"])
    assert "neither a rotation nor ALiBi" in why(SPECS["rerope"])
    assert "multiples of 8" in why(plain, d=12)
    assert "float64" in why(plain, dtype=torch.float64)
    assert "drops no weights" in why(plain, dropout=0.1)
    assert "positions 0, 1, 2" in why(plain, pos_q=torch.tensor([0, 2, 4]), pos_k=torch.tensor([0, 2, 4]))
    assert "by its mask" in why(plain, mask=torch.zeros(1, 1, 3, 3, requires_grad=True))


def test_switched_off_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 40, 8)
    call = make_call(AttentionSpec(), q, q, q)
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    refusal = NATIVE.supports(call)
    assert refusal is not None
    assert "switched off" in refusal.reason
    assert choose(call, "auto") is KERNELS["sdpa"]


def test_under_a_transform_it_is_not_used() -> None:
    def mapped(q: Tensor) -> Tensor:
        refusal = NATIVE.supports(make_call(AttentionSpec(), q, q, q))
        assert refusal is not None
        return q

    torch.func.vmap(mapped)(torch.randn(3, 1, 2, 5, 8))


def test_prices_of_statistics_are_all_paid_by_the_pass() -> None:
    spec = dataclasses.replace(qkeel.preset("qwen3"), cap=Softcap(2.0))
    q, k = torch.randn(2, 4, 33, 16, requires_grad=True), torch.randn(2, 2, 33, 16)
    params, mask = spec.init_params(4, 2, 16), torch.rand(2, 1, 33, 33) < 0.7
    _, exact = qkeel.attention(q, k, k, spec=spec, params=params, mask=mask, impl="chunked", stats=True)
    for price in ("bracket", "max", "entropy"):
        out, found = qkeel.attention(q, k, k, spec=spec, params=params, mask=mask, impl="native", stats=price)
        torch.testing.assert_close(found.lower, exact.max_logit)
        assert found.entropy is not None
        torch.testing.assert_close(found.entropy, exact.entropy)
        assert out.requires_grad
        assert not any(x is not None and x.requires_grad for x in (found.lower, found.upper, found.entropy))


@torch.no_grad()
def test_a_watch_bounds_the_logits_of_it() -> None:
    q, k = 3 * torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    with BracketMode() as mode:
        qkeel.attention(q, k, k, spec=AttentionSpec(), impl="native")
    assert mode.bound is not None
    top = reference.attend(AttentionSpec(), q, k, k).logits.max()
    assert top <= mode.bound <= top + torch.tensor(20.0).log()


@pytest.mark.slow
def test_compiled_into_one_graph_it_gives_eagers_numbers() -> None:
    cases = [word for case in ("fullgraph", "stated") for word in (case, "qwen3", "native", "aot_eager")]
    done = forked.python([str(CASES), *cases], CASES.parent, environment={"QKEEL_NATIVE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = map(float, done.stdout.split())
    assert max(first, second) < 1e-5
