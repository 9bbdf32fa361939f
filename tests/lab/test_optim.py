"""Optimizers, learning rates and parametrisations of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qkeel.errors import InvalidValueError
from qkeel.lab import DataConfig, ImagesConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.build_run import (
    build_decoder,
    build_optimizer,
    layers,
    learning_rate,
    resolve,
)
from qkeel.lab.checkpoint import RunState
from qkeel.lab.muon import Muon
from qkeel.lab.train import set_rate, train_step
from qkeel.spec import InverseSqrt


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 5
) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_torchs_muon_up_to_its_bfloat16(weight_decay: float) -> None:
    shapes = ((16, 16), (16, 16), (32, 16), (16, 32))
    ours, theirs = weights(*shapes), weights(*shapes)
    train(
        Muon([{"params": ours, "muon": True}], lr=0.02, weight_decay=weight_decay), ours
    )
    torchs = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    train(torchs, theirs)
    for start, a, b in zip(weights(*shapes), ours, theirs, strict=True):
        assert (a - b).norm() < 0.02 * (
            b - start
        ).norm()  # five steps of bfloat16 rounding


def test_muon_moves_a_matrix_as_far_as_adamw_would() -> None:
    (w,) = weights((64, 128))
    before = w.detach().clone()
    train(Muon([{"params": [w], "muon": True}], lr=1.0), [w], steps=1)
    assert (w - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_groups_without_muon_are_adamw_bit_for_bit() -> None:
    ours, theirs = weights((4, 3), (5,)), weights((4, 3), (5,))
    train(Muon([{"params": ours}], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1), ours)
    train(
        torch.optim.AdamW(
            theirs, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        ),
        theirs,
    )
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
def test_weight_decay_is_for_matrices_and_every_parameter_is_in_one_group(
    name: str,
) -> None:
    model = build_decoder(ModelConfig(d_model=16, n_heads=2), vocab_size=11)
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.1), model)  # type: ignore[arg-type]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len({id(p) for p in held})
    for group in optimizer.param_groups:
        assert all(
            (p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"]
        )
    if name == "muon":
        orthogonal = [
            p
            for group in optimizer.param_groups
            if group["muon"]
            for p in group["params"]
        ]
        assert all(
            p is not model.embedding.weight and p is not model.head.weight
            for p in orthogonal
        )
        assert len(orthogonal) == 2 * 6


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_the_warm_up_is_linear_to_the_peak(schedule: str) -> None:
    config = OptimConfig(lr=2.0, schedule=schedule, warmup=0.1)  # type: ignore[arg-type]
    assert [learning_rate(config, s, 100) for s in range(10)] == pytest.approx(
        [0.2 * (s + 1) for s in range(10)]
    )
    assert learning_rate(config, 10, 100) == 2.0


def test_constant_stays_cosine_and_wsd_fall_to_the_final_share() -> None:
    ends = {
        s: learning_rate(OptimConfig(lr=1.0, schedule=s), 999, 1000)  # type: ignore[arg-type]
        for s in ("constant", "cosine", "wsd")
    }
    assert ends["constant"] == 1.0
    assert ends["cosine"] == pytest.approx(0.05, abs=1e-4)
    assert ends["wsd"] == pytest.approx(0.05, abs=0.01)


def test_wsd_is_flat_until_the_last_fifth() -> None:
    config = OptimConfig(lr=1.0, schedule="wsd", final=0.0)
    assert learning_rate(config, 79, 100) == 1.0
    assert learning_rate(config, 90, 100) == pytest.approx(0.5)


def test_cosine_is_half_way_in_the_middle() -> None:
    config = OptimConfig(lr=1.0, warmup=0.0, final=0.0)
    assert learning_rate(config, 50, 100) == pytest.approx(0.5)


def test_short_runs_have_rates_too() -> None:
    for schedule in ("constant", "cosine", "wsd"):
        for warmup in (0.0, 0.5, 1.0):
            config = OptimConfig(lr=1.0, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
            for steps in (1, 2, 3):
                assert all(
                    0 < learning_rate(config, s, steps) <= 1 for s in range(steps)
                )


WIDTHS = (32, 64, 128, 256)


def changes(parametrisation: str, width: int) -> dict[str, float]:
    """The root mean square by which 5 steps change what leaves the last block, the attention's output, and logits."""
    config = RunConfig(
        model=ModelConfig(
            d_model=width,
            n_heads=4,
            parametrisation=parametrisation,
            base_width=32,
            base_head_dim=8,
        ),  # type: ignore[arg-type]
        data=DataConfig(source="topics", context=16, batch=4),
        optim=OptimConfig(lr=0.01, warmup=0.0, schedule="constant"),
        steps=5,
        device="cpu",
        eval_sequences=2,
    )
    run = RunState(resolve(config))
    before = seen(run)
    for step in range(5):
        train_step(run, step)
    after = seen(run)
    return {
        name: float((after[name] - before[name]).square().mean().sqrt())
        for name in before
    }


