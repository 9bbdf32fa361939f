"""qk_clip:steps=matched: clipped weights are c times weights that are never clipped, by an independent definition."""

import math

import pytest
import torch
from tests.attention import from_heads, to_heads
from tests.training import adamw
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import qkeel
from qkeel.errors import RefusedError

from .models import D_MODEL, attention

HEADS, THRESHOLD, RATE = 4, 1.0, 3e-3


def signs(gradient):
    """The signs, and 0 where a gradient is rounding alone, as that of a bias of keys is."""
    return gradient.sign() * (gradient.abs() > 1e-12)


class Sign(Optimizer):
    """Steps that do not depend on the size of the gradient, for which matched steps are exact."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * signs(p.grad))


def batches(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 7, D_MODEL, generator=generator, dtype=torch.float64)
        for _ in range(n)
    ]


def torch_attention(seed):
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(
        D_MODEL, HEADS, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        module.in_proj_bias.normal_(std=0.3)
        module.in_proj_weight[:D_MODEL].mul_(
            torch.tensor([6.0, 1.0, 3.0, 0.5]).repeat_interleave(D_MODEL // HEADS)[
                :, None
            ]
        )
    return module


def test_clipped_weights_are_c_times_weights_that_take_full_steps_and_are_never_clipped():
    seed = int(torch.randint(1000, (1,)))
    module = torch_attention(seed)
    free = {
        name: p.detach().clone().requires_grad_()
        for name, p in module.named_parameters()
    }
    c = torch.ones(HEADS, dtype=torch.float64)  # by head; the same for q and k
    optimizer = Sign(module.parameters(), RATE)
    handle = qkeel.apply(
        module,
        f"qk_clip:threshold={THRESHOLD},steps=matched",
        optimizer,
        batch=(batches(1, seed)[0],) * 3,
    )
    d = D_MODEL // HEADS

    def clipped():
        """The free weight and bias of queries, keys and values, whose rows of heads c multiplies."""
        rows = torch.cat([c.repeat_interleave(d).repeat(2), torch.ones(D_MODEL)])
        return free["in_proj_weight"] * rows[:, None], free["in_proj_bias"] * rows

    for x in batches(12, seed + 1):
        target = x.roll(1, 1)
        loss = (module(x, x, x, need_weights=False)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        # The reference: c multiplies what free weights make, and the free weights take full steps.
        projected = F.linear(x, *clipped()).chunk(3, -1)
        q, k, v = (to_heads(y, HEADS, d) for y in projected)
        logits = q @ k.mT / math.sqrt(d)
        y = from_heads(logits.softmax(-1) @ v)
        y = F.linear(y, free["out_proj.weight"], free["out_proj.bias"])
        grads = torch.autograd.grad((y - target).square().mean(), list(free.values()))
        with torch.no_grad():
            for p, g in zip(free.values(), grads):
                p.sub_(RATE * signs(g))
        c = c * (THRESHOLD / logits.detach().amax((0, 2, 3))).clamp(max=1).sqrt()
        for p, right in zip((module.in_proj_weight, module.in_proj_bias), clipped()):
            assert torch.allclose(p, right, rtol=1e-9, atol=1e-12)
    assert float(c.max()) < 0.999
    assert float(c.min()) > 0.01
    state = handle.state()
    found = torch.stack([v for name, v in state.items() if ".steps." in name])
    assert torch.allclose(found.double(), c.expand_as(found), rtol=1e-6)


@pytest.mark.parametrize(
    "order", [("lalr", "qk_clip:steps=matched"), ("qk_clip:steps=matched", "lalr")]
)
def test_lalr_undoes_matched_steps_and_the_pair_is_refused_in_either_order(
    order,
):
    model = attention(torch.float32, 4)
    optimizer = adamw(model)
    with pytest.raises(RefusedError, match="undoes matched steps"):
        qkeel.apply(model, "+".join(order), optimizer)
    with (
        qkeel.apply(model, order[0], optimizer),
        pytest.raises(RefusedError, match="undoes matched steps"),
    ):
        qkeel.apply(model, order[1], optimizer)
    qkeel.apply(model, "lalr+qk_clip", optimizer).remove()
