"""Training in fp16 with a dynamic loss scale, and in bf16: overflow is recorded, and company changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.recorded import numbers

from qkeel.lab import RunConfig, Watcher, checkpoint, run
from qkeel.records import RunDirectory

Make = Callable[..., RunConfig]


def events(place: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in RunDirectory(place).events()]


def begin_at(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Lets runs begin with this loss scale."""
    monkeypatch.setattr(
        checkpoint,
        "GradScaler",
        functools.partial(torch.amp.GradScaler, init_scale=scale),
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_overflow_skips_the_step_is_recorded_and_a_cut_run_goes_on_to_the_same_bits(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    begin_at(monkeypatch, 2.0**22)
    config = tiny(
        dtype="fp16",
        optim_lr=0.01,
        optim_name=optimizer,
        remedy="lalr:tau=0.3+qk_clip",
        log_every=1,
    )
    whole = numbers(run(config, tmp_path / "whole"))
    lines: list[dict[str, Any]] = whole["lines"]
    skipped = int(lines[-1]["skipped_steps"])
    found = events(tmp_path / "whole")
    assert 0 < skipped == len(found) == whole["summary"]["skipped_steps"] < 12
    assert found[0] == (
        1,
        "skipped: the loss or a gradient overflowed fp16 at loss scale 4.1943e+06",
    )
    assert lines[-1]["loss_scale"] == 2.0 ** (22 - skipped)
    assert lines[1]["max_logit"] == lines[0]["max_logit"], (
        "a skipped step leaves the weights alone"
    )
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    ticks = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        run(
            config,
            tmp_path / "cut",
            watcher=Watcher(should_stop=lambda: next(ticks) == 6),
        )
    run(config, tmp_path / "cut")
    assert numbers(tmp_path / "cut") == whole
    assert [
        event for event in events(tmp_path / "cut") if event[1] != "resumed"
    ] == found


def test_a_forward_pass_that_overflows_stops_the_run_and_says_so(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_at(monkeypatch, 2.0)
    place = run(
        tiny(dtype="fp16", optim_lr=1e6, optim_grad_clip=0.0, steps=30), tmp_path / "a"
    )
    assert (
        events(place.path)[-1][1]
        == "stopped: the loss or the gradient is not finite at any loss scale"
    )
    last = place.metrics()[-1]
    assert last["step"] < 30
    assert last["loss_scale"] < 1
    assert place.summary()["skipped_steps"] == last["skipped_steps"] >= 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_near_fp32(
    tiny: Make, tmp_path: Path, dtype: str
) -> None:
    # At a rate at which rounding does not grow from step to step, compared with what training gains.
    half, full = (
        run(tiny(dtype=kind, optim_lr=0.003), tmp_path / kind)
        for kind in (dtype, "fp32")
    )
    losses = [place.summary()["val_loss"] for place in (half, full)]
    gain = full.metrics()[0]["val_loss"] - losses[1]
    assert gain > 0.05
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.15 * gain)
    assert ("loss_scale" in half.summary()) == (dtype == "fp16")
    assert "loss_scale" not in full.summary()
