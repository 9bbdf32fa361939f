"""Every kernel gives the oracle's numbers: spec × geometry × mask × dtype, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

from qkeel import attention, preset
from qkeel import spec as slots
from qkeel.errors import RefusedError

from .cases import (
    GEOMETRIES,
    MASKS,
    SOME,
    SPECS,
    Call,
    calls,
    pairs,
    share,
    truth_of,
    widened,
)
from .tolerance import allowed_error

LOW = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = ("native", "decode", "windowed", "sdpa", "flex", "chunked")
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_spec = pytest.mark.parametrize("name", SPECS)
some_specs = pytest.mark.parametrize("name", one_in(SPECS, 4))
ALL = pairs(GEOMETRIES, MASKS)
SQUARE = [(x, kind) for x in (GEOMETRIES[0], GEOMETRIES[7]) for kind in MASKS]


def outputs(
    call: Call, kernels: tuple[str, ...] = KERNELS
) -> Iterator[tuple[str, Tensor]]:
    """What each kernel that takes this call computes, by its name."""
    for kernel in kernels:
        try:
            out = call.attention(kernel)
        except RefusedError:
            continue
        yield kernel, out


def test_every_class_of_a_slot_is_in_a_spec_that_the_kernels_are_put_to() -> None:
    found, queue = set(), list(SPECS.values())
    while queue:
        held = queue.pop()
        found.add(type(held))
        queue += [
            x
            for f in dataclasses.fields(held)
            if dataclasses.is_dataclass(x := getattr(held, f.name))
        ]
    classes = {
        x for name in slots.__all__ if isinstance(x := getattr(slots, name), type)
    }
    assert classes - {slots.AttentionCall} <= found, (
        "add a spec to EXTRA in tests/contract/conformance/cases.py"
    )


def test_the_last_kernel_takes_every_call() -> None:
    for name, spec in SPECS.items():
        for case, call in calls(spec, torch.float64, SOME[::9]):
            assert [kernel for kernel, _ in outputs(call, ("chunked",))] == [
                "chunked"
            ], f"{name}, {case}"


# Every third pair of a geometry and a mask, others for the next spec; all of them among the slow tests.
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@every_spec
@torch.no_grad()
def test_every_kernel_gives_the_oracles_output_in_float64(
    name: str, every: int
) -> None:
    for case, call in calls(
        SPECS[name], torch.float64, ALL[list(SPECS).index(name) % every :: every]
    ):
        truth = call.attended().out
        for kernel, out in outputs(call):
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
            for kernel, out in outputs(call):
                assert out.dtype == dtype, f"{kernel}, {case}"
                assert (out.double() - truth.out).abs().max().item() <= allowed, (
                    f"{kernel}, {dtype}, {case}"
                )


def tracked(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The call with q, k, v, params and an additive mask as leaves that want a gradient."""
    leaves = {"q": call.q, "k": call.k, "v": call.v, **call.params}
    if call.mask is not None and call.mask.is_floating_point():
        leaves["mask"] = call.mask
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    parts = {n: leaves[n] for n in ("q", "k", "v", "mask") if n in leaves}
    params = {n: leaves[n] for n in call.params}
    return dataclasses.replace(call, params=params, **parts), leaves


def gradients(call: Call, forward: Callable[[Call], Tensor]) -> dict[str, Tensor]:
    """Gradients of a fixed weighting of the output."""
    wanting, leaves = tracked(call)
    out = forward(wanting)
    weighting = (
        torch.cos(torch.arange(out.numel(), dtype=torch.float64))
        .view(out.shape)
        .to(out.dtype)
    )
    found = torch.autograd.grad(
        (out * weighting).sum(), list(leaves.values()), allow_unused=True
    )
    return {
        n: torch.zeros_like(x) if grad is None else grad
        for (n, x), grad in zip(leaves.items(), found)
    }


