"""A handle undoes once; many are undone last first."""

from __future__ import annotations

import pytest

from qkeel.errors import InvalidValueError
from qkeel.handle import Handle, compose


def test_remove_undoes_once():
    log: list[str] = []
    handle = Handle(lambda: log.append("undone"))
    assert handle.active
    handle.remove()
    handle.remove()
    assert log == ["undone"]
    assert not handle.active
    assert repr(handle) == "<Handle: removed>"
    handle.about = "qk_norm"
    assert repr(handle) == "<Handle of qk_norm: removed>"


def test_leaving_the_block_undoes_even_after_an_error():
    log: list[str] = []
    with (
        pytest.raises(RuntimeError, match="inside"),
        Handle(lambda: log.append("undone")),
    ):
        raise RuntimeError("inside")
    assert log == ["undone"]


def test_the_last_change_goes_first():
    log: list[int] = []
    whole = compose(Handle(lambda i=i: log.append(i)) for i in range(3))
    whole.remove()
    assert log == [2, 1, 0]


def test_a_part_removed_before_is_not_undone_again():
    log: list[int] = []
    parts = [Handle(lambda i=i: log.append(i)) for i in range(2)]
    whole = compose(parts)
    parts[1].remove()
    whole.remove()
    assert log == [1, 0]


def test_state_and_load_reach_every_part_however_nested():
    values = [{"x": 1}, {"x": 2}, {"x": 3}]

    def handle(i):
        return Handle(
            lambda: None, state=lambda: dict(values[i]), load=values[i].update
        )

    whole = compose([handle(0), compose([handle(1), handle(2)])])
    saved = whole.state()
    assert saved == {"0.x": 1, "1.0.x": 2, "1.1.x": 3}
    for v in values:
        v["x"] = 0
    whole.load(saved)
    assert values == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_more_than_ten_parts_keep_their_own_state():
    values = [{"x": i} for i in range(12)]
    whole = compose(
        Handle(lambda: None, state=lambda v=v: dict(v), load=v.update) for v in values
    )
    saved = whole.state()
    for v in values:
        v["x"] = -1
    whole.load(saved)
    assert [v["x"] for v in values] == list(range(12))


def test_a_handle_without_state_saves_nothing_and_refuses_the_state_of_another():
    handle = Handle(lambda: None)
    assert handle.state() == {}
    handle.load({})
    with pytest.raises(
        InvalidValueError,
        match="the state holds 'anything', which this change does not have",
    ):
        handle.load({"anything": 1})
    two = compose(
        [
            Handle(lambda: None, state=lambda: {"x": 1}, load=lambda _: None),
            Handle(lambda: None),
        ]
    )
    two.load({"0.x": 1})
    for wrong in ("1.x", "2.x", "x", "0x"):
        with pytest.raises(
            InvalidValueError, match="load the state of the same model and remedy"
        ):
            two.load({wrong: 1})
    assert compose([]).state() == {}
