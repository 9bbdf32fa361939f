"""Every kernel gives the oracle's numbers: spec × geometry × mask × dtype, forward and backward."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from functools import partial
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.kernels import torch_kernels
from qkeel.kernels.contract import Kernel
from qkeel.ops import KERNELS, attention, run
from qkeel.spec import AttentionCall, preset
from qkeel.spec.call import make_call
from qkeel.spec.norm import GainNorm
from qkeel.spec.rope import Stretch
from qkeel.spec.slot import Slot

from .cases import GEOMETRIES, MASKS, SOME, SPECS, calls, pairs, share, truth_of, widened
from .tolerance import allowed_error

LOW = [torch.float32, torch.bfloat16, torch.float16]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_spec = pytest.mark.parametrize("name", SPECS)
some_specs = pytest.mark.parametrize("name", one_in(SPECS, 4))
ALL = pairs(GEOMETRIES, MASKS)
SQUARE = [(x, kind) for x in (GEOMETRIES[0], GEOMETRIES[7]) for kind in MASKS]


def supporting(call: AttentionCall) -> dict[str, Kernel]:
    """The kernels that take this call."""
    return {name: kernel for name, kernel in KERNELS.items() if kernel.supports(call) is None}


def test_every_class_of_a_slot_is_in_a_spec_that_the_kernels_are_put_to() -> None:
    """Norms have a suite of their own, which looks the classes up."""
    found, queue = set(), list(SPECS.values())
    while queue:
        held = queue.pop()
        found.add(type(held))
        queue += [x for f in dataclasses.fields(held) if dataclasses.is_dataclass(x := getattr(held, f.name))]
    modules = [m for name, m in sys.modules.items() if name.startswith("qkeel.spec.")]
    classes = {x for m in modules for x in vars(m).values() if isinstance(x, type) and issubclass(x, Slot | Stretch)}
    made = {x for x in classes if not inspect.isabstract(x) and not issubclass(x, GainNorm)}
    assert made <= found, "add a spec to EXTRA in tests/conformance/cases.py"


# Every third pair of a geometry and a mask, others for the next spec; all of them among the slow tests.
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@every_spec
@torch.no_grad()
def test_every_kernel_gives_the_oracles_output_in_float64(name: str, every: int) -> None:
    for case, call in calls(SPECS[name], torch.float64, ALL[list(SPECS).index(name) % every :: every]):
        truth = reference.attend_call(call).out
        for kernel, forward in supporting(call).items():
            out = forward(call)
            assert out.dtype == torch.float64, f"{kernel}, {case}"
            assert out.shape == truth.shape, f"{kernel}, {case}"
            assert (out - truth).abs().max() <= 1e-12, f"{kernel}, {case}"


@some_specs
@torch.no_grad()
def test_error_is_at_most_twice_the_low_precision_oracles(name: str) -> None:
    for i, dtype in enumerate(LOW):
        for case, call in calls(SPECS[name], dtype, share(name, 4, i), seed=1):
            truth = truth_of(call)
            allowed = allowed_error(call, truth)
            for kernel, forward in supporting(call).items():
                out = forward(call)
                assert out.dtype == dtype, f"{kernel}, {case}"
                assert (out.double() - truth.out).abs().max().item() <= allowed, f"{kernel}, {dtype}, {case}"


def tracked(call: AttentionCall) -> tuple[AttentionCall, dict[str, Tensor]]:
    """The call with q, k, v, params and an additive mask as leaves that want a gradient."""
    leaves = {"q": call.q, "k": call.k, "v": call.v, **call.params}
    if call.mask is not None and call.mask.is_floating_point():
        leaves["mask"] = call.mask
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    parts = {n: leaves[n] for n in ("q", "k", "v", "mask") if n in leaves}
    params = {n: leaves[n] for n in call.params}
    return dataclasses.replace(call, params=params, **parts), leaves


def differentiating(call: AttentionCall) -> dict[str, Kernel]:
    """The kernels that take this call where every gradient is wanted."""
    return supporting(tracked(call)[0])


def gradients(call: AttentionCall, forward: Any) -> dict[str, Tensor]:
    """Gradients of a fixed weighting of the output."""
    wanting, leaves = tracked(call)
    out = forward(wanting)
    weighting = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    found = torch.autograd.grad((out * weighting).sum(), list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if grad is None else grad for (n, x), grad in zip(leaves.items(), found)}


def oracle(call: AttentionCall) -> Tensor:
    return reference.attend_call(call).out


@every_spec
def test_every_kernel_gives_the_oracles_gradients_in_float64(name: str) -> None:
    for case, call in calls(SPECS[name], torch.float64, share(name, 4), seed=2):
        theirs = gradients(call, oracle)
        for kernel, forward in differentiating(call).items():
            ours = gradients(call, forward)
            for n, grad in theirs.items():
                assert torch.isfinite(grad).all(), f"oracle, {n}, {case}"
                assert (ours[n] - grad).abs().max() <= 1e-11 * (1 + grad.abs().max()), f"{kernel}, {n}, {case}"


# A gradient sums products of rounded numbers, so its bound is a share of its size, not of one ulp.
@some_specs
def test_low_precision_gradients_are_near_the_oracles(name: str) -> None:
    check_gradients(name, torch.float32, 2e-5)
    check_gradients(name, torch.bfloat16, 0.1)


def check_gradients(name: str, dtype: torch.dtype, share: float) -> None:
    for case, call in calls(SPECS[name], dtype, SOME[:3], seed=3):
        theirs = gradients(widened(call), oracle)
        for kernel, forward in differentiating(call).items():
            ours = gradients(call, forward)
            for n, grad in theirs.items():
                assert ours[n].dtype == dtype, f"{kernel}, {n}, {case}"
                assert (ours[n].double() - grad).abs().max() <= share * (1 + grad.abs().max()), f"{kernel}, {n}, {case}"


@every_kernel
@pytest.mark.parametrize("name", one_in(["qwen3", "cosa_logn", "gemma2", "capped_sink", "softpick", "squared_relu"], 3))
def test_cutting_the_rows_into_blocks_changes_nothing(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "BLOCK", 40)
    monkeypatch.setattr(torch_kernels, "MASK_BLOCK", 40)
    for case, call in calls(SPECS[name], torch.float64, SOME, seed=4):
        if kernel in differentiating(call):
            ours, theirs = gradients(call, KERNELS[kernel]), gradients(call, oracle)
            assert (KERNELS[kernel](call) - oracle(call)).abs().max() <= 1e-12, case
            for n, grad in theirs.items():
                assert (ours[n] - grad).abs().max() <= 1e-11 * (1 + grad.abs().max()), f"{n}, {case}"


@every_spec
@torch.no_grad()
def test_auto_computes_and_a_named_kernel_computes_or_refuses_with_reason_and_way_out(name: str) -> None:
    for case, call in calls(SPECS[name], torch.float64, SQUARE[::7]):
        assert (run(call) - oracle(call)).abs().max() <= 1e-12, case
    for case, call in calls(SPECS[name], torch.float64, [(GEOMETRIES[0], "causal"), (GEOMETRIES[0], "additive")]):
        for kernel in KERNELS:
            refusal = KERNELS[kernel].supports(call)
            if refusal is None:
                assert torch.equal(run(call, kernel), KERNELS[kernel](call)), f"{kernel}, {case}"
                continue
            assert refusal.reason, f"{kernel}, {case}"
            assert "impl=" in refusal.way_out, f"{kernel}, {case}"
            with pytest.raises(RefusedError, match=kernel) as error:
                run(call, kernel)
            assert str(refusal) in str(error.value)


@every_kernel
@torch.no_grad()
def test_empty_rows_give_zero_output_and_zero_gradients(kernel: str) -> None:
    for name, spec in SPECS.items():
        for case, call in calls(spec, torch.float32, [(GEOMETRIES[0], "empty_rows")]):
            if kernel not in supporting(call):
                continue
            assert (KERNELS[kernel](call)[0, :, -1] == 0).all(), f"{name} {case}"
            with torch.enable_grad():
                if kernel not in differentiating(call):
                    continue
                found = gradients(call, KERNELS[kernel])
            assert all(torch.isfinite(g).all() for g in found.values()), f"{name} {case}"
            assert (found["q"][0, :, -1] == 0).all(), f"{name} {case}"


@every_kernel
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_of_ten_thousand_stay_finite(kernel: str, size: float) -> None:
    for name, spec in SPECS.items():
        for case, call in calls(spec, torch.float32, [(GEOMETRIES[0], "empty_rows"), (GEOMETRIES[2], "causal")]):
            if kernel not in supporting(call):
                continue
            big = dataclasses.replace(call, q=call.q * size)
            assert torch.isfinite(KERNELS[kernel](big)).all(), f"{name} {case}"
            found = gradients(big, KERNELS[kernel]) if kernel in differentiating(big) else {}
            assert all(torch.isfinite(g).all() for g in found.values()), f"{name} {case}"


@every_kernel
@pytest.mark.parametrize(("width", "which"), [(5, ALL), (24, SOME)], ids=["narrower", "wider"])
def test_values_may_be_of_another_size_than_keys(kernel: str, width: int, which: list) -> None:
    for case, call in calls(SPECS["qwen3"], torch.float64, which):
        other = dataclasses.replace(call, v=torch.randn(*call.v.shape[:3], width, dtype=torch.float64))
        if KERNELS[kernel].supports(other) is not None:
            assert kernel in ("decode", "native", "windowed", "flex")
            continue
        out = KERNELS[kernel](other)
        assert (out - reference.attend_call(other).out).abs().max() <= 1e-12, case


def turned(x: Tensor) -> Tensor:
    """The same numbers, those of a row far apart."""
    return x.mT.contiguous().mT


@some_specs
def test_rows_that_are_not_dense_give_the_same_output_and_gradients(name: str) -> None:
    for case, call in calls(SPECS[name], torch.float32, [(GEOMETRIES[0], "causal"), (GEOMETRIES[0], "full")], seed=5):
        other = dataclasses.replace(call, q=turned(call.q), k=turned(call.k), v=turned(call.v))
        for kernel in differentiating(call):
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, msg=f"{kernel}, {case}")
            close(KERNELS[kernel](other), KERNELS[kernel](call))
            for theirs, ours in zip(*(gradients(x, KERNELS[kernel]).values() for x in (call, other)), strict=True):
                close(ours, theirs)


@pytest.mark.parametrize("stats", ["bracket", "max", "entropy", True])
def test_statistics_leave_the_output_of_rows_that_are_not_dense_as_it_is(stats: Any) -> None:
    q, k, v = (torch.randn(2, heads, 17, 16) for heads in (4, 2, 2))
    out, seen = attention(turned(q), turned(k), turned(v), spec=preset("baseline"), stats=stats)
    torch.testing.assert_close(out, attention(q, k, v, spec=preset("baseline"), impl="chunked"), rtol=1e-4, atol=1e-5)
    top = seen.max_logit if stats is True else seen.upper
    plain = attention(q, k, v, spec=preset("baseline"), stats=stats)[1]
    torch.testing.assert_close(top, plain.max_logit if stats is True else plain.upper, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", *KERNELS])
def test_a_float32_mask_is_never_rounded_to_bfloat16(impl: str) -> None:
    # 100.25 needs 10 bits; bfloat16 has 8. Rounded, the two keys would weigh the same.
    q, k = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    v = torch.eye(2, 8, dtype=torch.bfloat16)[None, None]
    mask = torch.tensor([[[[100.25, 100.0]]]])
    call = make_call(SPECS["baseline"], q, k, v, causal=False, mask=mask)
    if impl != "auto" and KERNELS[impl].supports(call) is not None:
        reasons = {
            "windowed": "for ReRope",
            "native": "switched off",
            "decode": "only boolean masks",
            "flex": "on a GPU only",
        }
        why = reasons.get(impl, "would round the")
        with pytest.raises(RefusedError, match=why):
            run(call, impl)
        return
    assert (run(call, impl)[..., :2].double() - torch.softmax(mask.double(), -1)).abs().max() <= 2**-8
