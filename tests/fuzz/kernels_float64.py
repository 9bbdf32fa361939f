"""Calls of attention: every kernel that takes one gives the oracle's numbers in float64, statistics too."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.conformance.cases import MASKS, SPECS, Geometry, fits, masking, random_params, tensors, truth_of
from tests.conformance.tolerance import allowed_error
from tests.fuzz.hunt import Hunt

from qkeel.ops import KERNELS
from qkeel.spec.call import AttentionCall, make_call

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def inputs() -> SearchStrategy[dict[str, Any]]:
    """A spec, sizes, a kind of mask, a dtype, how large q is, and a seed."""
    return st.fixed_dictionaries(
        {
            "spec": st.sampled_from(sorted(SPECS)),
            "groups": st.integers(1, 3),
            "shared": st.integers(1, 3),
            "t": st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 33, 64, 130])),
            "s": st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 33, 64, 130])),
            "d": st.sampled_from([2, 4, 8, 16, 24, 32, 64]),
            "values": st.sampled_from([0, 1, 8, 20]),
            "mask": st.sampled_from(MASKS),
            "dtype": st.sampled_from(sorted(_DTYPES)),
            "large": st.sampled_from([0.0, 0.1, 1.0, 1.0, 5.0, 30.0]),
            "seed": st.integers(0, 2**20),
        }
    )


@torch.no_grad()
def check(case: dict[str, Any]) -> None:
    """Compares the output of each kernel; the tolerance is that of the conformance tests."""
    call = _call(case)
    if call is None:
        return
    truth = truth_of(call)
    allowed = 1e-10 * (1 + truth.out.abs().max().item()) if case["dtype"] == "f64" else allowed_error(call, truth)
    for name, kernel in KERNELS.items():
        if kernel.supports(call) is None:
            out = kernel(call)
            assert out.dtype == call.q.dtype, name
            assert out.shape == truth.out.shape, name
            error = (out.double() - truth.out).abs().max().item()
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _call(case: dict[str, Any]) -> AttentionCall | None:
    spec, dtype = SPECS[case["spec"]], _DTYPES[case["dtype"]]
    g = case["groups"]
    x = Geometry(2, g * case["shared"], g, case["t"], case["s"], case["d"])
    if not fits(spec, x):
        return None
    rng = torch.Generator().manual_seed(case["seed"])
    q, k, v = tensors(x, dtype, rng)
    if case["values"]:
        v = torch.randn(2, g, x.s, case["values"], generator=rng).to(dtype)
    q = q * case["large"]
    params = random_params(spec, x, dtype, rng)
    call = make_call(spec, q, k, v, params=params, **masking(case["mask"], x, dtype, rng))
    return dataclasses.replace(call)


HUNT = Hunt(inputs=inputs, check=check)
