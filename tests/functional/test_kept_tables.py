"""Tables that are kept are those that would be made again, whatever changes between two calls, and do not pile up."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor

import qkeel
from qkeel.functional import kept_tables
from qkeel.functional.kept_tables import counted
from qkeel.spec import NTK, PI, DynamicNTK, Rope, YaRN

STRETCHES = (
    None,
    PI(factor=4.0),
    NTK(factor=4.0),
    DynamicNTK(factor=2.0, train_length=8),
    YaRN(factor=4.0, train_length=8),
)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Rope]:
    """The tables that were made, by their Rope."""
    kept_tables._KEPT.clear()
    found: list[Rope] = []
    make = Rope._made

    def noted(self: Rope, *how: Tensor) -> object:
        found.append(self)
        return make(self, *how)

    monkeypatch.setattr(Rope, "_made", noted)
    return found


def test_kept_is_as_fresh_for_random_changes_of_settings_and_positions_between_calls(made: list[Rope]) -> None:
    dice = random.Random(0)
    own = {n: torch.arange(n) for n in (5, 12)}
    numbers = own[12].numpy()  # what is written through it torch does not count
    calls = 400
    for _ in range(calls):
        n = dice.choice((5, 12))
        if dice.random() < 0.2:
            own[n][dice.randrange(n)] += dice.randrange(3)
        if dice.random() < 0.1:
            numbers[dice.randrange(12)] += 1
        if dice.random() < 0.1:
            own[5] = torch.arange(5) + dice.randrange(2)
        more = {} if (stretch := dice.choice(STRETCHES)) is None else {"stretch": stretch}
        rope = Rope(base=dice.choice((10.0, 1e4)), rotary=dice.choice((1.0, 0.5)), **more)
        pos = dice.choice((own[n], own[n][None], counted(0, n, torch.device("cpu")), own[n].to(torch.int32)))
        pos = pos if pos.ndim == 2 else pos[None]
        q = torch.empty(1, 1, n, 8, dtype=dice.choice((torch.float32, torch.float64, torch.bfloat16)))
        late = pos[:, -2:] if dice.random() < 0.3 else pos
        with torch.inference_mode(dice.random() < 0.3):
            found = rope.tables(q[:, :, -late.shape[1] :], q, late, pos)
        del made[len(made) - 1 :]
        fresh = rope._made(q, q, late, pos)
        for a, b in zip((*found[0], *found[1]), (*fresh[0], *fresh[1])):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype == torch.promote_types(q.dtype, torch.float32)
            assert not a.is_inference()
    assert len(kept_tables._KEPT) <= kept_tables.MOST


def test_layers_and_steps_share_one_table_which_no_checkpoint_holds_and_a_backward_pass_can_use(
    made: list[Rope],
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(qkeel.nn.Attention(32, 4, 2) for _ in range(3)))
    names = set(model.state_dict())
    x = torch.randn(2, 6, 32)
    with torch.inference_mode():
        model(x)
    for _ in range(2):
        model(x).sum().backward()
    assert len(made) == 1
    assert set(model.state_dict()) == names
    model[0](x, pos=(pos := torch.arange(6) + 3))
    model[1](x, pos=pos)
    assert len(made) == 2
    caches = [layer.new_cache() for layer in model]
    for first in (0, 4, 5):
        made.clear()
        for layer, cache in zip(model, caches):
            layer(x[:, first : first + (4 if not first else 1)], cache=cache)
        assert len(made) <= 1


def test_what_is_kept_is_bounded_by_number_and_size_and_goes_with_its_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def table(n: int) -> Tensor:
        x, pos = torch.empty(1, 1, n, 8), torch.arange(n)[None]
        Rope().tables(x, x, pos, pos)
        return pos

    alive = [table(n) for n in range(1, 40)]
    assert len(kept_tables._KEPT) == kept_tables.MOST
    del alive
    gc.collect()
    assert not kept_tables._KEPT
    monkeypatch.setattr(kept_tables, "MOST_BYTES", 3 * 4 * 10 * 8)
    alive = [table(10) for _ in range(5)]
    assert len(kept_tables._KEPT) == 3
    alive.append(table(1000))
    assert len(kept_tables._KEPT) == 1


def test_nothing_is_kept_where_it_would_not_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, pos = torch.empty(1, 1, 4, 8), torch.arange(4.0)[None]

    def size() -> int:
        Rope().tables(x, x, pos, pos)
        return len(kept_tables._KEPT)

    with torch._subclasses.FakeTensorMode():
        assert type(counted(0, 77, torch.device("cpu"))) is not Tensor
    assert type(counted(0, 77, torch.device("cpu"))) is Tensor
    torch.func.jvp(lambda x: x * size(), (pos,), (pos,))
    assert not kept_tables._KEPT
    angle = torch.zeros(1, 4, requires_grad=True)
    Rope().tables(x, x, angle, angle)[0][1].sum().backward()
    assert angle.grad is not None
    with torch.inference_mode():
        inside = torch.arange(4)[None]
    Rope().tables(x, x, inside, inside)
    assert not kept_tables._KEPT
    with monkeypatch.context() as patch:  # the memory of a table that a graph's capture makes goes with the graph
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert kept_tables._stream(torch.device("cuda", 0)) is None
    assert size() == 1
