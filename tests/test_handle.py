"""A handle undoes once; many are undone last first."""

import random

import pytest

from qkeel.errors import InvalidValueError
from qkeel.handle import Handle, compose


def test_remove_undoes_once():
    log = []
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
    log = []
    with (
        pytest.raises(RuntimeError, match="inside"),
        Handle(lambda: log.append("undone")),
    ):
        raise RuntimeError("inside")
    assert log == ["undone"]


def nested(draw, log, depth=2):
    """Changes with a number each, in random nests; those inside, in their order, with their states."""
    if depth == 0 or draw.random() < 0.3:
        state = {"x": draw.random()}
        leaf = Handle(
            lambda: log.append(state["x"]),
            state=lambda: dict(state),
            load=state.update,
        )
        return leaf, [(leaf, state)]
    parts = [nested(draw, log, depth - 1) for _ in range(draw.randint(1, 12))]
    leaves = [leaf for _, inside in parts for leaf in inside]
    return compose(part for part, _ in parts), leaves


@pytest.mark.parametrize("seed", range(6))
def test_a_whole_keeps_the_state_of_every_part_and_undoes_the_last_first_and_once(seed):
    draw, log = random.Random(seed), list[float]()
    whole, leaves = nested(draw, log)
    values = [state["x"] for _, state in leaves]
    saved = whole.state()
    assert list(saved.values()) == values
    for _, state in leaves:
        state["x"] = 0.0
    whole.load(saved)
    assert [state["x"] for _, state in leaves] == values
    early = draw.randrange(len(leaves))
    leaves[early][0].remove()  # before the others, and not again
    whole.remove()
    whole.remove()
    first = values.pop(early)
    assert log == [first, *values[::-1]]


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
