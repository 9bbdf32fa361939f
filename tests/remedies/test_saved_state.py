"""The state of a remedy is in the optimizer's checkpoints, whoever writes them."""

import copy
import io
import warnings

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import qkeel
from qkeel.errors import QkeelWarning

from .models import D_MODEL, attention

SPECS = ["lalr", "lalr:norm=spectral", "qk_clip:threshold=0.5,steps=matched"]
every_spec = pytest.mark.parametrize("spec", SPECS)
X = torch.randn(
    2, 7, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)


def made():
    model = attention(torch.float64, 2)
    with torch.no_grad():
        model.q_proj.weight.mul_(3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - X.roll(1, 1)).square().mean().backward()
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def uninterrupted(
    spec,
):
    """The states after five steps, and the weights after ten."""
    model, optimizer = made()
    qkeel.apply(model, spec, optimizer)
    train(model, optimizer, 5)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 5)
    return (*states, weights(model))


@every_spec
@pytest.mark.parametrize("apply_first", [True, False])
def test_plain_saving_continues_bit_for_bit(spec, apply_first):
    of_model, of_optimizer, expected = uninterrupted(spec)
    stored = io.BytesIO()
    torch.save(of_optimizer, stored)
    stored.seek(0)
    model, optimizer = made()
    if apply_first:
        qkeel.apply(model, spec, optimizer)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(torch.load(stored, weights_only=True))
    if not apply_first:
        qkeel.apply(model, spec, optimizer)
    # A warning of ours stops nobody, not even as an error.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", QkeelWarning)
        train(model, optimizer, 5)
    assert not told
    assert all(map(torch.equal, weights(model), expected))


@every_spec
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_distributed_checkpoint_continues_bit_for_bit(spec, flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = made()
    qkeel.apply(model, spec, optimizer)
    train(model, optimizer, 5)
    saved = dict(
        zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options))
    )
    checkpoint.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    train(model, optimizer, 5)
    expected = weights(model)
    model, optimizer = made()
    qkeel.apply(model, spec, optimizer)
    found = dict(
        zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options))
    )
    checkpoint.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )
    train(model, optimizer, 5)
    assert all(map(torch.equal, weights(model), expected))


@every_spec
def test_a_checkpoint_without_the_state_is_told_in_the_next_step_and_the_state_goes_on(
    spec,
):
    plain = made()
    train(*plain, 3)
    model, optimizer = made()
    handle = qkeel.apply(model, spec, optimizer)
    train(model, optimizer, 2)
    before = handle.state()
    optimizer.load_state_dict(plain[1].state_dict())
    assert all(
        torch.equal(before[name], value) for name, value in handle.state().items()
    )
    with pytest.warns(QkeelWarning, match="contains no state of") as told:
        train(model, optimizer, 3)
    assert len(told) == 1
    assert optimizer.state_dict()["param_groups"][0]["qkeel"]


def test_a_state_that_the_handle_loads_is_not_missing():
    plain, (model, optimizer) = made(), made()
    train(*plain, 3)
    handle = qkeel.apply(model, "lalr", optimizer)
    state = {name: torch.rand_like(value) for name, value in handle.state().items()}
    optimizer.load_state_dict(plain[1].state_dict())
    handle.load(state)
    (values,) = optimizer.state_dict()["param_groups"][0]["qkeel"].values()
    assert all(torch.equal(value, state[f"0.{name}"]) for name, value in values.items())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", QkeelWarning)
        train(model, optimizer, 1)
    assert not told


def test_nothing_is_left_in_the_groups_after_removal():
    model, optimizer = made()
    before = [set(group) for group in optimizer.param_groups]
    qkeel.apply(model, "lalr", optimizer).remove()
    qkeel.apply(model, "qk_clip:steps=matched", optimizer).remove()
    assert [set(group) for group in optimizer.param_groups] == before


def test_two_models_in_one_optimizer_keep_their_states_apart():
    models = [made()[0] for _ in range(2)]
    with torch.no_grad():
        models[1].q_proj.weight.mul_(7)
    optimizer = torch.optim.SGD(
        [p for model in models for p in model.parameters()], lr=0.1
    )
    handles = [qkeel.apply(model, "lalr", optimizer) for model in models]
    states = [handle.state() for handle in handles]
    saved = copy.deepcopy(optimizer.state_dict())
    for handle in handles:
        handle.load({name: value * 2 for name, value in handle.state().items()})
    optimizer.load_state_dict(saved)
    for handle, state in zip(handles, states, strict=True):
        assert all(
            torch.equal(state[name], value) for name, value in handle.state().items()
        )
