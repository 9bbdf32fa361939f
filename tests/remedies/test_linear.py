"""Which optimizers lalr and qk_lr take, and that finding out leaves no trace."""

import copy
import itertools

import pytest
import torch
from tests.each_row import each_row
from tests.training import adamw
from torch.optim.optimizer import register_optimizer_step_post_hook

import qkeel
from qkeel.errors import QkeelWarning, RefusedError

from .models import (
    OPTIMIZERS,
    attention,
    gradients,
    matrices,
    optimizer_of,
    step_by,
)

LINEAR = {
    **OPTIMIZERS,
    "Adam by a tensor": {"lr": torch.tensor(0.01), "fused": True},
    "AdamW at rate 0": {"lr": 0.0},
    "AdamW at a tiny rate": {"lr": 1e-9},
    "Adafactor below 1/√t": {"lr": 1e-4, "weight_decay": 0.1},
}
NOT_HALF = "at half the rate was not half as long"
REFUSED = {
    "Adafactor": ({"lr": 0.5}, f"Adafactor {NOT_HALF}"),
    "Adafactor by default": ({}, NOT_HALF),
    "ASGD": ({}, f"ASGD {NOT_HALF}"),
    "Rprop": ({}, f"Rprop {NOT_HALF}"),
    "LBFGS": ({}, "LBFGS failed: .*closure"),
    "SparseAdam": ({}, "SparseAdam failed: .*dense gradients"),
}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *itertools.product(REFUSED, ("lalr", "qk_lr")),
        ("Adafactor", "qk_clip:steps=matched"),
    ],
)
def test_others_are_refused_and_the_model_is_as_it_was(name, remedy):
    options, reason = REFUSED[name]
    model = attention(torch.float32)
    optimizer = optimizer_of(name, matrices(model), **options)
    with pytest.raises(
        RefusedError,
        match=rf"{remedy.partition(':')[0]} needs an optimizer whose step is proportional.*{reason}",
    ):
        qkeel.apply(model, remedy, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    qkeel.apply(model, "none", optimizer).remove()


def test_only_the_groups_that_hold_queries_and_keys_need_to_be_linear():
    model = attention(torch.float32)
    sides = [model.q_proj.weight, model.k_proj.weight]
    others = [model.v_proj.weight, model.o_proj.weight]

    def optimizer(of_sides, of_others):
        groups = zip((others, sides), (of_others, of_sides))
        return torch.optim.Adafactor([{"params": x, "lr": lr} for x, lr in groups])

    qkeel.apply(model, "lalr", optimizer(1e-4, 0.5)).remove()
    with pytest.raises(RefusedError, match="was not half as long"):
        qkeel.apply(model, "lalr", optimizer(0.5, 1e-4))


def test_a_warm_up_does_not_hide_the_rate_that_a_scheduler_will_reach():
    model = attention(torch.float32)
    low, high = (torch.optim.Adafactor(matrices(model), lr=x) for x in (1e-4, 0.5))
    for optimizer in (low, high):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: i / 1000)
        assert optimizer.param_groups[0]["lr"] == 0
    qkeel.apply(model, "lalr", low).remove()
    with pytest.raises(RefusedError):
        qkeel.apply(model, "lalr", high)


@pytest.mark.parametrize("name", LINEAR)
def test_others_are_taken_and_trying_them_leaves_everything_as_it_was(
    name,
):
    model = attention(torch.float32)
    optimizer = optimizer_of(name, matrices(model), **LINEAR[name])
    # A scheduler binds `optimizer.step` to the user's optimizer: a copy of its attributes would step that one.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for grads in gradients(model, 2):
        step_by(model, optimizer, grads)
        scheduler.step()
    calls = []
    hook = register_optimizer_step_post_hook(lambda *a: calls.append(a))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    random = torch.get_rng_state()
    with hook, qkeel.apply(model, "lalr", optimizer):
        pass
    assert not calls
    assert torch.equal(random, torch.get_rng_state())
    # Of groups and states alike: every number, text and tensor.
    assert repr([model.state_dict(), optimizer.state_dict()]) == repr(before)


