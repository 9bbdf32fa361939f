"""Files, terminals, compilers and processes as a run meets them, drawn by a seed: right, or one sentence that says what
is wrong."""

import json
import os
import pickle
import random
import sys
import threading
import warnings

import pytest
import torch
from safetensors.torch import save_file
from tests.contract.cli import scripts
from tests.contract.command import qkeel as command
from tests.training import sgd, step
from torch import nn

import qkeel
from qkeel.cli.python_program import Successors, Torchrun, parse
from qkeel.errors import QkeelError, QkeelWarning, RunDirectoryError
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


def in_child(act):
    """What `act` returns in a forked process."""
    read, write = os.pipe()
    if os.fork() == 0:
        with open(write, "wb") as file:
            pickle.dump(act(), file)
            file.flush()
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read()
    os.wait()
    return pickle.loads(answer)


def told(act):
    """What qkeel warns of while `act` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(x.message) for x in caught if issubclass(x.category, QkeelWarning)]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX forks")
@SEEDS
def test_a_forked_process_trains_with_the_remedy_and_leaves_the_records_alone(
    seed, tmp_path
):
    draw = random.Random(seed)
    remedy = draw.choice(["qk_clip:threshold=0.01", "lalr:tau=0.5", "qk_norm"])
    n_before, leaves = draw.randint(0, 2), draw.choice(["well", "badly", "not"])
    batches = torch.randn(5, 2, 5, 16, generator=torch.Generator().manual_seed(seed))

    def begun(*sinks):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        optimizer = sgd(model)
        qkeel.apply(model, remedy, optimizer)
        monitor = qkeel.watch(model, optimizer, sinks=sinks, rules=())
        for batch in batches[:n_before]:
            step(model, optimizer, batch)
            with torch.no_grad():
                model(batch)
        return model, optimizer, monitor

    def trained(model, optimizer):
        for batch in batches[n_before:]:
            step(model, optimizer, batch)
        return [p.tolist() for p in model.parameters()]

    def files():
        return {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    expected = trained(*begun()[:2])
    model, optimizer, monitor = begun(tmp_path / "run")

    def as_child():
        weights = []
        said = told(lambda: weights.extend(trained(model, optimizer)))
        if leaves != "not":
            monitor.close(complete=leaves == "well")
        return weights, said

    before = files()
    weights, said = in_child(as_child)
    assert weights == expected
    assert sum("forked from" in text for text in said) == 1
    assert files() == before
    assert trained(model, optimizer) == expected
    monitor.close()
    run = qkeel.load(tmp_path / "run")
    assert (len(run.steps), len(run.eval_steps)) == (5, n_before)


class Replaced(Exception):
    """In the place of a program that would begin."""


@SEEDS
def test_a_program_that_takes_the_place_of_a_script_is_watched_or_named(
    seed, tmp_path, monkeypatch
):
    def begin(*started):
        if not os.path.exists(started[0]):
            raise FileNotFoundError(started[0])
        raise Replaced(started)

    draw = random.Random(seed)
    watcher, left = ["watch", "--every", "3", "--"], []
    (tmp_path / "torchrun").touch(0o700)
    monkeypatch.setattr(os, "execv", begin)
    monkeypatch.setattr(os, "execve", begin)
    monkeypatch.setenv("PATH", f"{tmp_path}/none:{tmp_path}:{os.environ['PATH']}")
    arguments = draw.sample(["a b", "--x='y'", "-m", "--", "qkeel"], 3)
    script = [*draw.choice([["t.py"], ["-u", "t.py"], ["-m", "t.u"]]), *arguments]
    # Which torchrun itself takes out of the arguments.
    launched = [word for word in script[-4:] if word != "--"]
    for file, words, is_watched in [
        (sys.executable, script, True),
        ("torchrun", ["--nproc-per-node", "2", *launched], True),
        (sys.executable, ["-m", "qkeel", *watcher, "python", *script], True),
        (sys.executable, ["-O", *script], False),
        ("sh", script, False),
    ]:
        search = "p" * (os.sep not in file or draw.random() < 0.5)
        environment = [{"PATH": os.environ["PATH"]}] * (draw.random() < 0.5)
        name = f"exec{draw.choice('lv')}{search}{'e' * len(environment)}"
        given = [file, *words] if name[4] == "l" else [[file, *words]]
        with (
            Successors(watcher, left.append),
            pytest.raises(Replaced) as replaced,
        ):
            getattr(os, name)(file, *given, *environment)
        path, started, *rest = replaced.value.args[0]
        assert rest == environment
        assert [left.pop() is None] == [is_watched]
        if words[:2] == ["-m", "qkeel"] or not is_watched:
            assert [*started[1:]] == words
            continue
        assert path == started[0] == sys.executable
        at = started.index("watch")
        assert started[at : at + 4] == watcher
        meant = parse([file, *words])
        if isinstance(meant, Torchrun):
            meant = parse(["python", "-u", *meant.words[2:]])
        assert parse(started[at + 4 :]) == meant
    assert os.execv is begin
    assert not left


WORK = """
import os, sys

def work():
    torch.manual_seed(0)
    net = Net(2)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(3):
        value = loss(net, batch(step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(float(value), flush=True)

"""
ELSEWHERE = {
    "thread": """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.5), work())).start()
""",
    "executor": """
import time
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(2).submit(lambda: (time.sleep(0.5), work()))
""",
    "anew": """
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execl(sys.executable, sys.executable, *sys.argv)
work()
""",
    "anew with an environment": """
if "AGAIN" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"AGAIN": "1"})
work()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ELSEWHERE)
def test_what_trains_after_the_script_has_ended_is_watched(place, tmp_path):
    path = scripts.script(tmp_path, WORK + ELSEWHERE[place])
    words = ["python", path.name, "a b"]
    plain = scripts.run(words[1:], tmp_path)
    for i, options in enumerate(([], ["--apply", "softcap:cap=0.01"])):
        seen = scripts.watched(words, tmp_path, "--every", "1", *options)
        assert seen.returncode == plain.returncode == 0, seen.stderr
        assert len(plain.stdout.split()) == 3
        assert (seen.stdout == plain.stdout) is not bool(options)
        name = "train" if i == 0 else "train-2"
        run = qkeel.load(tmp_path / "qkeel-runs" / name)
        assert run.steps["step"].tolist() == [0, 1, 2]
        assert run.status == "done"
        assert seen.stderr.count("qkeel: watching 2 attention layers of Net") == 1
        assert "nothing was measured" not in seen.stderr
