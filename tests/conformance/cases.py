"""The product of tests/contract/conformance as the checked calls that kernels take."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.contract.conformance import cases, tolerance
from tests.contract.conformance.cases import (
    GEOMETRIES,
    MASKS,
    SOME,
    SPECS,
    Call,
    Geometry,
    pairs,
    share,
    widened,
)

from qkeel.reference import Attended
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import make_call

__all__ = [
    "GEOMETRIES",
    "MASKS",
    "SOME",
    "SPECS",
    "Geometry",
    "pairs",
    "share",
    "widened",
]


def calls(
    spec: AttentionSpec,
    dtype: torch.dtype,
    where: list[tuple[Geometry, str]],
    seed: int = 0,
) -> Iterator[tuple[str, AttentionCall]]:
    """The calls of a spec, each with its name for the message of a failed assertion."""
    for case, call in cases.calls(spec, dtype, where, seed):
        yield case, make_call(call.spec, call.q, call.k, call.v, **call.arguments)


def unchecked(call: AttentionCall) -> Call:
    """The same call as its caller makes it."""
    names = ("spec", "q", "k", "v", "params", "causal", "mask", "pos_q", "pos_k")
    return Call(**{name: getattr(call, name) for name in names})


def truth_of(call: AttentionCall) -> Attended:
    """The oracle's answer in float64."""
    return cases.truth_of(unchecked(call))


def allowed_error(call: AttentionCall, truth: Attended) -> float:
    """The largest error that a kernel may have."""
    return tolerance.allowed_error(unchecked(call), truth)
