"""Training in fp16 with a dynamic loss scale, and in bf16: overflow is recorded, and company changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.test_stack import alone, numbers, stacked

from qkeel.lab import RunConfig, Watcher, run
from qkeel.lab.checkpoint import LossScale
from qkeel.lab.stack_models import plan_stacks
from qkeel.records import RunDirectory

Make = Callable[..., RunConfig]


def events(place: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in RunDirectory(place).events()]


def test_the_factor_is_that_of_torchs_scaler() -> None:
    mine, torchs = LossScale(start=8.0, interval=3), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for size in (1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf):
        before = weight.detach().clone()
        torchs.scale(torch.ones(()))  # makes its tensors
        weight.grad = torch.tensor([size, 1.0]) * mine.value
        torchs.unscale_(optimizer)
        mine.see(weight.grad.norm())
        torchs.step(optimizer)
        assert mine.skips == torch.equal(weight, before)
        torchs.update()
        mine.update()
        assert mine.value == torchs.get_scale()
    assert (mine.skipped, len(mine.taken_events()), mine.taken_events()) == (3, 3, [])


@pytest.mark.slow
def test_an_overflow_skips_the_step_is_recorded_and_training_goes_on(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0**22, 2000))
    configs: list[RunConfig] = [tiny(dtype="fp16", seed=seed, optim_lr=0.01, log_every=1) for seed in (0, 1)]
    assert plan_stacks([(config, i) for i, config in enumerate(configs)], "auto", 1) == [[0], [1]]
    expected = alone(configs, tmp_path)
    assert stacked(configs, tmp_path / "together") == [None, None]
    for i, one in enumerate(expected):
        assert numbers(tmp_path / "together" / str(i)) == one
        lines: list[dict[str, Any]] = one["lines"]
        found = events(tmp_path / f"alone{i}")
        skipped = int(lines[-1]["skipped_steps"])
        assert 0 < skipped == len(found) == one["summary"]["skipped_steps"] < 12
        assert found[0] == (1, "skipped: the loss or a gradient overflowed fp16 at loss scale 4.1943e+06")
        assert lines[-1]["loss_scale"] == 2.0 ** (22 - skipped)
        assert lines[1]["max_logit"] == lines[0]["max_logit"], "a skipped step leaves the weights alone"
        assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    ticks = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        run(configs[0], tmp_path / "cut", watcher=Watcher(should_stop=lambda: next(ticks) == 6))
    run(configs[0], tmp_path / "cut")
    assert numbers(tmp_path / "cut") == expected[0]
    assert [event for event in events(tmp_path / "cut") if event[1] != "resumed"] == events(tmp_path / "alone0")


def test_a_forward_pass_that_overflows_stops_the_run_and_says_so(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0, 2000))
    place = run(tiny(dtype="fp16", optim_lr=1e6, optim_grad_clip=0.0, steps=30), tmp_path / "a")
    assert events(place.path)[-1][1] == "stopped: the loss or the gradient is not finite at any loss scale"
    last = place.metrics()[-1]
    assert last["step"] < 30
    assert last["loss_scale"] < 1
    assert place.summary()["skipped_steps"] == last["skipped_steps"] >= 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_near_fp32(tiny: Make, tmp_path: Path, dtype: str) -> None:
    # At a rate at which rounding does not grow from step to step, compared with what training gains.
    half, full = (run(tiny(dtype=kind, optim_lr=0.003), tmp_path / kind) for kind in (dtype, "fp32"))
    losses = [place.summary()["val_loss"] for place in (half, full)]
    gain = full.metrics()[0]["val_loss"] - losses[1]
    assert gain > 0.05
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.15 * gain)
    assert ("loss_scale" in half.summary()) == (dtype == "fp16")
    assert "loss_scale" not in full.summary()
