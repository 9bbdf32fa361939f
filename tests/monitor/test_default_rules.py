"""What a monitor worries about without being told to: the rules that fit what it sees."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.monitor.small import batch, small
from torch import Tensor, nn

import qkeel
from qkeel import watch
from qkeel.errors import AlarmWarning
from qkeel.monitor import (
    DEFAULT,
    GainGrowth,
    History,
    IdleNorm,
    Resolution,
    Severity,
    VanishingGradient,
    replay,
)
from qkeel.nn import Attention
from qkeel.records import Heads
from qkeel.spec import AttentionSpec, RMSNorm


class Written(nn.Module):
    """Attention that writes its scores to memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        return ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5).softmax(-1) @ v


def names(model: nn.Module, *args: Tensor) -> set[str]:
    """The rules of one watched pass that are no default ones."""
    with watch(model) as monitor:
        model(*args)
        assert monitor.sample is not None
        return {rule.name for rule in monitor._journal.log.rules} - {rule.name for rule in DEFAULT}


ALWAYS = {"gain growth", "vanishing gradient"}


def test_in_float32_rounding_is_no_worry() -> None:
    assert names(small(), batch(0)) == ALWAYS


@pytest.mark.parametrize(("dtype", "short"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_number_format_and_kernel_that_are_seen_bring_their_rule(dtype: torch.dtype, short: str) -> None:
    assert names(small().to(dtype), batch(0).to(dtype)) == {*ALWAYS, f"resolution {short} fused"}
    assert names(Written(8).to(dtype), batch(0).to(dtype)) == {*ALWAYS, f"resolution {short} eager"}


def test_autocast_counts_as_the_format_it_casts_to() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert names(small(), batch(0)) == {*ALWAYS, "resolution bf16 fused"}


def test_where_formats_differ_no_rule_guesses() -> None:
    model = nn.Sequential(Written(8), nn.Flatten(0, 1), Written(8).to(torch.bfloat16))
    model[1].forward = lambda x: x[:, 0].to(torch.bfloat16)  # type: ignore[method-assign]
    assert names(model, batch(0)) == ALWAYS


def test_a_norm_that_is_seen_is_held_to_the_bound_of_its_gains() -> None:
    model = nn.Sequential(Attention(16, 2, spec=AttentionSpec(norm=RMSNorm())))
    assert names(model, torch.randn(1, 4, 16)) == {*ALWAYS, "idle norm"}


def test_rounding_of_large_logits_raises_the_alarm() -> None:
    model = Written(8).to(torch.bfloat16)
    with torch.no_grad():
        model.q.weight.mul_(40), model.k.weight.mul_(40)
    with warnings.catch_warnings(record=True) as caught, watch(model) as monitor:
        warnings.simplefilter("always")
        model(batch(0).to(torch.bfloat16))
    assert any("scores stored in bf16 move a logit by" in str(w.message) for w in caught)
    assert "resolution bf16 eager" in {alarm.rule for alarm in monitor.alarms}


def test_logits_that_are_no_numbers_are_critical_and_name_the_first_layer() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = pytest.warns(AlarmWarning, match=r"blocks\.1, head 0: the logits of this head are NaN")
    with said, watch(model, optimizer) as monitor:
        for step in range(3):
            model(batch(step)).square().mean().backward()
            if step == 1:
                model.blocks[1].q.weight.data[0, 0] = torch.nan
            optimizer.step()
    (alarm,) = [alarm for alarm in monitor.alarms if alarm.rule == "not finite"]
    assert (alarm.step, alarm.severity, alarm.layer) == (2, Severity.CRITICAL, "blocks.1")
    series = monitor.history.series("non_finite")
    assert series is not None
    assert series.tolist() == [[[0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [1, 0]]]


def test_numbers_that_were_not_measured_are_no_alarm() -> None:
    heads = Heads(steps=torch.arange(2).numpy(), values={"max_logit": torch.full((2, 1, 1), torch.nan).numpy()})
    assert replay(History.of([{"step": 0}, {"step": 1}], heads, ("one",))) == []


def test_the_rate_on_record_is_that_of_the_step_just_done() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with watch(model, optimizer, every=2) as monitor:
        for step in range(5):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            schedule.step()
    # Step s, counted from 0, is made at rate 1/(s + 1); the model after s steps has just had step s - 1.
    assert monitor.history.values["lr"].tolist() == pytest.approx([1.0, 1 / 2, 1 / 4])


@pytest.mark.parametrize("line", sorted({rule.remedy for rule in DEFAULT if rule.remedy.startswith("qkeel.")}))
def test_the_line_that_an_alarm_ends_with_can_be_pasted(line: str) -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = eval(line, {"qkeel": qkeel, "model": model, "optimizer": optimizer, "batch": batch(0)})
    model(batch(1)).square().mean().backward()
    optimizer.step()
    handle.remove()


def test_the_line_of_every_alarm_can_be_pasted_as_it_is() -> None:
    """With the names that it says: model, optimizer, batch."""
    others = (Resolution(dtype="bf16", kernel="eager", head_dim=8), IdleNorm(kind="rms", head_dim=8))
    rules = (*DEFAULT, *others, GainGrowth(), VanishingGradient())
    for line in sorted({rule.remedy for rule in rules}):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        exec(line, {"qkeel": qkeel, "model": model, "optimizer": optimizer, "batch": batch(0)})
        model(batch(1)).square().mean().backward()
        optimizer.step()


def test_a_warning_names_the_users_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """import torch, qkeel
model = qkeel.nn.Attention(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with qkeel.watch(model, optimizer, rules=qkeel.monitor.Ceiling(threshold=-100.0)) as monitor:
    model(torch.ones(1, 3, 8)).sum().backward()
    optimizer.step()
    monitor.close()
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{script}:6: AlarmWarning: alarm at step 0"), done.stderr
    assert lines[1:] == ["  optimizer.step()"]
