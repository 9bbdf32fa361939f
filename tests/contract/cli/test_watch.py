"""`qkeel watch -- python train.py`: training is to the bit what it is without, and a run directory is left behind."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from tests import forked

from qkeel import load

from .scripts import run, script, watched

CASES = Path(__file__).with_name("watch_cases.py")


def same_when_watched(folder: Path, *names: str) -> str:
    result = forked.python([str(CASES), str(folder), *names], folder)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_the_example_trains_to_the_same_bits_when_watched(tmp_path: Path) -> None:
    said = same_when_watched(tmp_path, "plain", "handwritten")
    assert said.count("qkeel: watching 2 attention layers of GPT") == 2
    for name in ("plain", "handwritten"):
        assert load(tmp_path / name).steps["step"].tolist() == [0, 2]
        assert len(load(tmp_path / name).eval_steps) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_to_the_same_bits_when_watched_and_compiled(
    tmp_path: Path,
) -> None:
    same_when_watched(tmp_path, "aot_eager", "inductor", "inductor_handwritten")


PILOTED = """
torch.manual_seed(0)
net = Net(2)
opt = torch.optim.AdamW(net.parameters(), lr=0.5)
train(net, opt, 30)
print(total(net))
"""


def test_a_script_is_held_by_an_autopilot_and_its_directory_holds_the_decisions(
    tmp_path: Path,
) -> None:
    words = ["python", script(tmp_path, PILOTED).name]
    alone = forked.python(words[1:], tmp_path)
    options = [
        "--every",
        "2",
        "--autopilot",
        "--policy",
        "ladder:threshold=20,patience=1",
    ]
    held = watched(words, tmp_path, *options, start=forked.python)
    assert held.returncode == 0, held.stderr
    assert float(held.stdout) != float(alone.stdout)
    events = load(tmp_path / "qkeel-runs" / "train").events
    decided = [event["text"] for event in events if event["event"] == "decision"]
    assert any("qk_clip" in text for text in decided)
    assert all(text in held.stderr for text in decided)
    unknown = watched(words, tmp_path, "--policy", "lader", start=forked.python)
    assert unknown.returncode == 2
    assert "Did you mean 'ladder'" in unknown.stderr
    assert not unknown.stdout  # the script was not begun


HOT = """
torch.manual_seed(0)
net = Net(2)
with torch.no_grad():
    for layer in net.layers:
        layer.qkv.weight.mul_(40)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
train(net, optimizer, 3)
"""


def fixes(stderr: str) -> tuple[list[str], list[str]]:
    """The command and the line of code that the alarms of a script print."""
    command, paste = (
        "qkeel: to fix it: qkeel ",
        "qkeel: or in the script, after the optimizer is created: ",
    )
    lines = stderr.splitlines()
    commands = [
        line.removeprefix(command) for line in lines if line.startswith(command)
    ]
    return commands, [
        line.removeprefix(paste).partition("  (")[0]
        for line in lines
        if line.startswith(paste)
    ]


def test_the_command_that_an_alarm_prints_once_runs_as_it_is_and_holds_the_logits(
    tmp_path: Path,
) -> None:
    result = watched(
        ["python", script(tmp_path, HOT).name, "--x", "a b"],
        tmp_path,
        start=forked.python,
    )
    (command,), _ = fixes(result.stderr)
    assert (
        command
        == "watch --apply qk_clip:threshold=15,steps=matched -- python train.py --x 'a b'"
    )
    own, _, rest = command.removeprefix("watch ").partition(" -- ")
    again = watched(shlex.split(rest), tmp_path, *shlex.split(own), start=forked.python)
    assert again.returncode == 0, again.stderr
    assert (
        "with qk_clip:steps=matched,threshold=15 applied"
        in again.stderr.splitlines()[0]
    )
    logits = load(tmp_path / "qkeel-runs" / "train-2").steps["max_logit"]
    before = load(tmp_path / "qkeel-runs" / "train").steps["max_logit"]
    assert logits[0] == before[0] > 1000
    assert logits[-1] < 0.5 * before[-1]
    assert not fixes(again.stderr)[0]


def test_the_line_that_an_alarm_prints_runs_as_pasted_with_and_without_the_watcher(
    tmp_path: Path,
) -> None:
    result = watched(
        ["python", script(tmp_path, HOT).name], tmp_path, start=forked.python
    )
    _, (line,) = fixes(result.stderr)
    pasted = (
        HOT.replace("train(net", f"import qkeel\nmodel = net\n{line}\ntrain(net")
        + "print(total(net))"
    )
    alone = forked.python([script(tmp_path, pasted).name], tmp_path)
    seen = watched(["python", "train.py"], tmp_path, start=forked.python)
    assert alone.returncode == seen.returncode == 0, alone.stderr + seen.stderr
    assert alone.stdout == seen.stdout != ""
    assert (
        fixes(seen.stderr)[0] == []
    )  # what it would print is in force; see the alarm's rule of what a model takes


def test_a_remedy_that_cannot_be_applied_ends_the_script_in_one_sentence(
    tmp_path: Path,
) -> None:
    script(
        tmp_path,
        "net = Net(1)\ntrain(net, torch.optim.SGD(net.parameters(), lr=0.1))\nprint('trained')",
    )
    result = watched(
        ["python", "train.py"], tmp_path, "--apply", "qk_norm+lalr", start=forked.python
    )
    assert (result.returncode, result.stdout) == (2, "")
    (error,) = (line for line in result.stderr.splitlines() if "error" in line)
    assert error.startswith(
        "qkeel: error: qk_norm+lalr cannot be applied to Net: lalr at layers.0"
    )
    assert "Traceback" not in result.stderr
    unknown = watched(
        ["python", "train.py"], tmp_path, "--apply", "qknorm", start=forked.python
    )
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "Did you mean 'qk_norm'" in unknown.stderr
    both = watched(
        ["python", "train.py"],
        tmp_path,
        "--apply",
        "qk_norm",
        "--autopilot",
        start=forked.python,
    )
    assert both.returncode == 2
    assert "expected --apply or --autopilot, got both" in both.stderr


PHASES = """
torch.manual_seed(0)
net = Net(2)
with torch.no_grad():
    for layer in net.layers:
        layer.qkv.weight.mul_(10)
