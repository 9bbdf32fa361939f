"""The product of tests/contract/conformance as the checked calls that kernels take."""

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
    spec,
    dtype,
    where,
    seed=0,
):
    """The calls of a spec, each with its name for the message of a failed assertion."""
    for case, call in cases.calls(spec, dtype, where, seed):
        yield case, make_call(call.spec, call.q, call.k, call.v, **call.arguments)


def unchecked(call):
    """The same call as its caller makes it."""
    names = ("spec", "q", "k", "v", "params", "causal", "mask", "pos_q", "pos_k")
    return Call(**{name: getattr(call, name) for name in names})


def truth_of(call):
    """The oracle's answer in float64."""
    return cases.truth_of(unchecked(call))


def allowed_error(call, truth):
    """The largest error that a kernel may have."""
    return tolerance.allowed_error(unchecked(call), truth)
