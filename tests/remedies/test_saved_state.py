"""The state of a remedy is in the optimizer's checkpoints, whoever writes them."""

import copy

import pytest
import torch
from tests.attention import Attention
from tests.drawing import randn
from tests.training import adamw, sgd, warned
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.testing import assert_close

import qkeel
from qkeel.errors import QkeelWarning, RefusedError

from .models import D_MODEL

SPECS = ["lalr", "qk_clip:threshold=0.5,steps=matched"]
X = randn(2, 7, D_MODEL, dtype=torch.float64, seed=0)


class Plain(Attention):
    """Attention that only a pass shows, with one head and one weight for keys and values."""

    def __init__(self):
        super().__init__(m=D_MODEL, heads=1, bias=False)
        self.double()
        self.v = self.k
        self.o = nn.Linear(D_MODEL, D_MODEL, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.o(super().forward(x))


def made(seed=0):
    torch.manual_seed(seed)
    model = Plain()
    with torch.no_grad():
        model.q.weight.mul_(5)
    return model, [adamw(model, 0.05)]


def steps(model, optimizers, n):
    """Trains, and returns what qkeel warns of."""
    with warned(QkeelWarning) as told:
        for _ in range(n):
            (model(X) - X.roll(1, 1)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return told


def initialised_by_hand(optimizer):
    """The step with which torch.distributed.checkpoint makes the state, as programs write it themselves."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def dcp_states(model, optimizers, kind):
    if kind == "by hand":
        for optimizer in optimizers:
            if not optimizer.state:
                initialised_by_hand(optimizer)
        states = {str(i): x.state_dict() for i, x in enumerate(optimizers)}
        return {"model": model.state_dict(), "optimizer": states}
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat")
    states = get_state_dict(model, optimizers, options=options)
    return dict(zip(("model", "optimizer"), states, strict=True))


def dcp_load(model, optimizers, kind, folder):
    states = dcp_states(model, optimizers, kind)
    checkpoint.load(states, checkpoint_id=folder, no_dist=True)
    if kind == "by hand":
        model.load_state_dict(states["model"])
        for i, optimizer in enumerate(optimizers):
            optimizer.load_state_dict(states["optimizer"][str(i)])
        return
    set_state_dict(
        model,
        optimizers,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=kind == "flat"),
    )


def checkpoint_of(spec, folder):
    """Writes a checkpoint after four steps."""
    model, optimizers = made(0)
    qkeel.apply(model, spec, optimizers, batch=X)
    steps(model, optimizers, 4)
    states = dcp_states(model, optimizers, "nested")
    checkpoint.save(states, checkpoint_id=folder, no_dist=True)


no_dist_warnings = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning"
)


@no_dist_warnings
@pytest.mark.parametrize("batch", [X, None], ids=["at once", "at the next pass"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_state_that_loading_has_left_out_is_said_once(spec, batch, tmp_path):
    """torch.distributed.checkpoint reads no state of a remedy that comes later."""
    checkpoint_of(spec, tmp_path)
    model, several = made(1)
    dcp_load(model, several, "nested", tmp_path)
    qkeel.apply(model, spec, several, batch=batch)
    (said,) = steps(model, several, 3)
    assert "before" in said
    assert "handle.load(state)" in said


@pytest.mark.parametrize("is_stepped", [False, True])
def test_momentum_shows_that_steps_were_taken_and_an_initialised_state_does_not(
    is_stepped,
):
    model, _ = made(0)
    optimizer = sgd(model, momentum=0.9)
    if is_stepped:
        steps(model, [optimizer], 1)
    else:
        initialised_by_hand(optimizer)
    qkeel.apply(model, "lalr", optimizer, batch=X)
    assert len(steps(model, [optimizer], 2)) == is_stepped


def test_a_step_that_initialises_the_state_by_hand_is_none_and_another_is_refused():
    model, (optimizer,) = made(0)
    handle = qkeel.apply(model, "lalr", optimizer)
    initialised_by_hand(optimizer)
    assert handle.active
    # A rate of 0 initialises states, but not that of one group alone.
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 0.0})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RefusedError, match="took a step before"):
        optimizer.step()
    assert not handle.active
    assert not any("qkeel" in group for group in optimizer.param_groups)


@pytest.mark.parametrize("spec", SPECS)
def test_a_checkpoint_without_the_state_is_told_in_the_next_step_and_the_state_goes_on(
    spec,
):
    plain, model = made(), made()
    steps(*plain, 3)
    handle = qkeel.apply(model[0], spec, model[1], batch=X)
    steps(*model, 2)
    before = handle.state()
    ((optimizer,), (earlier,)) = model[1], plain[1]
    optimizer.load_state_dict(earlier.state_dict())
    assert_close(handle.state(), before, rtol=0, atol=0)
    (told,) = steps(*model, 3)
    assert "contains no state of" in told
    assert optimizer.state_dict()["param_groups"][0]["qkeel"]


def test_a_state_that_the_handle_loads_is_not_missing():
    (plain, others), (model, (optimizer,)) = made(), made()
    steps(plain, others, 3)
    handle = qkeel.apply(model, "lalr", optimizer, batch=X)
    state = {name: torch.rand_like(value) for name, value in handle.state().items()}
    optimizer.load_state_dict(others[0].state_dict())
    handle.load(state)
    (values,) = optimizer.state_dict()["param_groups"][0]["qkeel"].values()
    assert {f"0.{name}": x for name, x in values} == {
        name: x.tolist() for name, x in state.items()
    }
    assert not steps(model, [optimizer], 1)


def test_two_models_in_one_optimizer_keep_their_states_apart():
    models = [made(seed)[0] for seed in range(2)]
    optimizer = sgd(nn.ModuleList(models))
    handles = [qkeel.apply(model, "lalr", optimizer, batch=X) for model in models]
    states = [handle.state() for handle in handles]
    saved = copy.deepcopy(optimizer.state_dict())
    for handle, state in zip(handles, states):
        handle.load({name: value * 2 for name, value in state.items()})
    optimizer.load_state_dict(saved)
    for handle, state in zip(handles, states, strict=True):
        assert_close(handle.state(), state, rtol=0, atol=0)
