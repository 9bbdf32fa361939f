from __future__ import annotations

import pytest
import torch
from torch import nn

from qkeel.lab.build_run import Muon, build_decoder, build_optimizer
from qkeel.lab.config import ModelConfig, OptimConfig


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_torchs_muon_up_to_its_bfloat16(weight_decay: float) -> None:
    shapes = ((16, 16), (16, 16), (32, 16), (16, 32))
    ours, theirs = weights(*shapes), weights(*shapes)
    train(Muon([{"params": ours, "muon": True}], lr=0.02, weight_decay=weight_decay), ours)
    torchs = torch.optim.Muon(theirs, lr=0.02, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    train(torchs, theirs)
    for start, a, b in zip(weights(*shapes), ours, theirs, strict=True):
        assert (a - b).norm() < 0.02 * (b - start).norm()  # five steps of bfloat16 rounding


def test_muon_moves_a_matrix_as_far_as_adamw_would() -> None:
    (w,) = weights((64, 128))
    before = w.detach().clone()
    train(Muon([{"params": [w], "muon": True}], lr=1.0), [w], steps=1)
    assert (w - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_groups_without_muon_are_adamw_bit_for_bit() -> None:
    ours, theirs = weights((4, 3), (5,)), weights((4, 3), (5,))
    train(Muon([{"params": ours}], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1), ours)
    train(torch.optim.AdamW(theirs, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, fused=True), theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_a_gain_in_a_muon_group_is_left_to_adamw() -> None:
    matrix, gain = weights((4, 4), (4,))
    optimizer = Muon([{"params": [matrix, gain], "muon": True}], lr=0.1)
    train(optimizer, [matrix, gain], steps=1)
    assert set(optimizer.state[gain]) == {"exp_avg", "exp_avg_sq", "step"}
    assert set(optimizer.state[matrix]) == {"momentum"}


def test_parameters_without_gradient_are_left_alone() -> None:
    matrix, gain = weights((4, 4), (4,))
    before = matrix.detach().clone()
    Muon([{"params": [matrix, gain], "muon": True}], lr=0.1).step()
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_weight_decay_is_for_matrices_and_every_parameter_is_in_one_group(name: str) -> None:
    model = build_decoder(ModelConfig(d_model=16, n_heads=2), vocab_size=11)
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.1), model)  # type: ignore[arg-type]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len({id(p) for p in held})
    for group in optimizer.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    if name == "muon":
        orthogonal = [p for group in optimizer.param_groups if group["muon"] for p in group["params"]]
        assert all(p is not model.embedding.weight and p is not model.head.weight for p in orthogonal)
        assert len(orthogonal) == 2 * 6
