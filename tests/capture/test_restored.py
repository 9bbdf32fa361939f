"""A model whose forward keeps a state of its own trains as it does without qkeel: the search's passes leave no trace."""

import copy
import random
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from tests.training import sgd
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import qkeel


class Counter:
    calls = 0


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


class Attention(nn.Module):
    """Attention whose logits depend on a state that each pass changes."""

    calls = 0

    def __init__(self, state):
        super().__init__()
        type(self).calls = 0
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.slow_q = copy.deepcopy(self.q).requires_grad_(False)
        self.counter, self.means, self.array = Counter(), [torch.zeros(())], np.zeros(1)
        self.random, self.generator = random.Random(0), np.random.default_rng(0)
        self.count, self.state = counter(), getattr(self, state)

    @torch.no_grad()
    def momentum_encoder(self):
        self.slow_q.weight.mul_(0.9).add_(self.q.weight, alpha=0.1)
        return self.slow_q.weight.mean()

    def rebound_data(self):
        self.slow_q.weight.data = self.slow_q.weight.data * 0.9
        return self.slow_q.weight.mean().detach()

    @torch.no_grad()
    def normalised_weight(self):
        self.q.weight.mul_(0.9)
        return 0

    def object(self):
        self.counter.calls += 1
        return self.counter.calls

    def tensor_in_a_list(self):
        self.means[0].add_(1)
        return self.means[0].clone()

    def array_in_place(self):
        self.array += 1
        return float(self.array[0])

    def python_stream(self):
        return self.random.random()

    def numpy_stream(self):
        return self.generator.random()

    def closure(self):
        return self.count()

    def class_attribute(self):
        type(self).calls += 1
        return self.calls

    def forward(self, x):
        q, k = self.q(x)[:, None] * (1 + self.state() / 10), self.k(x)[:, None]
        return x + scaled_dot_product_attention(q, k, k)[:, 0]


STATES = [
    *("momentum_encoder", "rebound_data", "normalised_weight", "object"),
    *("tensor_in_a_list", "array_in_place", "python_stream", "numpy_stream"),
    *("closure", "class_attribute"),
]


def losses(state, act):
    torch.manual_seed(0)
    model, x = Attention(state), torch.randn(2, 5, 8)
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qkeel.errors.QkeelWarning)
        with suppress(qkeel.errors.RefusedError):
            act(model, optimizer, x)
        values = []
        for _ in range(3):
            loss = model(torch.randn(2, 5, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
    return values


@pytest.mark.parametrize(
    "act",
    [
        lambda model, optimizer, x: qkeel.watch(model, optimizer),
        lambda model, optimizer, x: qkeel.apply(
            model, "qk_clip:threshold=1e6", optimizer, batch=x
        ),
        lambda model, optimizer, x: qkeel.check(model, x),
    ],
    ids=["watch", "apply", "check"],
)
@pytest.mark.parametrize("state", STATES)
def test_what_a_forward_keeps_is_put_back(state, act):
    assert losses(state, act) == losses(state, lambda *_: None)
