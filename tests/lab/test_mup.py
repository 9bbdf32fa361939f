"""µP by a coordinate check: how far a few steps change activations, by width."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.lab import DataConfig, ImagesConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.build_run import layers, resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.training import TrainingBackend, set_rate, train_step
from qkeel.spec import InverseSqrt

WIDTHS = (32, 64, 128, 256)


def changes(parametrisation: str, width: int) -> dict[str, float]:
    """The root mean square by which 5 steps change what leaves the last block, the attention's output, and logits."""
    config = RunConfig(
        model=ModelConfig(d_model=width, n_heads=4, parametrisation=parametrisation, base_width=32, base_head_dim=8),  # type: ignore[arg-type]
        data=DataConfig(source="topics", context=16, batch=4),
        optim=OptimConfig(lr=0.01, warmup=0.0, schedule="constant"),
        steps=5,
        device="cpu",
        eval_sequences=2,
    )
    run = RunState(resolve(config))
    before = seen(run)
    arithmetic = TrainingBackend([run])
    for step in range(5):
        train_step(arithmetic, [step])
    after = seen(run)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


@torch.no_grad()
def seen(run: RunState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    last = run.model.get_submodule("blocks.1")
    names = {"": "block", "attention": "attention"}
    hooks = [
        last.get_submodule(path).register_forward_hook(lambda _, __, x, name=name: found.update({name: x}))
        for path, name in names.items()
    ]
    found["logits"] = run.model(run.heldout.inputs)
    for hook in hooks:
        hook.remove()
    return found


def test_under_mup_the_change_of_activations_does_not_grow_with_width_and_else_it_does() -> None:
    slopes = {}
    for parametrisation in ("standard", "mup"):
        each = [changes(parametrisation, width) for width in WIDTHS]
        slopes[parametrisation] = {
            name: math.log2(each[-1][name] / each[0][name]) / math.log2(WIDTHS[-1] / WIDTHS[0]) for name in each[0]
        }
    assert all(slope < 0.15 for slope in slopes["mup"].values()), slopes
    assert all(slope > 0.4 for slope in slopes["standard"].values()), slopes


def test_at_the_base_sizes_mup_is_the_standard_parametrisation_bit_for_bit() -> None:
    assert changes("mup", 32) == changes("standard", 32)


def test_scales_rates_and_decay_are_those_of_the_table() -> None:
    model = ModelConfig(d_model=256, n_heads=4, parametrisation="mup")
    (spec, _) = layers(model)
    assert isinstance(spec.scale, InverseSqrt)
    assert spec.scale.factor(torch.zeros(1, 1), 64, {}) == pytest.approx(math.sqrt(16) / 64)
    optim = OptimConfig(lr=0.02, warmup=0.0, schedule="constant", weight_decay=0.1, decay="independent")
    run = RunState(resolve(RunConfig(model=model, optim=optim, device="cpu", eval_sequences=1)))
    set_rate(run, 0)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    assert rates == pytest.approx([0.02 * 64 / 256, 0.02, 0.02])
    decays = [group["lr"] * group["weight_decay"] for group in run.optimizer.param_groups]
    assert decays == pytest.approx([0.1, 0.1, 0.0]), "λ of a step is that of the configuration, whatever the rate"


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelConfig(block="mla", parametrisation="mup"),
        lambda: RunConfig(model=ModelConfig(parametrisation="mup"), optim=OptimConfig(name="muon")),
        lambda: RunConfig(model=ModelConfig(parametrisation="mup"), images=ImagesConfig(image_input="patches")),
        lambda: ModelConfig(base_width=0),
        lambda: OptimConfig(name="sgd", decay="independent"),
    ],
)
def test_what_mup_and_independent_decay_have_no_rule_for_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError, match=r"mup|base_width|independent"):
        make()
