"""What processes of a run agree on, played by threads that share a store: values, reductions, refusals, waiting."""

import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from qkeel.distributed.agree import ApartError, OwnGroup
from qkeel.errors import QkeelWarning

agree = importlib.import_module("qkeel.distributed.agree")  # the module, not `agree()`


class Meetings(threading.local):
    """Those of one process."""

    store = group = None
    runs = 0


@pytest.fixture
def on_each(monkeypatch):
    """Calls a function of the rank on two processes; what each returns or raises."""
    store, role = torch.distributed.HashStore(), threading.local()
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(agree, "process_store", lambda: store)
    monkeypatch.setattr(agree, "_Meetings", Meetings())
    monkeypatch.setattr(agree, "world", lambda: 2)
    monkeypatch.setattr(agree, "rank", lambda: role.rank)

    def outcome(rank, act):
        role.rank = rank
        try:
            return act(rank)
        except (ApartError, KeyError, OSError) as error:
            return error

    # A thread is a process to its end.
    processes = [ThreadPoolExecutor(1) for _ in range(2)]

    def outcomes(act):
        futures = [
            process.submit(outcome, i, act) for i, process in enumerate(processes)
        ]
        return [future.result(30) for future in futures]

    yield outcomes
    for process in processes:
        process.shutdown()


def test_a_group_gathers_values_and_reduces_vectors(on_each):
    def act(rank):
        group = OwnGroup("numbers")
        vectors = [torch.tensor([1.0 + rank, -rank]) for _ in range(2)]
        group.reduce_(vectors[0], "sum")
        group.reduce_(vectors[1], "max")
        alone = OwnGroup("alone", [rank])
        values = group.gather("long" * rank * 9), alone.gather(rank)
        group.close()
        with pytest.raises(RuntimeError, match="has left"):
            group.gather(0)
        return *(vector.tolist() for vector in vectors), *values

    expected = [3.0, -1.0], [2.0, 0.0], ["", "long" * 9]
    assert on_each(act) == [(*expected, [0]), (*expected, [1])]


@pytest.mark.parametrize("by", ["sum", "max"])
def test_a_reduction_leaves_the_vector_that_it_was_given(by):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        vector = torch.tensor([1.0, -2.0])
        agree.reduced(vector, by).zero_()
    finally:
        torch.distributed.destroy_process_group()
    assert vector.tolist() == [1.0, -2.0]


def test_all_do_a_thing_or_none(on_each):
    undone = []

    def act(rank, describe, fails=()):
        def action():
            if rank in fails:
                raise KeyError(rank)
            return rank

        return agree.agree("it", action, describe, undone.append)

    assert on_each(lambda rank: act(rank, lambda _: "same")) == [0, 1]
    assert undone == []
    apart = on_each(lambda rank: act(rank, str))
    assert [str(error).partition(". ")[2] for error in apart] == [
        "On process 0: 0. On process 1: 1"
    ] * 2
    assert sorted(undone) == [0, 1]
    told, own = on_each(lambda rank: act(rank, str, fails=[1]))
    assert isinstance(own, KeyError)
    assert "it failed on process 1" in str(told)
    assert sorted(undone) == [0, 0, 1]
    assert all(isinstance(e, KeyError) for e in on_each(lambda r: act(r, str, [0, 1])))
    # Another subject is another call.
    different = on_each(lambda rank: agree.gather_messages(f"call {rank}", ""))
    assert ["different calls" in str(error) for error in different] == [True, True]


def test_an_action_with_another_way_takes_it_only_where_all_failed(on_each):
    def fails(rank, done=()):
        if rank in done:
            return agree.gather_messages("it", "")
        return agree.fail_on_all("it", OSError("full"))

    assert on_each(fails) == [None, None]
    apart = on_each(lambda rank: fails(rank, done=[1]))
    assert [type(error) for error in apart] == [ApartError, ApartError]
    assert ["process 0" in str(error) for error in apart] == [True, True]


def test_who_waits_says_so_and_a_late_process_gets_the_same_answer(
    on_each, monkeypatch
):
    monkeypatch.setattr(agree, "PATIENCE", 0.02)

    def late(rank):
        time.sleep(0.3 * rank)
        return agree.absent("late", 0.1, "it")

    with pytest.warns(QkeelWarning, match="it waits for process 1, at most 0.1"):
        assert on_each(late) == [[1], [1]]
    assert on_each(lambda rank: agree.absent("there", 20, "it")) == [[], []]
    withdrawn = on_each(
        lambda rank: agree.absent("off", 20) if rank else agree.withdraw("off")
    )
    assert withdrawn == [None, [0]]

    def waits(rank):
        group = OwnGroup("slow")
        time.sleep(0.2 * rank)
        return group.gather(rank, "it")

    with pytest.warns(QkeelWarning, match="it waits for other processes, at most 10 s"):
        assert on_each(waits) == [[0, 1], [0, 1]]
    assert agree.time_limit() == 10
    assert [agree.name_processes(ranks) for ranks in ([1], [1, 3])] == [
        "process 1",
        "processes 1, 3",
    ]
