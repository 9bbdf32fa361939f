"""Which kernel "auto" tries first: tables by name, looked up once, never trusted unseen."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qkeel import attention, ops
from qkeel.errors import QkeelWarning
from qkeel.kernels.choice import order, ordered, question, steps, stored
from qkeel.kernels.choice.order import Rule
from qkeel.ops import KERNELS, choose
from qkeel.spec import AttentionCall, AttentionSpec, ReRope, SlidingWindow, Softcap
from qkeel.spec.call import make_call

ROW = ("cpu", torch.float32, 64, "folded", False, "none")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(stored.VARIABLE, raising=False)
    monkeypatch.setenv("QKEEL_NATIVE", "0")  # tables here are of kernels that every machine has
    for cached in (stored.adopted, ops._orders_once, ops._tell_once):
        cached.cache_clear()
    yield
    for cached in (stored.adopted, ops._orders_once, ops._tell_once):
        cached.cache_clear()


def call(tokens: int = 5, **options: object) -> AttentionCall:
    q = torch.randn(1, 2, tokens, 8)
    spec = options.pop("spec", AttentionSpec())
    return make_call(spec, q, q, q, **options)  # type: ignore[arg-type]


def adopt(orders: stored.Orders, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(json.dumps(stored.written(orders)))
    monkeypatch.setenv(stored.VARIABLE, str(path))


def chosen(asked: AttentionCall, impl: str = "auto") -> str:
    return next(name for name, kernel in KERNELS.items() if kernel is choose(asked, impl))


def test_a_call_is_told_by_device_dtype_head_dim_form_gradient_and_statistics() -> None:
    assert question(call(), "exact") == ((torch.device("cpu"), torch.float32, 64, "folded", False, "exact"), 5)
    wide = torch.randn(1, 2, 3, 72, dtype=torch.bfloat16, requires_grad=True)
    (_, dtype, size, _, gradient, _), tokens = question(make_call(AttentionSpec(), wide, wide, wide), "none")
    assert (dtype, size, gradient, tokens) == (torch.bfloat16, 128, True, 3)
    with torch.no_grad():
        assert not question(make_call(AttentionSpec(), wide, wide, wide), "none")[0][4]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("folded", {}),
        ("masked", {"mask": torch.ones(5, 5).bool()}),
        ("masked", {"spec": AttentionSpec(position=SlidingWindow(window=2))}),
        ("capped", {"spec": AttentionSpec(cap=Softcap(5.0)), "mask": torch.ones(5, 5).bool()}),
        ("distance", {"spec": AttentionSpec(position=ReRope(window=2), cap=Softcap(5.0))}),
    ],
)
def test_the_form_of_a_call(form: str, options: dict[str, object]) -> None:
    assert question(call(**options), "none")[0][3] == form


def test_a_kernel_that_was_not_measured_keeps_its_place() -> None:
    assert ordered(("c", "a"), ["a", "b", "c", "d"]) == ("c", "b", "a", "d")
    assert ordered(("c", "gone", "a"), ["a", "b", "c"]) == ("c", "b", "a")
    assert ordered((), ["a", "b"]) == ("a", "b")


def test_a_measured_table_decides_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {ROW: {1: ("chunked", "sdpa"), 128: ("chunked", "sdpa"), 512: ("sdpa", "chunked")}}
    adopt(table, tmp_path / "t.json", monkeypatch)
    assert [chosen(call(t)) for t in (1, 128, 129, 600)] == ["chunked", "chunked", "sdpa", "sdpa"]
    assert steps((torch.device("cpu"), *ROW[1:])) == (
        (128, ("chunked", "sdpa")), (512, ("sdpa", "chunked")), (None, ())
    )  # fmt: skip


def test_the_numbers_stay_those_of_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt({ROW: {128: ("chunked", "sdpa")}}, tmp_path / "t.json", monkeypatch)
    q = torch.randn(1, 2, 5, 8)
    assert torch.equal(
        attention(q, q, q, spec=AttentionSpec()), attention(q, q, q, spec=AttentionSpec(), impl="chunked")
    )


def test_a_kernel_that_refuses_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = (*ROW[:3], "capped", *ROW[4:])
    adopt({row: {128: ("sdpa", "windowed", "chunked")}}, tmp_path / "t.json", monkeypatch)
    assert chosen(call(spec=AttentionSpec(cap=Softcap(5.0)))) == "chunked"


def test_a_named_kernel_is_not_asked_about_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt({ROW: {128: ("chunked", "sdpa")}}, tmp_path / "t.json", monkeypatch)
    assert chosen(call(), "sdpa") == "sdpa"


def test_under_dropout_the_order_is_that_of_the_table_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt({ROW: {128: ("chunked", "sdpa")}}, tmp_path / "t.json", monkeypatch)
    assert (chosen(call()), chosen(call(dropout=0.1))) == ("chunked", "sdpa")


def test_rules_of_the_default_table_hold_where_nothing_was_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "DEFAULT", (Rule(order=("chunked", "sdpa"), device="cpu", gradient=False, most=128),))
    assert (chosen(call(128)), chosen(call(129))) == ("chunked", "sdpa")
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert choose(make_call(AttentionSpec(), q, q, q), "auto") is KERNELS["sdpa"]
    ops._orders_once.cache_clear()
    adopt({ROW: {128: ("sdpa", "chunked")}}, tmp_path / "t.json", monkeypatch)
    stored.adopted.cache_clear()
    assert chosen(call()) == "sdpa"


def test_zero_switches_tables_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "DEFAULT", (Rule(order=("chunked", "sdpa")),))
    monkeypatch.setenv(stored.VARIABLE, "0")
    assert chosen(call()) == "sdpa"
    assert stored.in_force() == "none"


def torn(text: str) -> str:
    return text[: len(text) // 2]


def older(text: str) -> str:
    return text.replace(torch.__version__, "2.0.0")


def foreign(text: str) -> str:
    return text.replace(json.dumps(stored.processor()), '"another one"')


BAD = {
    "torn": (torn, "of no use"),
    "old": (older, "measured with torch 2.0.0"),
    "foreign": (foreign, "measured with processor another one"),
    "no table": (lambda _: "[]", "of no use"),
    "other sizes": (lambda text: text.replace('"tokens": 128', '"tokens": 96'), "does not tell apart"),
    "other dtype": (lambda text: text.replace("float32", "float7"), "float7"),
    "no text": (lambda _: "\x00", "of no use"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_ignored_with_one_warning(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, said = BAD[case]
    path = tmp_path / "t.json"
    adopt({ROW: {128: ("chunked", "sdpa")}}, path, monkeypatch)
    path.write_text(spoil(path.read_text()))
    with pytest.warns(QkeelWarning, match=said) as warned:
        assert chosen(call()) == "sdpa"
    chosen(call(200))
    assert len(warned) == 1
    assert "qkeel bench --use" in str(warned[0].message)


def test_a_table_that_is_named_and_missing_is_told_and_the_usual_place_may_be_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.adopted() == {}
    assert stored.table_path().parent == tmp_path / "qkeel"
    assert stored.in_force() == "default"
    stored.adopted.cache_clear()
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "none.json"))
    with pytest.warns(QkeelWarning, match="does not exist"):
        assert chosen(call()) == "sdpa"


def test_the_table_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt({ROW: {128: ("chunked", "sdpa")}}, tmp_path / "t.json", monkeypatch)
    assert chosen(call()) == "chunked"
    (tmp_path / "t.json").unlink()
    assert chosen(call(7)) == "chunked"
    assert stored.in_force() == "measured here"


def test_a_choice_is_logged_once_per_question(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="qkeel"):
        for _ in range(3):
            attention(*[torch.randn(1, 2, 5, 8)] * 3, spec=AttentionSpec())
        attention(*[torch.randn(1, 2, 5, 72)] * 3, spec=AttentionSpec(), stats=True)
    assert [record.getMessage() for record in caplog.records] == [
        "kernel sdpa for folded attention, float32, head_dim ≤ 64, no gradient, statistics none, on cpu",
        "kernel sdpa for folded attention, float32, head_dim > 64, no gradient, statistics exact, on cpu",
    ]