train(net, torch.optim.SGD(net.parameters(), lr=1e-6), 2)
second = torch.optim.SGD(net.parameters(), lr=1.0)
before = [layer.qkv.weight.detach().clone() for layer in net.layers]
train(net, second, 1)
print(max(float((layer.qkv.weight - w)[:32].abs().max()) for layer, w in zip(net.layers, before)))
print(sum(type(m).__name__ == "RMSNorm" or hasattr(m, "gain") for m in net.modules()))
"""


def moved(folder: Path, spec: str | None) -> float:
    """How far a step of the second phase of training moves q's and k's weights, under remedies from its start."""
    options = [] if spec is None else ["--apply", spec]
    result = watched(
        ["python", script(folder, PHASES).name], folder, *options, start=forked.python
    )
    assert result.returncode == 0, result.stderr
    assert "already" not in result.stderr
    return float(result.stdout.splitlines()[0])


def test_remedies_on_steps_go_with_the_optimizer_of_a_second_phase_and_those_of_the_pass_stay(
    tmp_path: Path,
) -> None:
    plain = moved(tmp_path, None)
    assert moved(tmp_path, "lalr:tau=0.1") == pytest.approx(plain / 10, rel=0.01)
    capped = moved(tmp_path, "softcap:cap=5")
    assert moved(tmp_path, "lalr:tau=0.1+softcap:cap=5") == pytest.approx(
        capped / 10, rel=0.01
    )
    normed = moved(tmp_path, "qk_norm")
    assert normed not in (plain, capped)


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
PARALLEL = """
import os
import torch.distributed as dist

torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
model = net = Net(2)
if world > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(4):
    loss(model, batch(step).chunk(world)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_record_what_one_records_on_the_whole_batch(
    tmp_path: Path,
) -> None:
    script(tmp_path, PARALLEL)
    for command, name in ((["python", "train.py"], "one"), (TORCHRUN, "two")):
        result = watched(command, tmp_path, "--every", "1", "--out", name)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count(f"qkeel: run {name}\n") == 1
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert (one.config["processes"], two.config["processes"]) == (1, 2)
    assert two.status == "done"
    assert two.history.steps.tolist() == one.history.steps.tolist() == [0, 1, 2, 3]
    for name, values in one.history.heads.items():
        np.testing.assert_allclose(
            two.history.heads[name], values, rtol=1e-5, atol=1e-6, err_msg=name
        )


TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
data = [{"input_ids": row, "labels": row} for step in range(4) for row in batch(step)]
arguments = TrainingArguments(
    output_dir="out",
    max_steps=3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=data).train()
print("total", total(model))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="the Trainer of transformers needs it",
)
def test_the_trainer_of_transformers_is_watched_and_trains_to_the_same_bits(
    tmp_path: Path,
) -> None:
    script(tmp_path, TRAINER)
    plain = run(["train.py"], tmp_path)
    seen = watched(["python", "train.py"], tmp_path, "--every", "1")
    assert seen.returncode == plain.returncode == 0, seen.stderr
    assert seen.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    recorded = load(tmp_path / "qkeel-runs" / "train")
    assert len(recorded.steps) == 3
    assert json.dumps(recorded.config["sites"]).count("transformer.h.") == 2
