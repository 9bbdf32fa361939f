"""A watched model that runs inside gradient checkpointing trains as it does unwatched."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.attention import Joint, fused, written
from tests.drawing import randn
from tests.training import sgd
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import qkeel

H, D = 2, 8
Run = Callable[[nn.Module, Tensor], Any]
_ATEN = torch.ops.aten
_SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts,
    [
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._softmax.default,
        _ATEN.view.default,
    ],
)
RUNS = {
    "without reentry": functools.partial(checkpoint, use_reentrant=False),
    "with reentry": functools.partial(checkpoint, use_reentrant=True),
    "nested": lambda net, x: checkpoint(
        lambda y: checkpoint(net, y, use_reentrant=False), x, use_reentrant=False
    ),
    "selective": functools.partial(
        checkpoint, use_reentrant=False, context_fn=_SELECTIVE
    ),
}


class Attention(Joint):
    def __init__(self, attend):
        super().__init__(attend, H * D, H)
        self.out = nn.Linear(H * D, H * D)

    def forward(self, x):
        return x + self.out(super().forward(x)).tanh()


class Blocks(nn.Module):
    """Two layers, each called by `run`."""

    def __init__(self, run):
        super().__init__()
        self.run, self.layers = (
            run,
            nn.ModuleList(Attention(way) for way in (fused, written)),
        )

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def plainly(net, x):
    return net(x)


def model(run=plainly):
    torch.manual_seed(0)
    return Blocks(run)


def batch(step):
    return randn(2, 5, H * D, seed=step).requires_grad_()


def gradients(net, run, step):
    net.zero_grad()
    run(net, batch(step)).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("error::qkeel.errors.QkeelWarning")
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        (name, whole)
        for name in RUNS
        for whole in (True, False)
        if whole or name != "nested"
    ],
)
def test_a_checkpoint_recomputes_what_it_would_unwatched(whole, name):
    outer, inner = (RUNS[name], plainly) if whole else (plainly, RUNS[name])
    net, bare = model(inner), model(inner)
    expected = model()
    with qkeel.watch(net) as monitor, qkeel.watch(expected) as reference:
        for step in range(4):
            found = gradients(net, outer, step)
            assert all(map(torch.equal, found, gradients(bare, outer, step)))
            gradients(expected, plainly, step)
            stats, others = monitor.read(), reference.read()
            assert stats.keys() == others.keys()
            assert len(stats) == 2
            for site, s in stats.items():
                assert_close(s.max_logit, others[site].max_logit)
                assert torch.equal(s.n_queries, others[site].n_queries)
        assert [site.verified for site in monitor.sites] == [True, True]


SPECS = ("qk_clip:threshold=0.1", "qk_norm", "sigma_reparam", "lalr:tau=0.1")


# A remedy that changes modules and one that reads logits in two ways each, the others in one.
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *zip(RUNS, SPECS[:2] * 2),
        *((next(iter(RUNS)), spec) for spec in SPECS[2:]),
    ],
)
def test_a_remedy_that_waits_for_the_next_pass_is_applied_inside_a_checkpoint(
    spec, name
):
    net, known = model(), model()
    found = []
    for one, example in ((net, None), (known, batch(0).detach())):
        optimizer = sgd(one)
        with qkeel.apply(one, spec, optimizer, batch=example):
            for step in range(3):
                gradients(one, RUNS[name], step)
                optimizer.step()
            found.append(
                {key: x.detach().clone() for key, x in one.state_dict().items()}
            )
    assert found[0].keys() == found[1].keys()
    for key, x in found[0].items():
        assert_close(x, found[1][key], msg=key)
