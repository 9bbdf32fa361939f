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


class SharpnessAware(torch.optim.Optimizer):
    """SAM as programs write it: around another optimizer, whose step is that of `second_step` or of `step(closure)`."""

    def __init__(self, params, base, *, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure):
        self.first_step()
        closure()
        self.second_step()
