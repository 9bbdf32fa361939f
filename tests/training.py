"""Optimizers of a model's weights, a step of training, and what is warned of, as most tests need them."""

import warnings
from contextlib import contextmanager

import torch


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr, **options)


def adamw(model, lr=1e-3, **options):
    return torch.optim.AdamW(model.parameters(), lr, **options)


def step(model, optimizer, *batches):
    """A step on the mean square of what the model makes of some batches, whose gradients add up."""
    for batch in batches:
        model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def warned(category=Warning):
    """The texts of the warnings of a block, as soon as it has ended."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(x.message) for x in caught if issubclass(x.category, category)]
