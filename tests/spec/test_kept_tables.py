"""Tables that are kept are those that would be made again, whatever changes between two calls, and do not pile up."""

from __future__ import annotations

import copy
import random
import threading

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import qkeel
from qkeel.spec import NTK, PI, DynamicNTK, Rope, YaRN
from qkeel.spec import rope as kept_tables
from qkeel.spec.rope import CosSin, counted

CPU = torch.device("cpu")
ROPES = (
    Rope(),
    Rope(base=10.0, rotary=0.5),
    Rope(stretch=PI(factor=4.0)),
    Rope(stretch=NTK(factor=4.0)),
    Rope(stretch=DynamicNTK(factor=2.0, train_length=8)),
    Rope(stretch=YaRN(factor=4.0, train_length=8)),
)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Rope]:
    """The Ropes whose tables were made, where a CPU's are kept as a GPU's are."""
    monkeypatch.setattr(kept_tables, "KEPT_ON", {"cpu", "cuda"})
    kept_tables._KEPT.clear()
    found: list[Rope] = []
    make = Rope._made

    def noted(self: Rope, *how: Tensor) -> tuple[CosSin, CosSin]:
        found.append(self)
        return make(self, *how)

    monkeypatch.setattr(Rope, "_made", noted)
    return found


def tables(pos: Tensor, rope: Rope | None = None) -> tuple[CosSin, CosSin]:
    x = torch.empty(1, 1, pos.shape[1], 8)
    return (rope or Rope()).tables(x, x, pos, pos)


def test_kept_is_as_fresh_for_random_settings_and_changes_of_positions_and_tables(made: list[Rope]) -> None:
    dice = random.Random(0)
    own = {n: torch.arange(n)[None] for n in (5, 12)}
    numbers = own[12].numpy()  # what is written through it torch does not count
    found, shared = None, 0
    for _ in range(600):
        n = dice.choice((5, 12))
        if dice.random() < 0.1:
            own[n][0, dice.randrange(n)] += dice.randrange(3)
        if dice.random() < 0.1:
            numbers[0, dice.randrange(12)] += 1
        if dice.random() < 0.1:  # by somebody who was handed what is kept
            changed = counted(0, n, CPU) if found is None or dice.random() < 0.5 else found[dice.randrange(2)][1]
            with torch.inference_mode(changed.is_inference() or dice.random() < 0.5):
                changed.add_(1)
        assert counted(0, n, CPU).tolist() == [list(range(n))]
        rope = dice.choice(ROPES)
        pos = dice.choice((own[n], counted(0, n, CPU), counted(0, n, CPU), copy.deepcopy(counted(0, n, CPU)) + 1))
        late = dice.choice((pos, pos, pos, pos[:, -2:], counted(n - 2, n, CPU)))
        k = torch.empty(1, 1, n, 8, dtype=dice.choice((torch.float32, torch.float64)))
        q = k[:, :, -late.shape[1] :].to(dice.choice((torch.bfloat16, k.dtype, k.dtype)))
        made.clear()
        with torch.inference_mode(dice.random() < 0.3):
            found = rope.tables(q, k, late, pos)
        shared += not made
        fresh = rope._made(q, k, late, pos)
        assert (found[0] is found[1]) == (late is pos)
        for a, b in zip((*found[0], *found[1]), (*fresh[0], *fresh[1])):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
    assert shared > 20


