"""Training in fp16 with a dynamic loss scale, and in bf16: overflow is recorded, and company changes nothing."""

import functools

import pytest
import torch
from tests.lab.recorded import numbers
from tests.quick import one_in

from qkeel.lab import Watcher, checkpoint, run
from qkeel.records import RunDirectory


def events(place):
    lines = [str(line["event"]) for line in RunDirectory(place).events()]
    return [line for line in lines if line != "resumed"]


def begin_at(monkeypatch, scale):
    """Lets runs begin with this loss scale."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=scale)
    monkeypatch.setattr(checkpoint, "GradScaler", scaler)


@pytest.mark.parametrize("optimizer", one_in(["muon", "adamw"], 2))
def test_an_overflow_skips_the_step_is_recorded_and_a_cut_run_goes_on_to_the_same_bits(
    tiny, tmp_path, monkeypatch, optimizer
):
    begin_at(monkeypatch, 2.0**22)
    optim, remedy = {"lr": 0.01, "name": optimizer}, "lalr:tau=0.3+qk_clip"
    config = tiny(dtype="fp16", optim=optim, remedy=remedy, log_every=1)
    whole, cut = numbers(run(config, tmp_path / "whole")), tmp_path / "cut"
    lines, skipped = whole["lines"], whole["summary"]["skipped_steps"]
    assert 0 < skipped == len(events(tmp_path / "whole")) < 12
    assert events(tmp_path / "whole")[0].endswith("loss scale 4.1943e+06")
    assert lines[-1]["loss_scale"] == 2.0 ** (22 - skipped)
    assert lines[1]["max_logit"] == lines[0]["max_logit"], "the weights are left alone"
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    ticks = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        run(config, cut, watcher=Watcher(should_stop=lambda: next(ticks) == 6))
    assert numbers(run(config, cut)) == whole
    assert events(cut) == events(tmp_path / "whole")


def test_a_forward_pass_that_overflows_stops_the_run_and_says_so(
    tiny, tmp_path, monkeypatch
):
    begin_at(monkeypatch, 2.0)
    optim = {"lr": 1e6, "grad_clip": 0.0}
    place = run(tiny(dtype="fp16", optim=optim, steps=30), tmp_path / "a")
    assert events(place.path)[-1].endswith("is not finite at any loss scale")
    last = place.metrics()[-1]
    assert last["step"] < 30
    assert last["loss_scale"] < 1
    assert place.summary()["skipped_steps"] == last["skipped_steps"] >= 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_near_fp32(tiny, tmp_path, dtype):
    # At a rate at which rounding does not grow from step to step, compared with what training gains.
    half, full = (
        run(tiny(dtype=kind, optim={"lr": 0.003}), tmp_path / kind)
        for kind in (dtype, "fp32")
    )
    loss, exact = (place.summary()["val_loss"] for place in (half, full))
    gain = full.metrics()[0]["val_loss"] - exact
    assert gain > 0.05
    assert loss != exact
    assert loss == pytest.approx(exact, abs=0.15 * gain)
    assert ("loss_scale" in half.summary()) == (dtype == "fp16")
