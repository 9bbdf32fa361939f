"""Optimizers, learning rates and parametrisations of a run."""

import math

import pytest
import torch
from torch import nn

from qkeel.lab import ModelConfig, OptimConfig
from qkeel.lab.build_run import (
    build_decoder,
    build_optimizer,
    learning_rate,
    resolve,
)
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import with_values
from qkeel.lab.muon import Muon
from qkeel.lab.train import set_rate


def weights(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizer, params, steps=5):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_is_torchs_muon_up_to_its_bfloat16(decay):
    shapes = ((16, 16), (32, 16), (16, 32))
    ours, theirs = weights(*shapes), weights(*shapes)
    train(Muon([{"params": ours, "muon": True}], lr=0.02, weight_decay=decay), ours)
    match = "match_rms_adamw"
    train(
        torch.optim.Muon(theirs, lr=0.02, weight_decay=decay, adjust_lr_fn=match),
        theirs,
    )
    for start, a, b in zip(weights(*shapes), ours, theirs, strict=True):
        # Five steps of bfloat16 rounding.
        assert (a - b).norm() < 0.02 * (b - start).norm()


def test_groups_and_gains_without_muon_are_adamw_bit_for_bit():
    ours, theirs = weights((4, 3), (5,)), weights((4, 3), (5,))
    options = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    train(Muon([{"params": ours}], **options), ours)
    train(torch.optim.AdamW(theirs, **options, fused=True), theirs)
    assert all(map(torch.equal, ours, theirs))
    matrix, gain = weights((64, 128), (4,))
    before = matrix.detach().clone()
    optimizer = Muon([{"params": [matrix, gain], "muon": True}], lr=1.0)
    optimizer.step()
    assert torch.equal(matrix, before), "no gradient"
    train(optimizer, [matrix, gain], steps=1)
    assert set(optimizer.state[gain]) == {"exp_avg", "exp_avg_sq", "step"}
    # A matrix moves as far as AdamW would move it.
    size = (matrix - before).square().mean().sqrt().item()
    assert size == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_weight_decay_is_for_matrices_and_every_parameter_is_in_one_group(
    name,
):
    model = build_decoder(ModelConfig(d_model=16, n_heads=2), vocab_size=11)
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.1), model)
    groups = optimizer.param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    for group in groups:
        decays = group["weight_decay"] > 0
        assert all((p.ndim >= 2) == decays for p in group["params"])
    if name == "muon":
        matrices = [id(p) for g in groups if g["muon"] for p in g["params"]]
        tables = {id(model.embedding.weight), id(model.head.weight)}
        assert len(matrices) == 2 * 6
        assert not tables.intersection(matrices)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_schedules_by_hand(schedule):
    config = OptimConfig(lr=2.0, schedule=schedule, warmup=0.1)
    warm = [learning_rate(config, s, 100) for s in range(11)]
    assert warm == pytest.approx([0.2 * (s + 1) for s in range(10)] + [2.0])
    config = OptimConfig(lr=1.0, schedule=schedule, warmup=0.0, final=0.0)
    rates = [learning_rate(config, s, 100) for s in (50, 79, 90)]
    wave = [0.5 * (1 + math.cos(math.pi * s)) for s in (0.5, 0.79, 0.9)]
    expected = {"constant": [1.0] * 3, "cosine": wave, "wsd": [1.0, 1.0, 0.5]}
    assert rates == pytest.approx(expected[schedule])
    end = learning_rate(OptimConfig(lr=1.0, schedule=schedule), 999, 1000)
    assert end == pytest.approx(1.0 if schedule == "constant" else 0.05, abs=0.01)
    for warmup in (0.0, 0.5, 1.0):
        config = OptimConfig(lr=1.0, schedule=schedule, warmup=warmup)
        rates = [learning_rate(config, s, n) for n in (1, 2, 3) for s in range(n)]
        assert all(0 < rate <= 1 for rate in rates)


def test_rates_and_independent_decay_are_those_of_the_configuration(tiny):
    optim = {"lr": 0.02, "warmup": 0.0, "schedule": "constant"}
    decay = {"weight_decay": 0.1, "decay": "independent"}
    run = RunState(resolve(with_values(tiny(), optim={**optim, **decay})))
    set_rate(run, 0)
    groups = run.optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.02] * 3
    # λ of a step is that of the configuration, whatever the rate.
    decays = [group["lr"] * group["weight_decay"] for group in groups]
    assert decays == pytest.approx([0.1, 0.1, 0.0])
