"""Sites that were found before activation checkpointing or torch.compile wrapped modules are known again afterwards."""

import functools

import pytest
import torch
from tests.attention import Joint
from tests.drawing import randint
from tests.training import adamw, sgd
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

import qkeel


def batch(step):
    return randint(0, 64, (2, 8), seed=step)


def wrap(module):
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def decoder():
    torch.manual_seed(0)
    return qkeel.nn.Decoder(
        qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4)
    ).double()


def wrapped(model, what):
    for i, block in enumerate(model.blocks):
        if what == "projections":
            block.attention.q_proj = wrap(block.attention.q_proj)
        elif what == "twice":
            block.attention = wrap(block.attention)
            model.blocks[i] = wrap(block)
        elif what == "compiled":
            model.blocks[i] = torch.compile(wrap(block), backend="eager")
    return model


@functools.cache
def trained(what):
    """The weights after three steps under two remedies, what was measured at each site, and how many heads."""
    model = decoder()
    sites = qkeel.find_sites(model, batch(0))
    model = wrapped(model, what)
    optimizer = adamw(model, 0.01)
    qkeel.apply(model, "lalr:tau=0.1+qk_clip:threshold=0.2", optimizer, sites=sites)
    monitor = qkeel.watch(model, optimizer, every=1, rules=[], sites=sites)
    for step in range(3):
        F.cross_entropy(
            model(batch(step)).flatten(0, 1), batch(step).roll(-1, 1).flatten()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [stats.tensors() for stats in monitor.read("train").values()]
    sample = monitor.sample
    assert sample.heads["query_weight_norm"].shape == (2, 4)
    monitor.close()
    names = ("_checkpoint_wrapped_module.", "_orig_mod.")
    weights = {
        n.replace(names[0], "").replace(names[1], ""): p.detach()
        for n, p in model.named_parameters()
    }
    return weights, seen, len(monitor.sites)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile reads it
@pytest.mark.parametrize("what", ["projections", "twice", "compiled"])
def test_sites_are_known_again_after_modules_were_wrapped(what):
    plain, before, _ = trained("nothing")
    weights, seen, sites = trained(what)
    assert sites == 2
    for name, weight in plain.items():
        assert torch.equal(weights[name], weight), name
    assert len(seen) == len(before) == 2
    for mine, other in zip(seen, before, strict=True):
        for name, value in other.items():
            assert torch.equal(mine[name], value), name


class Written(Joint):
    """Attention that is searched for, in a block that fully_shard takes."""

    def __init__(self):
        super().__init__(m=16, heads=4)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.out(super().forward(x))


@pytest.fixture
def one_process():
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def sharded():
    """A model whose weights fully_shard has taken, and an input for it."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(Written(), Written()).double(),
        torch.randn(2, 5, 16, dtype=torch.float64),
    )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, x


@pytest.mark.usefixtures("one_process")
def test_attention_under_fully_shard_on_one_process_is_verified_and_clipped():
    model, x = sharded()
    optimizer = sgd(model, 0.0)
    sites = qkeel.find_sites(model, x)
    assert [(site.name, site.verified) for site in sites] == [("0", True), ("1", True)]
    qkeel.apply(model, "qk_clip:threshold=0.01", optimizer, sites=sites)
    with qkeel.watch(model, optimizer, rules=[], every=1) as monitor:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    assert monitor.history.heads["max_logit"][0].max() > 0.1
    assert monitor.history.heads["max_logit"][1].max() < 0.011


@pytest.mark.usefixtures("one_process")
def test_norms_reach_a_fused_projection_under_fully_shard_and_are_searched_for_afterwards():
    # Each norm is a part of fully_shard of its own between q and its weights: gradients through it must not free it.
    model, x = sharded()
    optimizer = sgd(model, 0.0)
    with (
        qkeel.apply(model, "qk_norm", optimizer, batch=x),
        qkeel.watch(model, optimizer, rules=[]) as monitor,
    ):
        model(x).sum().backward()
        optimizer.step()
        assert [(site.name, site.verified) for site in qkeel.find_sites(model, x)] == [
            ("0", True),
            ("1", True),
        ]
    for side in ("query_norm", "key_norm"):
        assert (
            abs(monitor.history.heads[side] - 2) < 1e-4
        ).all()  # the root of the width of a head


@pytest.mark.usefixtures("one_process")
def test_a_search_between_passes_leaves_their_gradients_to_the_last():
    model, x = sharded()
    qkeel.apply(model, "qk_norm", sgd(model, 0.0), batch=x)
    for last in (False, True):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
        if last:
            qkeel.find_sites(model, x)
            assert all(p.grad is None for p in model.parameters())
        model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
