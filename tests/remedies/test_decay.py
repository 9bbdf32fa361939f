"""qk_weight_decay: the decay of query and key weights."""

import torch
from tests.attention import values
from torch.testing import assert_close

import qkeel

from .models import attention


def test_it_is_the_same_decay_with_any_optimizer_and_follows_its_rates():
    """A gradient of 0: what is left is Π(1 - η_t·λ), each weight by the rate of its group; without a gradient, all is."""
    model = attention(torch.float64)
    rates = {"q_proj.weight": 0.1, "k_proj.weight": torch.tensor(0.3)}
    groups = [{"params": [model.get_parameter(n)], "lr": x} for n, x in rates.items()]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    before = values(model)
    with qkeel.apply(model, "qk_weight_decay:decay=0.2", optimizer):
        optimizer.step()
        assert_close(values(model), before, rtol=0, atol=0)
        for factor in (1.0, 0.5, 0.0):
            for group, rate in zip(groups, rates.values()):
                group["lr"] = rate * factor
                group["params"][0].grad = torch.zeros_like(group["params"][0])
            optimizer.step()
    for name, rate in rates.items():
        before[name] *= (1 - rate * 0.2) * (1 - rate * 0.1)
    assert_close(values(model), before, rtol=1e-7, atol=0)
