"""Weight decay of query and key weights: qk_weight_decay, and what lalr does with the optimizer's own."""

import pytest
import torch
from tests.training import adamw

import qkeel
from qkeel.errors import RefusedError

from .models import attention, gradients, matrices, optimizer_of, step_by

DECAYED = {"weight_decay": 0.1}


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("Adam", DECAYED, True),
        ("NAdam", DECAYED, True),
        ("NAdam", {**DECAYED, "decoupled_weight_decay": True}, False),
        ("SGD", DECAYED, False),  # without momentum the two are one
        ("Adam", {}, False),
        ("AdamW", {**DECAYED, "lr": torch.tensor(0.1)}, False),
    ],
)
def test_plain_decay_needs_a_decay_that_is_decoupled(kind, options, refused):
    model = attention(torch.float32)
    optimizer = optimizer_of(kind, matrices(model), **options)
    if refused:
        with pytest.raises(
            RefusedError,
            match="adds its weight decay to the gradient; use decay=scaled or AdamW",
        ):
            qkeel.apply(model, "lalr:decay=plain", optimizer)
    else:
        with qkeel.apply(model, "lalr:decay=plain", optimizer):
            for grads in gradients(model, 2):
                step_by(model, optimizer, grads)


def test_weights_without_a_gradient_are_not_decayed():
    for remedy in ("lalr:decay=plain", "qk_weight_decay"):
        model = attention(torch.float32)
        optimizer = adamw(model, 0.1, weight_decay=0.5)
        before = [p.detach().clone() for p in model.parameters()]
        with qkeel.apply(model, remedy, optimizer):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


# --- qk_weight_decay


def test_it_is_the_same_decay_with_any_optimizer_and_follows_its_rates():
    """No gradient: what is left is Π(1 - η_t·λ), each weight by the rate of its group."""
    model = attention(torch.float64)
    groups = [
        {"params": [model.q_proj.weight], "lr": 0.1},
        {"params": [model.k_proj.weight], "lr": torch.tensor(0.3)},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with qkeel.apply(model, "qk_weight_decay:decay=0.2", optimizer):
        for factor in (1.0, 0.5, 0.0):
            for group, rate in zip(optimizer.param_groups, (0.1, torch.tensor(0.3))):
                group["lr"] = rate * factor
            step_by(
                model,
                optimizer,
                {n: torch.zeros_like(p) for n, p in model.named_parameters()},
            )
    for (name, p), old in zip(model.named_parameters(), before):
        rate = {"q_proj.weight": 0.1, "k_proj.weight": 0.3}.get(name, 0.0)
        assert torch.allclose(
            p, old * (1 - rate * 0.2) * (1 - rate * 0.1), rtol=1e-7
        ), name
