"""A site is a caller: a module that is called with several sets of weights makes a site for each of them."""

import random

import pytest
import torch
from tests.attention import Attention, from_heads, scores, written
from tests.drawing import randn
from torch import nn
from torch.testing import assert_close

from qkeel import find_sites, watch

C, D = 16, 8


class Core(nn.Module):
    """softmax(q kᵀ) v, which notes the largest logit of each call and head in float64."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def forward(self, q, k, v):
        self.noted.append(
            scores(q.detach().double(), k.detach().double()).amax((0, 2, 3))
        )
        return written(q, k, v)


class Weights(Attention):
    """Queries of x and keys of a memory, which a core attends."""

    def __init__(self):
        super().__init__(m=C, heads=C // D, bias=False)

    def forward(self, core, x, memory):
        q, k, v = self.heads(x)[0], *self.heads(memory)[1:]
        return x + from_heads(core(q, k, v))


class Block(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.weights, self.core = Weights(), core

    def forward(self, x, memory):
        return self.weights(self.core, x, memory)


class Program(nn.Module):
    """Sets of weights that call one core in a drawn order; some are called again, some from a block of their own."""

    def __init__(self, seed):
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.core = Core()
        n = drawn.randint(2, 4)
        self.parts = nn.ModuleList(
            Block(self.core) if drawn.random() < 0.5 else Weights() for _ in range(n)
        )
        order = [*range(n), *drawn.choices(range(n), k=drawn.randint(0, 2))]
        drawn.shuffle(order)
        self.order = order
        self.crossed = [drawn.random() < 0.3 for _ in order]
        with torch.no_grad():
            for part in self.parts:
                part.get_parameter(
                    "weights.q.weight" if isinstance(part, Block) else "q.weight"
                ).mul_(drawn.uniform(1.0, 6.0))

    def forward(self, x):
        memory = x.flip(1)
        for number, crossed in zip(self.order, self.crossed, strict=True):
            part, source = self.parts[number], memory if crossed else x
            x = (
                part(x, source)
                if isinstance(part, Block)
                else part(self.core, x, source)
            )
        return x

    def largest_by_weights(self, x):
        """The largest logit [h] of each set of weights, by the name of the query's weight."""
        self.core.noted.clear()
        self(x)
        maxima = {}
        for number, largest in zip(self.order, self.core.noted, strict=True):
            inner = "weights." if isinstance(self.parts[number], Block) else ""
            name = f"parts.{number}.{inner}q.weight"
            maxima[name] = (
                torch.maximum(maxima[name], largest) if name in maxima else largest
            )
        return maxima


@pytest.mark.parametrize("seed", range(4))
def test_each_set_of_weights_is_a_site_with_its_own_statistics(seed):
    model = Program(seed)
    x = randn(2, 5, C, seed=seed)
    sites = find_sites(model, x)
    queries = {site.name: site.query[-1].parameter for site in sites}
    assert sorted(queries.values()) == sorted(model.largest_by_weights(x))
    assert all(site.verified and site.n_heads == C // D for site in sites)
    assert len(queries) == len(sites) == len(model.parts)
    with torch.no_grad(), watch(model, sites=sites) as monitor:
        model(x)
        read = monitor.read()
    for name, largest in model.largest_by_weights(x).items():
        (site,) = [site for site, query in queries.items() if query == name]
        assert_close(read[site].max_logit.double(), largest, rtol=1e-5, atol=1e-5)


def test_sites_are_named_by_the_module_that_owns_the_projections():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = Core()
            self.blocks = nn.ModuleList(Block(self.core) for _ in range(3))

        def forward(self, x):
            for block in (*self.blocks, self.blocks[1]):
                x = block(x, x)
            return x

    model = Model()
    sites = find_sites(model, torch.randn(2, 5, C))
    assert [site.name for site in sites] == [
        "core",
        "blocks.1.weights#core",
        "blocks.2.weights#core",
    ]
    assert [site.module for site in sites[1:]] == [
        model.blocks[1].weights,
        model.blocks[2].weights,
    ]


def test_one_weight_for_parts_of_the_input_is_told():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

        def forward(self, x):
            y = x.unflatten(-1, (-1, D))
            z = torch.einsum("nqhd,nkhd->nhqk", self.q(y), self.k(y))
            return torch.einsum("nhqk,nkhd->nqhd", z.softmax(3), self.v(y)).flatten(2)

    (site,) = find_sites(Shared(), torch.randn(2, 5, 4 * D))
    assert not site.verified
    assert "heads that share it" in site.why
