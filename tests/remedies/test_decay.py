"""qk_weight_decay: the decay of query and key weights."""

import torch
from tests.training import adamw

import qkeel

from .models import attention, step_by


def test_weights_without_a_gradient_are_not_decayed():
    model = attention(torch.float32)
    optimizer = adamw(model, 0.1, weight_decay=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with qkeel.apply(model, "qk_weight_decay", optimizer):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


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
