"""Bad input through the public doors: torch's numbers or one clear error, never an end of the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qkeel
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    QkeelWarning,
    RefusedError,
)
from qkeel.functional.norms import l2_norm
from qkeel.kernels.native import build, operators

SPEC = qkeel.preset("qwen3")


def attend(d: int = 8, **changed: object) -> Tensor:
    q = torch.linspace(-1, 1, 2 * 5 * d).view(1, 2, 5, d)
    given = {
        "q": q,
        "k": q,
        "v": q,
        "spec": SPEC,
        "params": SPEC.init_params(2, 2, d),
        **changed,
    }
    return qkeel.attention(**given)  # type: ignore[arg-type]


def module(d: int = 8, dtype: torch.dtype = torch.float32, **given: object) -> Tensor:
    torch.manual_seed(0)
    own = qkeel.nn.Attention(2 * d, 2, spec=SPEC).to(dtype)
    x = given.pop("x", torch.linspace(-1, 1, 5 * 2 * d).view(1, 5, -1).to(dtype))
    return own(x, **given)


DOORS: list[Callable[..., Tensor]] = [attend, module]


def no_compiler(folder: Path, m: pytest.MonkeyPatch) -> None:
    m.setenv("QKEEL_NATIVE_CACHE", str(folder / "cache"))
    m.setenv("CXX", "/no/compiler")


def no_place_to_write(folder: Path, m: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    m.setenv("QKEEL_NATIVE_CACHE", str(folder / "file" / "below"))


def another_architecture(folder: Path, m: pytest.MonkeyPatch) -> None:
    """A cache with a library whose head says AArch64, and no compiler to make a better one."""
    m.setenv("QKEEL_NATIVE_CACHE", str(folder))
    m.setenv("CXX", "/no/compiler")
    library = folder / f"{build.NAME}-{build.key()}.so"
    library.write_bytes(
        b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xb7\x00" + bytes(1000)
    )


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "spoil", [no_compiler, no_place_to_write, another_architecture]
)
def test_where_nothing_can_be_compiled_torch_computes(
    spoil: Callable[..., None],
    door: Callable[..., Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as off:
        off.setenv("QKEEL_NATIVE", "0")
        true = door()
    monkeypatch.setattr(
        operators, "_loaded", functools.cache(operators._loaded.__wrapped__)
    )
    spoil(tmp_path, monkeypatch)
    with pytest.warns(QkeelWarning, match="without its compiled") as told:
        found = [door(), door()]
    assert all(torch.equal(x, true) for x in found)
    assert len(told) == 1


@pytest.mark.parametrize("d", [4, 12, 1030])
@pytest.mark.parametrize("door", DOORS)
def test_other_widths_are_torchs(
    door: Callable[..., Tensor], d: int, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = door(d)
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    assert torch.equal(ours, door(d))
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    with pytest.raises(RefusedError, match="multiples of 8"):
        attend(d, impl="native")


FP8 = torch.float8_e4m3fn
META = {"device": "meta"}
BAD: dict[str, tuple[Callable[[], Tensor], type[QkeelError], str]] = {
    "a module of 8 bits": (lambda: module(dtype=FP8), InvalidTypeError, "16 bits"),
    "a module's mask elsewhere": (
        lambda: module(mask=torch.ones(5, 5, **META)),
        InvalidValueError,
        "mask on cpu",
    ),
    "a module's input of integers": (
        lambda: module(x=torch.ones(1, 5, 16).long()),
        InvalidTypeError,
        "x of floating",
    ),
    "a module's input of half": (
        lambda: module(x=torch.ones(1, 5, 16).half()),
        InvalidTypeError,
        "like the weights",
    ),
    "a module's input elsewhere": (
        lambda: module(x=torch.ones(1, 5, 16, **META)),
        InvalidValueError,
        "x on cpu",
    ),
    "a module's input of no tensor": (
        lambda: module(x=[[1.0]]),
        InvalidTypeError,
        "got list",
    ),
    "a norm of 8 bits": (
        lambda: l2_norm(torch.ones(3).to(FP8)),
        InvalidTypeError,
        "to normalise",
    ),
}


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_clear_error(
    name: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    do, error, told = BAD[name]
    with pytest.raises(error, match=told):
        do()


def test_positions_that_are_not_numbers_see_nothing_by_either_path(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec in (SPEC, qkeel.preset("baseline")):
        for where in ({"pos_q"}, {"pos_k"}, {"pos_q", "pos_k"}):
            pos = torch.arange(5.0)
            pos[2] = torch.nan
            given = {
                name: pos if name in where else torch.arange(5.0)
                for name in ("pos_q", "pos_k")
            }
            params = spec.init_params(2, 2, 8)
            out, stats = attend(spec=spec, params=params, stats=True, **given)
            with monkeypatch.context() as off:
                off.setenv("QKEEL_NATIVE", "0")
                true, known = attend(spec=spec, params=params, stats=True, **given)
            torch.testing.assert_close(out, true, equal_nan=True)
            torch.testing.assert_close(stats.max_logit, known.max_logit, equal_nan=True)
            assert torch.equal(stats.n_pairs, known.n_pairs)


def test_half_numbers_enter_a_module_of_float_under_autocast_or_a_hook() -> None:
    own = qkeel.nn.Attention(16, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert own(torch.ones(1, 5, 16).bfloat16()).dtype == torch.bfloat16
    for layer in (own.q_proj, own.k_proj, own.v_proj):
        layer.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    assert own(torch.ones(1, 5, 16).bfloat16()).dtype == torch.float32