def test_layers_and_steps_share_one_table_which_no_checkpoint_holds_and_a_backward_pass_can_use(
    made: list[Rope],
) -> None:
    torch.manual_seed(0)
    layers = [qkeel.nn.Attention(32, 4, 2) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    names = set(model.state_dict())
    x = torch.randn(2, 6, 32)
    with torch.inference_mode():
        model(x)
    for _ in range(2):
        model(x).sum().backward()
    assert len(made) == 1
    assert set(model.state_dict()) == names
    caches = [layer.new_cache() for layer in layers]
    for first in (0, 4, 5):
        made.clear()
        for layer, cache in zip(layers, caches):
            layer(x[:, first : first + (4 if not first else 1)], cache=cache)
        assert len(made) <= 1


def test_what_is_kept_is_bounded_in_number_and_size_and_threads_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (kept_tables.MOST, kept_tables.MOST_BYTES) == (16, 2**27)  # 128 MiB
    for n in range(1, 40):
        tables(counted(0, n, CPU))
    assert len(kept_tables._KEPT) == kept_tables.MOST
    wrong: list[int] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for n in (dice.randrange(1, 30) for _ in range(200)):
            (cos, _), _ = tables(counted(0, n, CPU))
            if not torch.equal(cos[0, 0, :, 0], torch.arange(n).float().cos()):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    kept_tables._KEPT.clear()
    monkeypatch.setattr(kept_tables, "MOST_BYTES", 1000)
    for n in (10, 10, 11, 12, 1000):
        tables(counted(0, n, CPU))
        assert sum(one.size for one in kept_tables._KEPT.values()) <= 1000
    assert [one.size for one in kept_tables._KEPT.values()] == [12 * 8, 12 * (8 + 2 * 4 * 4)]


def test_nothing_is_kept_or_taken_where_it_would_not_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.arange else out

    def outside() -> list[list[int]]:
        return counted(0, 3, CPU).tolist()

    for before in (False, True):
        kept_tables._KEPT.clear()
        if before:
            outside()
        with torch._subclasses.FakeTensorMode():
            assert type(counted(0, 3, CPU)) is not Tensor
        assert type(counted(0, 3, CPU)) is Tensor
        with Doubled():
            assert outside() == [[0, 2, 4]]
        assert outside() == [[0, 1, 2]]
        size = len(kept_tables._KEPT)
        torch.func.vmap(lambda x: x * tables(counted(0, 9, CPU))[0][0])(torch.ones(2))
        assert len(kept_tables._KEPT) == size
    angle = torch.zeros(1, 4, requires_grad=True)
    tables(angle)[0][1].sum().backward()
    assert angle.grad is not None
    with torch.inference_mode():
        tables(torch.arange(4)[None])
    torch.set_default_device("cpu")  # a mode that changes nothing here
    tables(counted(0, 4, CPU))
    torch.set_default_device(None)
    assert len(kept_tables._KEPT) == size + 2
    with monkeypatch.context() as patch:  # the memory of a table that a graph's capture makes goes with the graph
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert kept_tables._stream(torch.device("cuda", 0)) is None


def test_a_table_that_somebody_wrote_into_is_made_again_whichever_of_them_it_is(made: list[Rope]) -> None:
    at, late = counted(0, 5, CPU), counted(2, 5, CPU)
    q, k = torch.empty(1, 1, 3, 8), torch.empty(1, 1, 5, 8)
    fresh = [x.clone() for pair in Rope().tables(q, k, late, at) for x in pair]
    for i in range(4):
        kept = [x for pair in Rope().tables(q, k, late, at) for x in pair]
        made.clear()
        assert all(map(torch.equal, kept, fresh))
        assert not made
        kept[i].add_(1)
        assert all(map(torch.equal, [x for pair in Rope().tables(q, k, late, at) for x in pair], fresh)), i
        assert len(made) == 1
    late.add_(1)  # the positions of the queries alone
    again = counted(2, 5, CPU)
    assert again.tolist() == [[2, 3, 4]]
    assert all(map(torch.equal, [x for pair in Rope().tables(q, k, again, at) for x in pair], fresh))
    own = torch.nn.Parameter(torch.arange(5.0)[None], requires_grad=False)
    for pos in (own, torch.arange(5.0)[None].requires_grad_()):  # not counted here: never kept
        made.clear()
        for _ in range(2):
            Rope().tables(k, k, pos, pos)
        assert len(made) == 2