class Mine(torch.optim.AdamW):
    """Its constructor takes a model."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.01)


class Odd(torch.optim.Rprop):
    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.01)


def bent(power):
    """Optimizers whose steps grow with the rate to a power; of 1 they know float32 alone, without one they never move."""

    class Bent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"] if power is not None else ():
                    assert power != 1.0 or p.dtype == torch.float32
                    p.sub_(p.grad, alpha=group["lr"] ** power)

    return lambda model: Bent(model.parameters(), lr=0.1)


@each_row(
    "kind, reason",
    [
        *((kind, None) for kind in (Mine, bent(1.0))),
        *((kind, "not half as long") for kind in (Odd, bent(1.001), bent(0.999))),
        (bent(None), "lalr"),
    ],
)
def test_optimizers_of_anybodys_are_probed_by_their_own_step(kind, reason):
    model = attention(torch.float32)
    optimizer = kind(model)
    if reason is None:
        qkeel.apply(model, "lalr", optimizer).remove()
    else:
        with pytest.raises(RefusedError, match=reason):
            qkeel.apply(model, "lalr", optimizer)


@pytest.mark.parametrize("remedy", ["lalr", "qk_weight_decay", "spectral_cap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_refused(dtype, remedy):
    model = attention(dtype)
    with pytest.raises(
        RefusedError,
        match=f"which {dtype} weights round away .q_proj.weight.; keep float32",
    ):
        qkeel.apply(model, remedy, adamw(model))


@pytest.mark.parametrize("remedy", ["lalr", "qk_lr", "qk_clip"])
def test_weights_that_the_optimizer_does_not_hold_are_refused(remedy):
    model = attention(torch.float32)
    optimizer = torch.optim.SGD([model.q_proj.weight, model.v_proj.weight], lr=0.1)
    with pytest.raises(
        RefusedError,
        match=r"steps of k_proj.weight, which no optimizer that was given .SGD",
    ):
        qkeel.apply(model, remedy, optimizer)


def test_an_optimizer_that_cannot_be_tried_may_be_clipped_by_but_not_scaled():
    class Closed(torch.optim.Optimizer):
        """Its constructor takes neither parameters nor options."""

        def __init__(self, model, secret):
            super().__init__(model.parameters(), {"lr": 0.1, "secret": secret})

        def step(self, closure=None):
            raise AssertionError("never stepped")

    model = attention(torch.float32)
    for remedy in ("qk_clip", "qk_weight_decay", "spectral_cap"):
        with pytest.warns(
            QkeelWarning, match="unknown whether Closed keeps the change"
        ):
            qkeel.apply(model, remedy, Closed(model, 3)).remove()
    for optimizer in (Closed(model, 3), torch.optim.LBFGS(model.parameters())):
        with pytest.raises(RefusedError, match=r"a probe step of .* failed"):
            qkeel.apply(model, "lalr", optimizer)
    with pytest.raises(
        RefusedError, match="LBFGS mistakes every change of the weights"
    ):
        qkeel.apply(model, "qk_clip", torch.optim.LBFGS(model.parameters()))


def test_a_decay_that_the_rate_does_not_scale_is_no_copy_that_brings_weights_back():
    class Independent(torch.optim.SGD):
        """w ← (1 - λ)·w whatever the rate is (Loshchilov & Hutter 2019 without their schedule)."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["weight_decay"]).sub_(p.grad, alpha=group["lr"])

    model = attention(torch.float32)
    for remedy in ("qk_clip", "qk_weight_decay", "spectral_cap"):
        qkeel.apply(
            model, remedy, Independent(model.parameters(), lr=0.1, weight_decay=0.1)
        ).remove()
