"""frozen_qk leaves all that makes queries and keys bit for bit, and everything else steps as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import qkeel

from .models import attention, decoder, gradients, step_by, train

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused adamw": lambda m: torch.optim.AdamW(
        m.parameters(), lr=0.3, weight_decay=0.5, fused=True
    ),
    "sgd": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1
    ),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.3, weight_decay=0.1),
    "not linear in its rate": lambda m: torch.optim.Rprop(m.parameters(), lr=0.3),
}


def moved(model, before):
    """The parameters of which any number changed."""
    return {
        name for name, p in model.named_parameters() if not torch.equal(p, before[name])
    }


def values(model):
    """A copy of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_weights_and_biases_of_q_and_k_stay_bit_for_bit_and_the_others_step_as_without_it(
    make,
):
    model, free = (
        attention(torch.float32, bias=True),
        attention(torch.float32, bias=True),
    )
    optimizer, other, before = make(model), make(free), values(model)
    qkeel.apply(model, "frozen_qk", optimizer)
    for grads in gradients(model, 10):
        step_by(model, optimizer, grads)
        step_by(free, other, grads)
    frozen = {f"{side}_proj.{part}" for side in "qk" for part in ("weight", "bias")}
    assert moved(model, before) == before.keys() - frozen
    assert moved(free, before) == before.keys()
    for name in before.keys() - frozen:
        assert torch.equal(model.get_parameter(name), free.get_parameter(name)), name


def test_gains_of_norms_on_q_and_k_stay_and_those_of_v_do_not():
    model = decoder(spec=qkeel.preset("qwen3"))
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.1), values(model)
    with qkeel.apply(model, "frozen_qk", optimizer):
        train(model, optimizer, 3)
    stay = {
        name
        for name in before
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
    }
    assert len(stay) == 8
    assert moved(model, before) == before.keys() - stay
    train(model, optimizer, 1)  # the handle is gone
    assert moved(model, before) == before.keys()
