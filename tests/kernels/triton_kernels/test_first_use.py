"""Each family of kernels computes a small case at its first use on a device, and steps aside where that goes wrong."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

from qkeel.kernels import contract
from qkeel.kernels.triton import available
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

CPU = torch.device("cpu")
FAMILIES: tuple[available.Family, ...] = get_args(available.Family)


@pytest.fixture(autouse=True)
def _first_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors stand for CUDA's, and no family has been used yet."""
    monkeypatch.setattr(available, "usable", lambda device: available.loaded())
    available._agrees.cache_clear()
    yield
    available._agrees.cache_clear()


def asked(family: available.Family) -> tuple[list[bool], list[str]]:
    """The answers to two questions, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        answers = [available.trusted(family, CPU) for _ in range(2)]
    return answers, [str(w.message) for w in told]


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_kernels_are_used_and_nothing_is_said(family: available.Family, monkeypatch: pytest.MonkeyPatch) -> None:
    from qkeel.kernels.triton import first_use

    difference = first_use.difference

    assert available.loaded()  # which registers the operators
    found = []
    monkeypatch.setattr(first_use, "difference", lambda *case: found.append(difference(*case)) or found[-1])
    assert asked(family) == ([True, True], [])
    assert len(found) == 1
    assert found[0] <= 0.5  # room for other orders of rounding


def test_every_family_has_a_case() -> None:
    from qkeel.kernels.triton import first_use

    assert {*first_use.CASES} == {*FAMILIES}


# A family, and where a fault is planted: what a kernel wrote is changed by a part in a thousand.
FAULTS: list[tuple[available.Family, str, str]] = [
    ("norm and rotation", "norm_rope", "_launched"),
    ("norm and rotation", "norm_rope", "_launch"),
    ("norm and rotation", "norm_rope", "summed"),
    ("statistics", "statistics", "rows_of"),
    ("statistics", "statistics", "head_numbers"),
    ("all statistics", "row_fields", "row_fields"),
    ("sampled statistics", "statistics", "extremes"),
    ("sampled statistics", "statistics", "bracket_of"),
    ("sampled statistics", "statistics", "sampled_head_numbers"),
    ("sampled statistics", "statistics", "rows_of"),
    ("heads of weights", "heads", "HeadTable.norms"),
    ("heads of weights", "heads", "HeadTable.grams"),
    ("heads of weights", "heads", "HeadTable.move"),
    ("heads of weights", "heads", "HeadTable.scale"),
    ("step of AdamW", "adamw", "_launch"),
]


def floats(value: Any) -> list[Tensor]:
    """The tensors of numbers in what a function was given or returned."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if type(value).__name__ == "HeadTable":
        return list(value._views)
    if type(value).__name__ == "Launch":
        return floats(value.out)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [x for part in parts for x in floats(part)]


def planted(monkeypatch: pytest.MonkeyPatch, module: str, name: str, fails: bool) -> None:
    home: Any = __import__(f"qkeel.kernels.triton.{module}", fromlist=["_"])
    *outer, last = name.split(".")
    home = getattr(home, outer[0]) if outer else home
    run = getattr(home, last)
    assert inspect.isfunction(run)

    def faulty(*given: Any, **how: Any) -> Any:
        if fails:
            raise RuntimeError("no such instruction")
        found = run(*given, **how)
        with torch.no_grad():
            for x in floats(given if found is None else found):
                if x.numel() and not x.requires_grad:
                    x.mul_(1.001)
        return found

    monkeypatch.setattr(home, last, faulty)


# Where a kernel fails makes no difference: the first of each family does.
FIRST = [next(fault for fault in FAULTS if fault[0] == family) for family in FAMILIES]


@pytest.mark.parametrize(
    ("fault", "fails"), one_in([*((f, False) for f in FAULTS), *((f, True) for f in FIRST)], 5), ids=str
)
def test_a_family_that_fails_or_differs_steps_aside_with_one_warning(
    fault: tuple[available.Family, str, str], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, module, name = fault
    planted(monkeypatch, module, name, fails)
    answers, told = asked(family)
    assert answers == [False, False]
    assert len(told) == 1
    assert ("fail: RuntimeError: no such instruction" if fails else "differ from torch's result by") in told[0]
    assert f"({family}) on cpu" in told[0]
    assert "QKEEL_TRITON=0" in told[0]


def test_torch_computes_what_a_family_that_stepped_aside_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(AttentionSpec(), *(torch.randn(1, 2, 8, 16) for _ in range(3)))
    assert contract.row_statistics(call) is not None
    planted(monkeypatch, "statistics", "rows_of", fails=True)
    available._agrees.cache_clear()
    with pytest.warns(UserWarning, match="statistics"):
        assert contract.row_statistics(call) is None


def test_the_callers_settings_do_not_reach_the_case_and_the_case_does_not_reach_the_caller() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert asked("norm and rotation") == ([True, True], [])
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_tried_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not available.trusted("statistics", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    from qkeel.kernels.triton import first_use

    monkeypatch.setattr(first_use, "difference", lambda family, device: 0.0)
    assert available.trusted("statistics", device)  # the answer under capture was not kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert available.trusted("statistics", device)
