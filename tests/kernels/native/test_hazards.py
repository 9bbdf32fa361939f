"""Whatever goes on in torch, numbers are those of float64, or an error says why not: with kernels and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from tests.contract.conformance.cases import SPECS
from torch import Tensor

import qkeel
from qkeel import reference
from qkeel.spec.call import Visibility

from . import hazards as h
from .hazards import Found, Hazard

# Old doors of torch warn that they are old, and maps that they are slow.
pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::qkeel.errors.QkeelWarning"),
]

OVERWRITTEN = "modified by an inplace operation"
NOT_TWICE = "derivative for .*_backward is not implemented"
SPEC = qkeel.preset("qwen3")
NOT_ON_ITSELF = "needs the parameter 'q_norm'"

MODULES = (
    h.overwriting_hook, h.backward_hooks, h.no_gradient, h.inference_first, h.inference_input, h.fake_first,
    h.default_dtype, h.autocast_switched_off_within, h.grad_of, h.mapped, h.forward_tangent,
    h.hessian_of, h.twice_chunked, h.pickled, h.threads, h.with_cache,
)  # fmt: skip
OF_MODULES = {do.__name__: Hazard(do=do) for do in MODULES} | {
    "parametrized gains": Hazard(
        do=h.parametrized_gain, on=NOT_ON_ITSELF, off=NOT_ON_ITSELF
    ),
    "a default device without memory": Hazard(do=h.under(lambda: torch.device("meta"))),
    "anomaly mode": Hazard(
        do=h.under(lambda: torch.autograd.detect_anomaly(check_nan=True))
    ),
    "saved tensors packed": Hazard(
        do=h.under(
            lambda: torch.autograd.graph.saved_tensors_hooks(
                h.to_array, torch.from_numpy
            )
        )
    ),
    "a mode over torch's operators": Hazard(do=h.under(h.Counting)),
    "gradient checkpoints": Hazard(do=h.checkpointed(reentrant=False)),
    "reentrant gradient checkpoints": Hazard(do=h.checkpointed(reentrant=True)),
    "autocast to bfloat16": Hazard(do=h.autocast(torch.bfloat16), tolerance=0.03),
    "autocast to float16": Hazard(do=h.autocast(torch.float16), tolerance=0.004),
    "a trace": Hazard(do=h.traced, alone=True),
    "module.compile()": Hazard(do=h.compiled, alone=True),
    "a gradient of a gradient": Hazard(
        do=h.twice, on="can be differentiated once", off=NOT_TWICE
    ),
    "a gain overwritten before backward": Hazard(
        do=h.mutated_gain, on=OVERWRITTEN, off=OVERWRITTEN
    ),
}

CALLS = (
    h.dual_value, h.only_value, h.only_mask, h.without_keys, h.parameters, h.wrapper_subclass, h.transposed_gradient,
    h.negated_gradient, h.not_a_number,
)  # fmt: skip
OF_CALLS = {do.__name__: Hazard(do=do) for do in CALLS} | {
    "a tangent's gradient": Hazard(
        do=h.dual_then_backward, on=OVERWRITTEN, off=OVERWRITTEN
    ),
    "a gradient of a gradient of values": Hazard(
        do=h.twice_in_value, on="can be differentiated once", off=NOT_TWICE
    ),
    "expanded heads": Hazard(do=h.laid_out(lambda x: x[:, :1].expand(-1, 4, -1, -1))),
    "reversed tokens": Hazard(do=h.laid_out(lambda x: x.flip(2))),
    "overlapping windows": Hazard(do=h.laid_out(h.overlapping)),
    "memory that is not aligned": Hazard(do=h.laid_out(h.unaligned)),
    "negated views": Hazard(do=h.laid_out(h.negated)),
    "an empty batch": Hazard(do=h.empty(0)),
    "no queries and no keys": Hazard(do=h.empty(2)),
    "a subclass with functions of its own": Hazard(do=h.of_class(h.Counted)),
    "k overwritten before backward": Hazard(do=h.mutated("k")),
    "v overwritten before backward": Hazard(
        do=h.mutated("v"), on=OVERWRITTEN, off=OVERWRITTEN
    ),
    "a mask overwritten before backward": Hazard(do=h.mutated("mask"), on=OVERWRITTEN),
    "the output overwritten before backward": Hazard(
        do=h.mutated("out"), on=OVERWRITTEN
    ),
    "nested tensors": Hazard(
        do=h.jagged, on="expected q .b h t d.", off="expected q .b h t d."
    ),
}


def written_out(
    q: Tensor, k: Tensor, v: Tensor, *, spec: Any, params: Any, seen: Visibility
) -> Tensor:
    """In place of SpecModule.attend."""
    return (
        reference.attend_call(seen.call(spec, q, k, v, params))
        .out.transpose(1, 2)
        .flatten(2)
    )


def both_modules() -> tuple[
    Callable[[], tuple[Any, Tensor]], Callable[[], tuple[Any, Tensor]]
]:
    def own() -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        m = qkeel.nn.Attention(32, 4, 2, 16, spec=SPEC)
        with torch.no_grad():
            for name in ("q_norm", "k_norm"):
                getattr(m, name).add_(0.2 * torch.randn(16))
        return m, torch.randn(2, 12, 32)

    def oracle() -> tuple[Any, Tensor]:
        m, x = own()
        m.double().attend = written_out
        return m, x.double()

    return own, oracle


def both_calls() -> tuple[Callable[[], tuple[Any, ...]], Callable[[], tuple[Any, ...]]]:
    def given() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(2, n, 12, 16) for n in (4, 2, 2)]

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        return qkeel.attention(
            q, k, v, spec=SPEC, params=SPEC.init_params(4, 2, 16), **more
        )

    def oracle(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        params = {n: p.double() for n, p in SPEC.init_params(4, 2, 16).items()}
        return reference.attend(SPEC, q, k, v, params=params, **more).out

    return lambda: (attend, *given()), lambda: (oracle, *(x.double() for x in given()))


def check(hazard: Hazard, own: Callable[[], Any], oracle: Callable[[], Any]) -> None:
    """With the compiled kernels and without, against one oracle."""
    true: Found | None = None
    for native, error in (("1", hazard.on), ("0", hazard.off)):
        os.environ["QKEEL_NATIVE"] = native
        if hazard.alone:
            torch._dynamo.reset()
        if error:
            with pytest.raises(Exception) as raised:
                hazard.do(*own())
            assert re.search(error, str(raised.value)), native
            continue
        true = hazard.do(*oracle()) if true is None else true
        found = hazard.do(*own())
        assert len(found) == len(true) > 0
        for i, (a, b) in enumerate(zip(found, true)):
            np.testing.assert_allclose(
                a.detach().double().numpy(), b.detach().numpy(), rtol=hazard.tolerance,
                atol=hazard.tolerance * max(1.0, b.detach().nan_to_num().abs().max().item() if b.numel() else 0.0),
                err_msg=f"result {i} with QKEEL_NATIVE={native}",
            )  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, hazard in OF_MODULES.items() if not hazard.alone]
)
def test_a_module_is_right_or_says_why_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")  # what it was comes back at the end
    check(OF_MODULES[name], *both_modules())


@pytest.mark.parametrize("name", OF_CALLS)
def test_a_call_is_right_or_says_why_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    check(OF_CALLS[name], *both_calls())


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_default_device_reaches_into_no_spec(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    for name, spec in SPECS.items():
        q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
        params = spec.init_params(2, 2, 16)
        out = qkeel.attention(q, k, v, spec=spec, params=params)
        with torch.device("meta"):
            again = qkeel.attention(q, k, v, spec=spec, params=params)
        assert torch.equal(out, again), name


@pytest.mark.slow
def test_what_compiles_or_traces_a_module_is_right_too() -> None:
    use = f"from {__name__} import check_those_alone; check_those_alone()"
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", use],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def check_those_alone() -> None:
    for name, hazard in OF_MODULES.items():
        if hazard.alone:
            try:
                check(hazard, *both_modules())
            except Exception as error:
                raise AssertionError(name) from error