@torch.no_grad()
def seen(run: RunState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    last = run.model.get_submodule("blocks.1")
    names = {"": "block", "attention": "attention"}
    hooks = [
        last.get_submodule(path).register_forward_hook(
            lambda _, __, x, name=name: found.update({name: x})
        )
        for path, name in names.items()
    ]
    found["logits"] = run.model(run.heldout.inputs)
    for hook in hooks:
        hook.remove()
    return found


def test_under_mup_the_change_of_activations_does_not_grow_with_width_and_else_it_does() -> (
    None
):
    slopes = {}
    for parametrisation in ("standard", "mup"):
        each = [changes(parametrisation, width) for width in WIDTHS]
        slopes[parametrisation] = {
            name: math.log2(each[-1][name] / each[0][name])
            / math.log2(WIDTHS[-1] / WIDTHS[0])
            for name in each[0]
        }
    # One model of each width. Over six seeds and two texts the largest slope under µP was 0.22, the least gap 0.39.
    assert all(slope < 0.3 for slope in slopes["mup"].values()), slopes
    assert all(
        slope > slopes["mup"][name] + 0.3 for name, slope in slopes["standard"].items()
    ), slopes


def test_at_the_base_sizes_mup_is_the_standard_parametrisation_bit_for_bit() -> None:
    assert changes("mup", 32) == changes("standard", 32)


def test_scales_rates_and_decay_are_those_of_the_table() -> None:
    model = ModelConfig(d_model=256, n_heads=4, parametrisation="mup")
    (spec, _) = layers(model)
    assert isinstance(spec.scale, InverseSqrt)
    assert spec.scale.factor(torch.zeros(1, 1), 64, {}) == pytest.approx(
        math.sqrt(16) / 64
    )
    optim = OptimConfig(
        lr=0.02, warmup=0.0, schedule="constant", weight_decay=0.1, decay="independent"
    )
    run = RunState(
        resolve(RunConfig(model=model, optim=optim, device="cpu", eval_sequences=1))
    )
    set_rate(run, 0)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    assert rates == pytest.approx([0.02 * 64 / 256, 0.02, 0.02])
    decays = [
        group["lr"] * group["weight_decay"] for group in run.optimizer.param_groups
    ]
    assert decays == pytest.approx([0.1, 0.1, 0.0]), (
        "λ of a step is that of the configuration, whatever the rate"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelConfig(block="mla", parametrisation="mup"),
        lambda: RunConfig(
            model=ModelConfig(parametrisation="mup"), optim=OptimConfig(name="muon")
        ),
        lambda: RunConfig(
            model=ModelConfig(parametrisation="mup"),
            images=ImagesConfig(image_input="patches"),
        ),
        lambda: ModelConfig(base_width=0),
        lambda: OptimConfig(name="sgd", decay="independent"),
    ],
)
def test_what_mup_and_independent_decay_have_no_rule_for_is_refused(
    make: Callable[[], object],
) -> None:
    with pytest.raises(InvalidValueError, match=r"mup|base_width|independent"):
        make()
