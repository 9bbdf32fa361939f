"""The roles of passes: trained or not, by what a program does with them."""

import pytest
import torch
from tests.contract.watch.small import batch, small
from tests.monitor.roles import check_clip, check_records
from tests.training import adamw, sgd, step
from torch import nn

import qkeel


@pytest.mark.parametrize("seed", range(6))
def test_a_record_holds_the_trained_passes_of_its_step_and_the_others_apart(
    seed,
):
    check_records(seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_clip_follows_the_trained_passes_alone(seed):
    check_clip(seed)


def test_a_pass_on_tensors_without_values_is_not_counted():
    model = small()
    optimizer = sgd(model)
    with qkeel.watch(model, optimizer) as monitor:
        shapes = {
            name: torch.empty_like(p, device="meta")
            for name, p in model.named_parameters()
        }
        torch.func.functional_call(model, shapes, (batch(0).to("meta"),))
        assert monitor.passes == 0
        step(model, optimizer, batch(0))
        assert monitor.active
        assert monitor.history.steps.tolist() == [0]


def test_a_hook_that_another_removes_in_the_middle_of_a_call_does_nothing():
    model = small()
    monitor = qkeel.watch(model)
    model.register_forward_pre_hook(lambda *_: monitor.remove(), prepend=True)
    assert model(batch(0)).isfinite().all()
    assert not monitor.active


def test_optimizers_that_never_stepped_over_a_trained_pass_are_told_of_once():
    model = small()
    optimizer = sgd(model)
    with qkeel.watch(model, optimizer) as monitor:
        with torch.no_grad():
            model(batch(0))
        with pytest.warns(qkeel.errors.QkeelWarning, match="no gradient had reached"):
            optimizer.step()
        optimizer.step()  # a second warning would be an error
        assert len(monitor.history) == 1
        assert monitor.history.phase == "eval"


def test_a_pass_inside_a_transform_of_torch_func_is_told_of_and_left_alone():
    model = small()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with qkeel.watch(model, rules=()) as monitor:
        take = torch.func.grad(
            lambda w: torch.func.functional_call(model, w, (batch(0),)).sum()
        )
        with pytest.warns(qkeel.errors.QkeelWarning, match="torch.func"):
            take(weights)
        take(weights)  # a second warning would be an error
        assert monitor.active
        assert monitor.passes == 0


class Labelled(nn.Module):
    """Returns its loss as transformers' models do: of the whole step's tokens, if their number is given."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, x, num_items_in_batch=None):
        squares = self.inner(x).square()
        return (
            squares.mean()
            if num_items_in_batch is None
            else squares.sum() / num_items_in_batch
        )


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_of_a_step_is_that_of_all_its_tokens(shared):
    model = Labelled()
    optimizer = sgd(model, 0.0)
    batches = [batch(seed, b=2) for seed in range(3)]
    with torch.no_grad():
        right = float(model(torch.cat(batches)))
    with qkeel.watch(model, optimizer, rules=()) as monitor:
        for x in batches:
            loss = (
                model(x, num_items_in_batch=torch.cat(batches).numel())
                if shared
                else model(x)
            )
            loss.backward()
        optimizer.step()
        assert monitor.history.values["train_loss"].tolist() == pytest.approx(
            [right], rel=1e-5
        )


def test_a_hundred_training_passes_without_a_step_of_the_optimizer_are_told_of_once():
    model = small()
    optimizer = adamw(model, 0.01)
    other = sgd(model, 0.01)

    def train(steps):
        for _ in range(steps):
            step(model, other, batch(0))

    with qkeel.watch(model, optimizer, every=1000) as monitor:
        train(99)  # fewer may be micro-batches: a warning would be an error
        optimizer.step()
        train(99)
        with torch.no_grad():
            model(batch(0))
        model.eval()
        train(2)
        model.train()
        with pytest.warns(qkeel.errors.QkeelWarning, match="took no step in the last"):
            train(1)
        train(101)
        assert monitor.history.steps.tolist() == [0]


def test_weights_that_are_computed_for_a_functional_call_are_no_leaves():
    model = small()
    optimizer = sgd(model)
    with qkeel.watch(model, optimizer) as monitor:
        doubled = {name: 2 * p for name, p in model.named_parameters()}
        torch.func.functional_call(model, doubled, (batch(0),)).sum().backward()
        optimizer.step()
        assert monitor.active
        assert monitor.history.steps.tolist() == [0]
