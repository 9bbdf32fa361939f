"""Runs: what they record, that they resume to the same bits, and what is refused."""

import dataclasses
import errno
import math
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.lab.recorded import numbers, timeless
from tests.quick import one_in

from qkeel.errors import NonFiniteError, RunDirectoryError
from qkeel.lab import RunConfig, Watcher, run
from qkeel.lab.build_run import resolve, threads
from qkeel.lab.checkpoint import RunState
from qkeel.lab.run_record import PROBE_FIELDS, remembered
from qkeel.lab.train import train_step
from qkeel.records import STEP_FIELDS, TABLE_COLUMNS, RunDirectory, RunStatus, disk


def everything(directory):
    """What must not depend on how often a run was interrupted."""
    weights = safetensors.torch.load_file(directory.checkpoint)
    bits = {name: t.numpy().tobytes() for name, t in weights.items()}
    return {**numbers(directory), "weights": bits}


class Crash(BaseException):
    """As sudden as SIGKILL: nothing catches it."""


def crash_after(step, error=None):
    def on_record(record):
        if record["step"] >= step:
            raise Crash if error is None else error

    return Watcher(on_record=on_record)


def crashed(config, place, step=10):
    with pytest.raises(Crash):
        run(config, place, watcher=crash_after(step))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Everything of the tiny run that nothing interrupts."""
    return everything(run(tiny(), tmp_path_factory.mktemp("whole") / "r"))


@pytest.fixture(scope="module")
def cut(tiny, tmp_path_factory):
    """The directory of the tiny run that crashed at step 10; tests copy it."""
    place = tmp_path_factory.mktemp("cut") / "r"
    crashed(tiny(), place)
    return place


def test_a_run_directory_holds_what_the_records_say(tiny, tmp_path):
    config = tiny(eval_every=4, remedy="quack:tau=0.5")
    directory = run(config, tmp_path / "r", command="qkeel run")
    metrics, steps = directory.metrics(), [0, 2, 4, 6, 8, 10, 12]
    assert [m["step"] for m in metrics] == steps
    assert all(set(m) == set(STEP_FIELDS) for m in metrics)
    assert [m["val_loss"] is not None for m in metrics] == [s % 4 == 0 for s in steps]
    assert metrics[0]["train_loss"] is None
    assert metrics[-1]["tokens"] == 12 * 2 * 8
    heads, summary, env = directory.heads(), directory.summary(), directory.env()
    assert heads.steps.tolist() == steps
    assert set(heads.values) == set(PROBE_FIELDS)
    assert heads.values["max_logit"].shape == (7, 2, 2)
    top = max(m["max_logit"] for m in metrics)
    assert heads.values["max_logit"].max() == pytest.approx(top)
    assert list(summary) == list(TABLE_COLUMNS)
    assert (summary["remedy"], summary["max_logit"]) == ("lalr:tau=0.5", top)
    assert summary["run_id"] == RunConfig.from_dict(directory.config()).run_id
    assert (env["corpus"]["name"], env["command"]) == ("topics", "qkeel run")


TIED = {"n_heads": 4, "n_kv_heads": 2, "tied": True, "mlp": "swiglu"}
RESUMED = [
    ("adamw", "lalr:tau=0.3", {**TIED, "norm_order": "peri"}, (0, 4, 6, 12)),
    ("sgd", "sigma_reparam", {"attention": "qwen3", "norm_order": "swin"}, (6,)),
    ("muon", "qk_norm:kind=l2", {"block": "mla"}, (6,)),
    pytest.param("adamw", "qk_clip:threshold=1", TIED, (6,), marks=pytest.mark.slow),
    pytest.param("muon", "lalr:tau=0.3", TIED, (6,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("optimizer", "remedy", "model", "crashes"), RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tiny, tmp_path, optimizer, remedy, model, crashes
):
    optim = {"name": optimizer, "weight_decay": 0.01, "z_loss": 1e-4}
    config = tiny(model=model, optim=optim, remedy=remedy)
    whole = run(config, tmp_path / "whole")
    for step in crashes:
        crashed(config, tmp_path / "cut", step)
    cut = run(config, tmp_path / "cut")
    assert everything(cut) == everything(whole)
    assert any(event["event"] == "resumed" for event in cut.events())


def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint(tiny, tmp_path):
    config, answers = tiny(checkpoint_every=0), iter([False] * 4 + [True])
    watcher = Watcher(should_stop=lambda: next(answers))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut", watcher=watcher)
    steps = []
    watcher = Watcher(on_record=lambda record: steps.append(record["step"]))
    resumed = run(config, tmp_path / "cut", watcher=watcher)
    assert steps == [6, 8, 10, 12]
    assert everything(resumed) == everything(run(config, tmp_path / "whole"))


def test_a_run_whose_directory_is_moved_away_stops_at_its_next_write(
    tiny, tmp_path, whole
):
    place, away = tmp_path / "r", tmp_path / "away"

    def move(record):
        if record["step"] == 4:
            place.rename(away)

    with pytest.raises(RunDirectoryError):
        run(tiny(), place, watcher=Watcher(on_record=move))
    assert not place.exists()
    assert RunDirectory(away).status is RunStatus.STARTED
    assert everything(run(tiny(), away)) == whole


def test_a_finished_run_is_not_run_again(tiny, tmp_path):
    run(tiny(), tmp_path / "r")
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    run(tiny(checkpoint_every=3), tmp_path / "r", watcher=crash_after(0))
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


def test_a_directory_of_something_else_is_left_alone(tiny, tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(RunDirectoryError, match=r"no config\.json"):
        run(tiny(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "words"
    run(tiny(steps=2), tmp_path / "r")
    with pytest.raises(RunDirectoryError, match=r"these differ: optim\.lr, seed"):
        run(tiny(steps=2, seed=1, optim={"lr": 0.2}), tmp_path / "r")
    with pytest.raises(RunDirectoryError, match="Choose a writable directory"):
        run(tiny(), tmp_path / "thesis.tex" / "run")


@pytest.mark.parametrize(
    ("name", "words"),
    one_in(
        [
            ("last/state.safetensors", "state.safetensors differs from what was"),
            ("env.json", "env.json is not complete JSON"),
            ("metrics.jsonl", "metrics.jsonl has 40 bytes"),
            ("heads.f32", "heads.f32 has 40 bytes"),
        ],
        2,
    ),
)
def test_a_damaged_file_is_named_and_nothing_is_deleted(
    tiny, tmp_path, name, words, cut
):
    path = shutil.copytree(cut, tmp_path / "r") / name
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RunDirectoryError, match=f"{words}.*to run again"):
        run(tiny(), tmp_path / "r")
    assert path.stat().st_size == 40


def test_records_in_another_order_are_noticed_and_torn_ends_written_again(
    tiny, tmp_path, whole, cut
):
    place = shutil.copytree(cut, tmp_path / "r")
    for name in ("metrics.jsonl", "heads.f32", "events.jsonl"):
        with open(place / name, "ab") as file:
            file.write(b'{"st')
    assert everything(run(tiny(), place)) == whole
    path = shutil.copytree(cut, tmp_path / "turned") / "metrics.jsonl"
    first, second, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([second, first, *lines]))
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl lacks records"):
        run(tiny(), path.parent)


def test_a_configuration_or_checkpoint_of_another_run_is_refused_and_nothing_deleted(
    tiny, tmp_path
):
    for name, remedy in (("a", "none"), ("b", "qk_norm")):
        crashed(tiny(remedy=remedy), tmp_path / name, 6)
    for name in ("last/state.safetensors", "metrics.jsonl", "heads.f32"):
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
    with pytest.raises(RunDirectoryError, match=r"different tensors: .*q_norm"):
        run(tiny(remedy="qk_norm"), tmp_path / "b")
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"config\.json"):
        run(tiny(), tmp_path / "a")
    assert (tmp_path / "a" / "last" / "state.safetensors").exists()


def test_a_loss_that_is_not_finite_ends_the_run_as_collapsed_again_and_again(
    tiny, tmp_path
):
    wild = {"name": "sgd", "lr": 1e30, "grad_clip": 0.0, "warmup": 0.0}
    directory = run(tiny(optim=wild), tmp_path / "r")
    summary = directory.summary()
    assert directory.status is RunStatus.DONE
    assert (summary["collapsed"], summary["steps"]) == (True, 2)
    assert math.isnan(summary["val_loss"])
    assert directory.events()[-1]["event"].startswith("stopped")
    for name in ("DONE", "summary.json"):  # killed before its summary
        (tmp_path / "r" / name).unlink()
    again = run(tiny(optim=wild), tmp_path / "r").summary()
    assert str(timeless(again)) == str(timeless(summary))


def test_an_exception_in_training_is_recorded_and_the_next_attempt_goes_on(
    tiny, tmp_path, whole
):
    directory, error = RunDirectory(tmp_path / "r"), NonFiniteError("NaN in a weight")
    with pytest.raises(NonFiniteError):
        run(tiny(), directory.path, watcher=crash_after(6, error))
    assert directory.status is RunStatus.FAILED
    assert "NonFiniteError: NaN in a weight" in directory.failure()
    assert everything(run(tiny(), directory.path)) == whole
    assert not directory.failure()


def test_a_full_disk_is_one_clear_error_and_the_run_can_go_on(
    tiny,
    tmp_path,
    monkeypatch,
    whole,
):
    append, fsync = disk.append, os.fsync

    def full(path, data):
        if b'"step": 6,' in data:
            raise RunDirectoryError("No space left on device")
        append(path, data)

    def full_in_a_checkpoint(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if (
            "state.safetensors" in name
            and (tmp_path / "b" / "last/state.safetensors").exists()
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    for name, module, attribute, function in (
        ("a", disk, "append", full),
        ("b", os, "fsync", full_in_a_checkpoint),
    ):
        if name == "b" and not Path("/proc/self/fd").exists():
            continue
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, function)
            with pytest.raises(RunDirectoryError, match="No space left on device"):
                run(tiny(), tmp_path / name)
        assert not list((tmp_path / name).rglob(".state*")), "half a checkpoint"
        assert everything(run(tiny(), tmp_path / name)) == whole


def test_measuring_does_not_change_training_nor_threads(tiny, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        last = [
            run(tiny(remedy="sigma_reparam", **every), tmp_path / str(i)).metrics()[-1]
            for i, every in enumerate(
                ({"log_every": 1, "eval_every": 1}, {"log_every": 12})
            )
        ]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert timeless(last[0]) == timeless(last[1])


@pytest.mark.parametrize("remedy", ["none", "qk_norm"])
def test_the_recorded_logit_change_is_that_of_one_step(tiny, tmp_path, remedy):
    config = resolve(tiny(remedy=remedy, log_every=1, steps=2))
    records = run(config, tmp_path / "r").metrics()
    assert records[0]["logit_change"] is None
    state = RunState(config)
    with threads(config.threads):
        for step in range(2):
            before = remembered(state.model, state.probed.inputs)
            train_step(state, step)
            after = remembered(state.model, state.probed.inputs)
            squares = []
            for pair in zip(before, after):
                old, new = (
                    c.spec.logits(c.q, c.k, c.pos_q, c.pos_k, c.params) for c in pair
                )
                visible = torch.ones(old.shape[-2:], dtype=torch.bool).tril()
                squares.append((new - old).double()[..., visible].square().mean())
            change = float(torch.stack(squares).mean().sqrt())
            assert records[step + 1]["logit_change"] == pytest.approx(change, rel=1e-4)


def test_a_batch_in_parts_has_the_gradient_of_the_whole(tiny):
    config = tiny(data={"batch": 6}, dtype="fp32")
    both = [RunState(config), RunState(dataclasses.replace(config, accumulate=3))]
    for step in range(2):
        (loss, norm), (other, other_norm) = (train_step(state, step) for state in both)
        assert float(other) == pytest.approx(float(loss), rel=1e-5)
        assert float(other_norm) == pytest.approx(float(norm), rel=1e-4)


def test_the_position_of_a_run_gets_its_training_length(tiny):
    model = RunState(tiny(model={"n_layers": 3, "position": "hwfa"})).model
    reaches = [block.attention.spec.position.reach for block in model.blocks]
    assert reaches == [3, 3, None]
