"""What stands in torch.utils.checkpoint's names while a search runs is for the thread that searches alone."""

import threading

import pytest
import torch
import torch.utils.checkpoint as checkpointing
from torch import nn

from qkeel.patching.autograd import without_checkpoints

NAME = "_checkpoint_without_reentrant_generator"


def gradient(reentrant):
    torch.manual_seed(0)
    layer, x = (
        nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        torch.randn(2, 4, requires_grad=True),
    )
    checkpointing.checkpoint(
        layer, x, use_reentrant=reentrant
    ).square().sum().backward()
    return layer[0].weight.grad.clone()


def in_a_thread(act):
    errors = []

    def run():
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_another_thread_trains_with_checkpoints_while_a_search_runs(
    reentrant,
):
    expected, found = gradient(reentrant), []
    with without_checkpoints():
        in_a_thread(lambda: found.append(gradient(reentrant)))
    assert torch.equal(found[0], expected)


def test_the_name_that_torch_2_14_calls_is_replaced_too_and_put_back(
    monkeypatch,
):
    def generator(function, args, kwargs):
        raise AssertionError("torch's own runs")

    monkeypatch.setattr(checkpointing, NAME + "_impl", generator, raising=False)
    with without_checkpoints():
        list(getattr(checkpointing, NAME + "_impl")(nn.Identity(), (), {}))
    assert getattr(checkpointing, NAME + "_impl") is generator


def test_searches_in_two_threads_and_within_each_other_leave_torch_as_it_was():
    before = getattr(checkpointing, NAME)

    def search():
        with without_checkpoints(), without_checkpoints():
            assert getattr(checkpointing, NAME) is not before

    threads = [threading.Thread(target=search) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert getattr(checkpointing, NAME) is before
    assert "apply" not in vars(checkpointing.CheckpointFunction)
    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_search_checkpointed_functions_run_once_with_a_graph(reentrant):
    layer, calls = nn.Linear(4, 4), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    with without_checkpoints():
        out = checkpointing.checkpoint(
            layer, torch.randn(2, 4), use_reentrant=reentrant
        )
    out.sum().backward()
    assert layer.weight.grad is not None
    assert len(calls) == 1
