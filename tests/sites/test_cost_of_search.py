"""What a search for attention computes: so many operators for each layer, and so many of any model.

Operators are counted, which come out the same on every machine; benchmarks/host_time.py measures the time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sites.test_sites_of_one_kind import Layer, example, stack
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel
from qkeel.kernels.native import logit_pass

FEW, SOME, MANY = 2, 4, 8


class Count(TorchDispatchMode):
    """Counts the operators that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Callable[..., object], types: object, args=(), kwargs=None) -> object:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def counted(act: Callable[[nn.Module], object], layers: int) -> int:
    """The operators of something that is done with a model of so many layers."""
    model = stack(*(Layer() for _ in range(layers)))
    with Count() as count:
        act(model)
    return count.operators


def plain(model: nn.Module) -> Tensor:
    return model(example())


def found(model: nn.Module) -> qkeel.sites.Sites:
    sites = qkeel.find_sites(model, example())
    assert all(site.verified for site in sites)
    return sites


def capped(model: nn.Module) -> None:
    qkeel.apply(model, "softcap", batch=example()).remove()


def normed(model: nn.Module) -> None:
    qkeel.apply(model, "qk_norm", batch=example()).remove()


@pytest.mark.parametrize(("act", "passes", "once"), [(found, 3.5, 1150), (capped, 7.6, 1150), (normed, 8.8, 1150)])
def test_a_layer_costs_few_operators_more_than_it_runs_in_the_passes(
    act: Callable[[nn.Module], object], passes: float, once: int
) -> None:
    if act is capped and not logit_pass.ready():  # torch's operators cap each block of scores
        passes = 8.5
    few, some, many = (counted(act, layers) for layers in (FEW, SOME, MANY))
    per_layer = (many - some) / (MANY - SOME)
    own = (counted(plain, MANY) - counted(plain, SOME)) / (MANY - SOME)
    assert per_layer <= passes * own
    assert few - FEW * per_layer <= once
    assert some == few + (SOME - FEW) * per_layer  # whatever the depth