def gradients_of_kernels(
    call: Call, kernels: tuple[str, ...] = KERNELS
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The gradients of each kernel that takes this call where every gradient is wanted, by its name."""
    for kernel in kernels:
        try:
            found = gradients(call, lambda c, kernel=kernel: c.attention(kernel))
        except RefusedError:
            continue
        yield kernel, found


def oracle(call: Call) -> Tensor:
    return call.attended().out


@every_spec
def test_every_kernel_gives_the_oracles_gradients_in_float64(name: str) -> None:
    for case, call in calls(SPECS[name], torch.float64, share(name, 4), seed=2):
        theirs = gradients(call, oracle)
        for kernel, ours in gradients_of_kernels(call):
            for n, grad in theirs.items():
                assert torch.isfinite(grad).all(), f"oracle, {n}, {case}"
                assert (ours[n] - grad).abs().max() <= 1e-11 * (1 + grad.abs().max()), (
                    f"{kernel}, {n}, {case}"
                )


# A gradient sums products of rounded numbers, so its bound is a share of its size, not of one ulp.
@some_specs
def test_low_precision_gradients_are_near_the_oracles(name: str) -> None:
    check_gradients(name, torch.float32, 2e-5)
    check_gradients(name, torch.bfloat16, 0.1)


def check_gradients(name: str, dtype: torch.dtype, share: float) -> None:
    for case, call in calls(SPECS[name], dtype, SOME[:3], seed=3):
        theirs = gradients(widened(call), oracle)
        for kernel, ours in gradients_of_kernels(call):
            for n, grad in theirs.items():
                assert ours[n].dtype == dtype, f"{kernel}, {n}, {case}"
                assert (ours[n].double() - grad).abs().max() <= share * (
                    1 + grad.abs().max()
                ), f"{kernel}, {n}, {case}"


@every_spec
@torch.no_grad()
def test_auto_computes_and_a_named_kernel_computes_or_refuses_with_its_name_and_a_way_out(
    name: str,
) -> None:
    for case, call in calls(SPECS[name], torch.float64, SQUARE[::7]):
        assert (call.attention() - oracle(call)).abs().max() <= 1e-12, case
    for case, call in calls(
        SPECS[name],
        torch.float64,
        [(GEOMETRIES[0], "causal"), (GEOMETRIES[0], "additive")],
    ):
        for kernel in KERNELS:
            computed = dict(outputs(call, (kernel,)))
            if kernel in computed:
                assert (computed[kernel] - oracle(call)).abs().max() <= 1e-12, (
                    f"{kernel}, {case}"
                )
                continue
            with pytest.raises(RefusedError, match=kernel) as refusal:
                call.attention(kernel)
            assert "impl=" in str(refusal.value), f"{kernel}, {case}"


@every_kernel
@torch.no_grad()
def test_empty_rows_give_zero_output_and_zero_gradients(kernel: str) -> None:
    for name, spec in SPECS.items():
        for case, call in calls(spec, torch.float32, [(GEOMETRIES[0], "empty_rows")]):
            for _, out in outputs(call, (kernel,)):
                assert (out[0, :, -1] == 0).all(), f"{name} {case}"
            with torch.enable_grad():
                for _, found in gradients_of_kernels(call, (kernel,)):
                    assert all(torch.isfinite(g).all() for g in found.values()), (
                        f"{name} {case}"
                    )
                    assert (found["q"][0, :, -1] == 0).all(), f"{name} {case}"


@every_kernel
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_of_ten_thousand_stay_finite(kernel: str, size: float) -> None:
    for name, spec in SPECS.items():
        for case, call in calls(
            spec,
            torch.float32,
            [(GEOMETRIES[0], "empty_rows"), (GEOMETRIES[2], "causal")],
        ):
            big = dataclasses.replace(call, q=call.q * size)
            for _, out in outputs(big, (kernel,)):
                assert torch.isfinite(out).all(), f"{name} {case}"
            for _, found in gradients_of_kernels(big, (kernel,)):
                assert all(torch.isfinite(g).all() for g in found.values()), (
                    f"{name} {case}"
                )


@pytest.mark.parametrize(
    ("width", "which"), [(5, ALL), (24, SOME)], ids=["narrower", "wider"]
)
def test_values_may_be_of_another_size_than_keys(width: int, which: list) -> None:
    for case, call in calls(SPECS["qwen3"], torch.float64, which):
        other = dataclasses.replace(
            call, v=torch.randn(*call.v.shape[:3], width, dtype=torch.float64)
        )
        computed = dict(outputs(other))
        assert {"sdpa", "chunked"} <= set(computed), case
        for kernel, out in computed.items():
            assert (out - oracle(other)).abs().max() <= 1e-12, f"{kernel}, {case}"


def turned(x: Tensor) -> Tensor:
    """The same numbers, those of a row far apart."""
    return x.mT.contiguous().mT


@some_specs
def test_rows_that_are_not_dense_give_the_same_output_and_gradients(name: str) -> None:
    for case, call in calls(
        SPECS[name],
        torch.float32,
        [(GEOMETRIES[0], "causal"), (GEOMETRIES[0], "full")],
        seed=5,
    ):
        other = dataclasses.replace(
            call, q=turned(call.q), k=turned(call.k), v=turned(call.v)
        )
        for kernel, theirs in gradients_of_kernels(call):
            close = partial(
                torch.testing.assert_close,
                rtol=1e-4,
                atol=1e-5,
                msg=f"{kernel}, {case}",
            )
            close(other.attention(kernel), call.attention(kernel))
            for name, ours in gradients(
                other, lambda c, kernel=kernel: c.attention(kernel)
            ).items():
                close(ours, theirs[name])


def test_statistics_leave_the_output_of_rows_that_are_not_dense_as_it_is() -> None:
    q, k, v = (torch.randn(2, heads, 17, 16) for heads in (4, 2, 2))
    out, seen = attention(
        turned(q), turned(k), turned(v), spec=preset("baseline"), stats=True
    )
    torch.testing.assert_close(
        out,
        attention(q, k, v, spec=preset("baseline"), impl="chunked"),
        rtol=1e-4,
        atol=1e-5,
    )
    dense = attention(q, k, v, spec=preset("baseline"), stats=True)[1]
    torch.testing.assert_close(seen.max_logit, dense.max_logit, rtol=1e-4, atol=1e-5)


def test_a_float32_mask_is_never_rounded_to_bfloat16() -> None:
    # 100.25 needs 10 bits; bfloat16 has 8. Rounded, the two keys would weigh the same.
    q, k = (
        torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16),
        torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16),
    )
    v = torch.eye(2, 8, dtype=torch.bfloat16)[None, None]
    mask = torch.tensor([[[[100.25, 100.0]]]])
    call = Call(
        spec=SPECS["baseline"], q=q, k=k, v=v, params={}, causal=False, mask=mask
    )
    computed = dict(outputs(call, ("auto", *KERNELS)))
    assert {"auto", "chunked"} <= set(computed)
    for kernel, out in computed.items():
        assert (
            out[..., :2].double() - torch.softmax(mask.double(), -1)
        ).abs().max() <= 2**-8, kernel
    with pytest.raises(RefusedError, match="would round the"):
        call.attention("sdpa")
