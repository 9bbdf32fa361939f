"""Files, terminals and compilers as a run meets them, drawn by a seed: right, or one sentence that says what is wrong."""

import io
import json
import random
import sys
import threading
import warnings

import pytest
import torch
from safetensors.torch import save_file
from tests.contract.command import qkeel as command
from tests.training import sgd, step
from torch import nn

import qkeel
from qkeel.errors import QkeelError, RunDirectoryError
from qkeel.kernels.native import build
from qkeel.monitor import sinks

SEEDS = pytest.mark.parametrize("seed", range(3))
CONTROLS = "\x1b\x07\x9b\u202e\u2066\r\x08"


def watched(folder):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = sgd(model)
    monitor = qkeel.watch(model, optimizer, sinks=folder, rules=())
    return monitor, lambda: step(model, optimizer, torch.randn(2, 5, 16))


@SEEDS
def test_a_checkpoint_without_some_of_its_tensors_is_not_healthy(
    seed, tmp_path, capsys
):
    """Its names hold control characters, none of which reaches the terminal."""
    draw = random.Random(seed)
    n, odd = draw.randint(3, 6), "".join(draw.choices(CONTROLS, k=3))
    fused, tensors = draw.random() < 0.3, {}
    for i in range(n):
        for part in ["qkv"] if fused else "qkvo":
            rows = 48 if fused else 16
            name = f"model{odd}.layers.{i}.self_attn.{part}_proj.weight"
            tensors[name] = torch.randn(rows, 16) / 40
    config = {"num_hidden_layers": n, "num_attention_heads": 2, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    lost = draw.randrange(n)
    part = draw.choice(["", "k_proj", "q_proj"]) if not fused else ""
    is_lost = [f"layers.{lost}." in name and part in name for name in tensors]
    kept = {name: x for (name, x), gone in zip(tensors.items(), is_lost) if not gone}
    if draw.random() < 0.3:
        # Two shards and their index, of which one was not downloaded.
        shards = {
            name: f"{int(gone)}.safetensors" for name, gone in zip(tensors, is_lost)
        }
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": shards}))
        save_file(kept, tmp_path / "0.safetensors")
    else:
        save_file(kept, tmp_path / "model.safetensors")
    for words in ("check", "scan"):
        code = command(words, tmp_path)
        text = "".join(capsys.readouterr())
        assert not set(CONTROLS) & set(text)
        assert not text.startswith("healthy")
        assert code or words == "scan"


@SEEDS
def test_what_a_full_disk_does_not_take_is_lost_alone(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    is_full = [False] + [draw.random() < 0.4 for _ in range(7)]
    monitor, train = watched(tmp_path / "run")
    append, disk = sinks.append_line, {"is full": False}

    def appended(*args):
        if disk["is full"]:
            raise RunDirectoryError("cannot append") from OSError(28, "No space left")
        append(*args)

    monkeypatch.setattr(sinks, "append_line", appended)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for disk["is full"] in [*is_full]:
            train()
            monitor.read()
        disk["is full"] = False
        monitor.close()
    assert ["No space left" in str(x.message) for x in told] == [True] * any(is_full)
    left = [i for i, full in enumerate(is_full) if not full]
    assert qkeel.load(tmp_path / "run").steps["step"].tolist() == left


@SEEDS
def test_runs_that_begin_together_have_folders_of_their_own(seed, tmp_path):
    draw = random.Random(seed)
    n, names = draw.randint(2, 6), []
    if draw.random() < 0.5:
        (tmp_path / "run").mkdir()
    barrier = threading.Barrier(n)

    def begin():
        barrier.wait()
        names.append(sinks.fresh_directory(tmp_path / "run", first="events.jsonl"))

    threads = [threading.Thread(target=begin) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*names}) == n


@SEEDS
def test_commands_print_whatever_the_terminal_takes(seed, monkeypatch):
    draw = random.Random(seed)
    encoding = draw.choice(["ascii", "cp1252", "latin-1", "cp437", "koi8-r", "gbk"])
    words = draw.choice(
        [
            ["explain", "lalr"],
            ["remedies"],
            ["presets"],
            ["explain", "entropy"],
            ["--help"],
        ]
    )
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, name, stream)
    assert command(*words) == 0
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue()


@SEEDS
def test_a_compiler_that_fails_is_one_sentence_with_its_words(
    seed, tmp_path, monkeypatch
):
    draw = random.Random(seed)
    encoding = draw.choice(["utf-8", "latin-1", "gbk", "utf-16", "shift-jis"])
    message = "x.cpp:1: error: " + draw.choice(["ung\u00fcltig", "\u9519\u8bef", "bad"])
    script = tmp_path / "compiler"
    words = tmp_path / "words"
    words.write_bytes(message.encode(encoding, "replace"))
    script.write_text(f"#!/bin/sh\ncat {words} >&2\nexit {draw.randint(1, 255)}\n")
    script.chmod(0o700)
    wrap = draw.choice(["{}", " {} ", "{} -m64", "env {}", "env A=1 {} -w"])
    monkeypatch.setenv("CXX", wrap.format(script))
    monkeypatch.setenv("QKEEL_NATIVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError):
        build.compiled()
    monkeypatch.setenv("CXX", wrap.format(tmp_path / "nothing"))
    with pytest.raises((build.BuildError, QkeelError)):
        build.compiled()
