"""Optimizers of a model's weights and a step of training, as most tests need them."""

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
