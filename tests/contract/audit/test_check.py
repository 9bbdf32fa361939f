"""`qkeel check`: one sentence with its number and its threshold, the same exit code for the same verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.contract.command import qkeel as command
from torch import nn

import qkeel
from qkeel.errors import InvalidTypeError, InvalidValueError, NoAttentionError
from qkeel.metrics import Status, judged
from qkeel.monitor import Alarm, RunDirectorySink, Sample, Severity

Capture = pytest.CaptureFixture[str]


def encoder(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, batch_first=True),
        2,
        enable_nested_tensor=False,
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "in_proj_weight" in name:
                p.mul_(scale)
    return model


def batch() -> torch.Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


def test_a_model_is_judged_by_the_largest_logit_that_a_watcher_sees_and_stays_as_it_is() -> (
    None
):
    model = encoder()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = qkeel.check(model, batch())
    with qkeel.watch(model) as monitor:
        model(batch())
    assert monitor.sample is not None
    spread = float(monitor.sample.heads["logit_spread"].max())
    assert found.largest == pytest.approx(spread, rel=1e-6)
    assert found.healthy
    assert str(found).startswith(f"healthy: largest logit {found.largest:.3g} (layers.")
    assert str(found).endswith("under 100, where logits begin to count as large")
    assert len(found.table().splitlines()) == 3
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert model.training


def test_too_large_logits_are_not_healthy_and_the_threshold_is_the_callers() -> None:
    found = qkeel.check(encoder(100.0), batch())
    assert found.status is Status.NOT_HEALTHY
    assert "is over 1,000, where training suffers" in str(found)
    healthy = qkeel.check(encoder(), batch())
    strict = qkeel.check(encoder(), batch(), threshold=healthy.largest / 2)
    assert strict.status is Status.NOT_HEALTHY
    assert "the threshold that was given" in str(strict)


def test_attention_that_is_the_whole_model_is_called_by_its_class() -> None:
    found = qkeel.check(qkeel.nn.Attention(16, 2), batch())
    assert "(Attention head " in str(found)
    with qkeel.watch(model := qkeel.nn.Attention(16, 2)) as monitor:
        model(batch())
    assert "(Attention head " in monitor.table().splitlines()[0]
    assert monitor.table().splitlines()[2].startswith("Attention ")


def test_what_cannot_be_judged_is_one_clear_error() -> None:
    with pytest.raises(InvalidTypeError, match=r"qkeel.check\(model, batch\)"):
        qkeel.check(encoder())
    with pytest.raises(InvalidTypeError, match="expected a model, or the path"):
        qkeel.check(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="above 0"):
        qkeel.check(encoder(), batch(), threshold=0.0)
    with pytest.raises(NoAttentionError):
        qkeel.check(nn.Linear(16, 16), batch())


@pytest.mark.parametrize(
    ("largest", "more", "status", "says"),
    [
        (7.0, {}, Status.HEALTHY, "healthy: largest logit 7 (a head 0), under 100"),
        (
            168.0,
            {},
            Status.HEALTHY,
            "healthy, but large: largest logit 168 (a head 0) is over 100 and under 1,000",
        ),
        (
            1340.0,
            {},
            Status.NOT_HEALTHY,
            "not healthy: largest logit 1,340 (a head 0) is over 1,000",
        ),
        (
            7.0,
            {"entropy": 0.01, "lowest": "b"},
            Status.NOT_HEALTHY,
            "not healthy: attention has collapsed in b",
        ),
        (
            7.0,
            {"broken": ["a", "b", "c", "d"]},
            Status.NOT_HEALTHY,
            "NaN or infinite in a, b, c and 1 more",
        ),
        (
            float("nan"),
            {},
            Status.NOT_KNOWN,
            "not known: no attention logit was measured",
        ),
        (
            float("inf"),
            {},
            Status.NOT_HEALTHY,
            "not healthy: largest logit inf (a head 0) is over 1,000",
        ),
        (100.0, {}, Status.HEALTHY, "healthy: largest logit 100"),
        (1000.0, {}, Status.HEALTHY, "healthy, but large: largest logit 1,000"),
    ],
)
def test_the_verdict_and_its_sentence(
    largest: float, more: dict[str, object], status: Status, says: str
) -> None:
    found = judged(largest, "a head 0", **more)  # type: ignore[arg-type]
    assert found[0] is status
    assert says in found[1]


def run(
    path: Path,
    logits: list[float],
    entropy: float = 2.0,
    alarms: Sequence[tuple[str, int]] = (),
) -> Path:
    sink = RunDirectorySink(path)
    sink.open(
        {"model": "Toy", "sites": [{"name": name, "n_heads": 2} for name in ("a", "b")]}
    )
    for step, top in enumerate(logits):
        heads = {
            "max_logit": np.array([[0.5, 1.0], [0.1, top]]),
            "entropy": np.full((2, 2), entropy),
        }
        sink.write(Sample(step=step, layers=("a", "b"), heads=heads))
    about: dict[str, Any] = {
        "rule": "r",
        "value": 1.0,
        "meaning": "",
        "trend": "",
        "remedy": "",
        "source": "",
    }
    for severity, step in alarms:
        sink.alarm(Alarm(severity=Severity(severity), step=step, **about))
    sink.close(complete=True)
    return path


def test_a_run_is_judged_by_all_its_records(tmp_path: Path, capsys: Capture) -> None:
    assert (
        command("check", str(run(tmp_path / "good", [1.0, 7.0, 3.0])), "--table") == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "healthy: largest logit 7 (b head 1, step 1), under 100, where logits begin to count as large"
    )
    assert said[1].split() == ["layer", "max", "logit", "last", "entropy,", "last"]
    assert command("check", str(run(tmp_path / "bad", [1.0, 1340.0, 3.0]))) == 1
    assert (
        "not healthy: largest logit 1,340 (b head 1, step 1)" in capsys.readouterr().out
    )
    assert command("check", str(run(tmp_path / "flat", [1.0], entropy=0.01))) == 1
    assert command("check", str(tmp_path / "bad"), "--threshold", "2000", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["largest"] == 1340.0


def test_the_verdict_on_a_run_names_the_alarms_that_it_raised(tmp_path: Path) -> None:
    """Its watcher said "grown too large": to call the run healthy without a word would contradict it."""
    logits = [1.0, 863.0, 684.0]
    assert str(qkeel.check(run(tmp_path / "a", logits))).endswith(
        "is over 100 and under 1,000, where training suffers"
    )
    found = qkeel.check(
        run(
            tmp_path / "b",
            logits,
            alarms=[("notice", 1), ("alarm", 12), ("critical", 14)],
        )
    )
    assert "since step 12" in str(found)
    assert str(found).endswith("the largest logit is 863 (b head 1, step 1)")
    assert found.status is Status.NOT_HEALTHY
    assert qkeel.check(tmp_path / "b", threshold=900.0).status is Status.HEALTHY


@pytest.mark.parametrize(
    ("last", "status"), [(14.3, Status.HEALTHY), (684.0, Status.NOT_HEALTHY)]
)
def test_alarms_that_an_autopilot_answered_no_longer_count(
    last: float, status: Status, tmp_path: Path
) -> None:
    folder = run(tmp_path / "a", [1.0, 240.7, last], alarms=[("alarm", 1)])
    with (folder / "events.jsonl").open("a") as events:
        events.write(
            json.dumps({"event": "decision", "step": 1, "remedy": "qk_clip"}) + "\n"
        )
    assert qkeel.check(folder).status is status


def weights(path: Path, value: float) -> Path:
    made = {
        f"h.0.attn.{name}_proj.weight": torch.eye(8) * value
        for name in ("q", "k", "v", "o")
    }
    made |= {f"h.0.attn.{name}_norm.weight": torch.ones(4) * value for name in "qk"}
    safetensors.torch.save_file(made, path)
    return path


def checkpoint(folder: Path, value: float, **config: object) -> str:
    """Heads of 4 with gains of `value`, in a folder with a config."""
    folder.mkdir()
    weights(folder / "model.safetensors", value)
    (folder / "config.json").write_text(
        json.dumps({"num_attention_heads": 2, **config})
    )
    return str(folder)


def test_a_checkpoint_is_judged_by_what_its_weights_allow(
    tmp_path: Path, capsys: Capture
) -> None:
    """Norms over heads of 4 with gains g: no logit is over g² · 4 / √4 = 2 g²."""
    assert command("check", checkpoint(tmp_path / "a", 1.0, model_type="qwen3")) == 0
    assert (
        "healthy: no input can produce a logit over 2 (h.0.attn); the threshold is 1,000"
        in capsys.readouterr().out
    )
    large = checkpoint(tmp_path / "b", 30.0, model_type="qwen3")
    assert command("check", large) == 4
    assert (
        "not known: weights allow logits up to 1,800 (h.0.attn), and the threshold is 1,000"
        in capsys.readouterr().out
    )
    assert (
        command("check", checkpoint(tmp_path / "c", float("nan"), model_type="qwen3"))
        == 1
    )
    assert (
        "not healthy: NaN or infinite weights in h.0.attn." in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "no model_type"),
        (
            {"model_type": "qwen99"},
            "the bounds of the model type qwen99 have not been compared",
        ),
    ],
)
def test_conventions_alone_do_not_make_a_checkpoint_healthy(
    config: dict[str, object], why: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = checkpoint(tmp_path / "a", 1.0, **config)
    assert command("check", folder) == 4
    said = "not known: weights would allow logits up to 2 (h.0.attn), but h.0.attn is read by conventions"
    assert f"{said} ({why}" in capsys.readouterr().out


def test_wrong_usage_is_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    assert command("check") == 2
    assert command("check", str(tmp_path / "nothing.safetensors")) == 2
    assert command("check", "meta-llama/Llama-3-8B") == 2
    assert (
        "to download it: hf download meta-llama/Llama-3-8B" in capsys.readouterr().err
    )
    assert command("check", str(run(tmp_path / "r", [1.0])), "--threshold", "-1") == 2


def test_a_run_of_the_lab_is_judged_although_it_does_not_name_its_layers(
    tmp_path: Path,
) -> None:
    from qkeel.lab import ModelConfig, RunConfig
    from qkeel.lab import run as train

    config = RunConfig(
        model=ModelConfig(d_model=16, n_layers=2, n_heads=2), steps=4, log_every=2
    )
    train(config, tmp_path / "run")
    found = qkeel.check(tmp_path / "run")
    assert str(found).startswith("healthy: largest logit")
    assert [row[0] for row in found.rows] == ["layer 0", "layer 1"]
