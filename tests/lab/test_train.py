from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.lab.recorded import numbers, timeless
from tests.quick import one_in

from qkeel.errors import (
    DataError,
    InvalidValueError,
    NonFiniteError,
    RefusedError,
    RunDirectoryError,
    UnknownNameError,
)
from qkeel.lab import ModelConfig, RunConfig, Watcher, run
from qkeel.lab.build_run import resolve, threads
from qkeel.lab.checkpoint import RunState
from qkeel.lab.run_record import PROBE_FIELDS, remembered
from qkeel.lab.train import train_step
from qkeel.records import STEP_FIELDS, TABLE_COLUMNS, RunDirectory, RunStatus, disk

Make = Callable[..., RunConfig]


def everything(directory: RunDirectory) -> dict[str, Any]:
    """What must not depend on how often a run was interrupted."""
    weights = safetensors.torch.load_file(directory.checkpoint)
    return {
        **numbers(directory),
        "weights": {name: t.numpy().tobytes() for name, t in weights.items()},
    }


class Crash(BaseException):
    """As sudden as SIGKILL: nothing catches it."""


def crash_after(step: int) -> Watcher:
    def on_record(record: Mapping[str, Any]) -> None:
        if record["step"] >= step:
            raise Crash

    return Watcher(on_record=on_record)


def test_a_run_directory_holds_what_the_records_say(tiny: Make, tmp_path: Path) -> None:
    directory = run(
        tiny(eval_every=4, remedy="quack:tau=0.5"), tmp_path / "r", command="qkeel run"
    )
    assert directory.status is RunStatus.DONE
    metrics = directory.metrics()
    assert [m["step"] for m in metrics] == [0, 2, 4, 6, 8, 10, 12]
    assert all(set(m) == set(STEP_FIELDS) for m in metrics)
    assert [m["val_loss"] is not None for m in metrics] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert metrics[0]["train_loss"] is None
    assert metrics[-1]["tokens"] == 12 * 2 * 8
    heads = directory.heads()
    assert heads.steps.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert set(heads.values) == set(PROBE_FIELDS)
    assert heads.values["max_logit"].shape == (7, 2, 2)
    assert heads.values["max_logit"].max() == pytest.approx(
        max(m["max_logit"] for m in metrics)
    )
    summary = directory.summary()
    assert list(summary) == list(TABLE_COLUMNS)
    assert summary["remedy"] == "lalr:tau=0.5"
    assert summary["max_logit"] == max(m["max_logit"] for m in metrics)
    assert summary["run_id"] == RunConfig.from_dict(directory.config()).run_id
    env = directory.env()
    assert env["corpus"]["name"] == "topics"
    assert env["corpus"]["vocab_size"] == 256
    assert env["command"] == "qkeel run"
    assert env["formula"].startswith("lalr: each step, per head h: lr(W_Q^h) = 0.5 · η")
    assert "softmax" in env["formula"]
    assert "2511.21377" in env["remedy_source"]


STATES = (
    "lalr:tau=0.3",
    "sigma_reparam",
    "qk_norm:kind=l2,gain=scalar",
    "qk_clip:threshold=1",
)


MODELS = (
    ModelConfig(
        d_model=16, n_heads=4, n_kv_heads=2, tied=True, mlp="swiglu", norm_order="peri"
    ),
    ModelConfig(d_model=16, n_heads=2, attention="qwen3", norm_order="swin"),
    ModelConfig(d_model=16, n_heads=2, block="mla"),
)
RESUMED = [
    *zip(
        ("adamw", "sgd", "muon"),
        ("lalr:tau=0.3", "sigma_reparam", "qk_norm:kind=l2"),
        MODELS,
    ),
    *(
        pytest.param(optimizer, remedy, MODELS[0], marks=pytest.mark.slow)
        for optimizer, remedy in itertools.product(("adamw", "sgd", "muon"), STATES)
    ),
]


@pytest.mark.parametrize(("optimizer", "remedy", "model"), RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tiny: Make, tmp_path: Path, optimizer: str, remedy: str, model: ModelConfig
) -> None:
    how = {"model": model, "optim_name": optimizer, "remedy": remedy}
    config = tiny(**how, optim_weight_decay=0.01, optim_z_loss=1e-4)
    whole = run(config, tmp_path / "whole")
    for step in (0, 4, 6, 12):
        with pytest.raises(Crash):
            run(config, tmp_path / "cut", watcher=crash_after(step))
    assert everything(run(config, tmp_path / "cut")) == everything(whole)
    assert any(
        event["event"] == "resumed" for event in RunDirectory(tmp_path / "cut").events()
    )


def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint(
    tiny: Make, tmp_path: Path
) -> None:
    config = tiny(checkpoint_every=0)
    whole = run(config, tmp_path / "whole")
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 5

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut", watcher=Watcher(should_stop=should_stop))
    steps: list[int] = []
    resumed = run(
        config,
        tmp_path / "cut",
        watcher=Watcher(on_record=lambda record: steps.append(record["step"])),
    )
    assert steps == [6, 8, 10, 12]
    assert everything(resumed) == everything(whole)


@pytest.mark.parametrize("checkpoint_every", [1, 100])
def test_a_run_whose_directory_is_moved_away_stops_at_its_next_write(
    tiny: Make, tmp_path: Path, checkpoint_every: int
) -> None:
    config, steps = tiny(checkpoint_every=checkpoint_every), []

    def move(record: Mapping[str, Any]) -> None:
        steps.append(record["step"])
        if record["step"] == 4:
            (tmp_path / "r").rename(tmp_path / "away")

    missing = os.strerror(errno.ENOENT)
    with pytest.raises(
        RunDirectoryError,
        match=rf"cannot (create|append to|write) .*/r/.*(does not exist|{missing})",
    ):
        run(config, tmp_path / "r", watcher=Watcher(on_record=move))
    assert steps == [0, 2, 4]
    assert not (tmp_path / "r").exists()
    assert RunDirectory(tmp_path / "away").status is RunStatus.STARTED
    assert everything(run(config, tmp_path / "away")) == everything(
        run(config, tmp_path / "whole")
    )


def test_a_finished_run_is_not_run_again(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "r")
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    records: list[object] = []
    run(
        tiny(checkpoint_every=3),
        tmp_path / "r",
        watcher=Watcher(on_record=records.append),
    )
    assert not records
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


def test_a_run_leaves_the_number_of_threads_as_it_was(
    tiny: Make, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(tiny(steps=1), tmp_path / "r")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_run_id_names_the_directory_of_one_configuration_only(
    tiny: Make, tmp_path: Path
) -> None:
    run(tiny(), tmp_path / "r")
    with pytest.raises(
        RunDirectoryError,
        match=r"a different configuration \(these differ: optim.lr, seed\)",
    ):
        run(tiny(seed=1, optim_lr=0.2), tmp_path / "r")


def test_a_directory_that_is_no_run_is_left_alone(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(RunDirectoryError, match=r"not empty and has no config.json"):
        run(tiny(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "words"


def test_what_a_killed_process_left_half_written_is_cleared_away(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def killed(*args: object) -> None:
        raise Crash

    # Killed in the rename, and no clean-up: as SIGKILL leaves it.
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        patch.setattr(os, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(Crash):
            run(tiny(), tmp_path / "r")
    assert list((tmp_path / "r").glob(".config.json.*"))
    run(tiny(), tmp_path / "r")
    assert not list((tmp_path / "r").rglob(".*"))


def test_two_processes_cannot_have_one_directory(tiny: Make, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    with (
        directory.lock(),
        pytest.raises(RunDirectoryError, match="in use by another process"),
    ):
        run(tiny(), directory.path)


def test_a_corpus_that_changed_is_noticed(tiny: Make, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 20)
    config = tiny(data=type(tiny().data)(source=str(text), context=8, batch=2))
    with pytest.raises(Crash):
        run(config, tmp_path / "r", watcher=crash_after(6))
    text.write_bytes(bytes(range(32, 127)) * 21)
    with pytest.raises(RunDirectoryError, match="corpus SHA-256: "):
        run(config, tmp_path / "r")


def torn(config: RunConfig, place: Path, name: str, keep: int) -> None:
    with pytest.raises(Crash):
        run(config, place, watcher=crash_after(10))
    path = place / name
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(
    ("name", "place"),
    one_in(
        [
            ("env.json", "env.json is not complete JSON"),
            (
                "last/state.safetensors",
                "state.safetensors differs from what was written",
            ),
            ("metrics.jsonl", "metrics.jsonl has 40 bytes"),
            ("heads.f32", "heads.f32 has 40 bytes"),
        ],
        2,
    ),
)
def test_a_torn_file_is_named_and_the_run_starts_again(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, place: str
) -> None:
    torn(tiny(), tmp_path / "r", name, 40)
    assert everything(run(tiny(), tmp_path / "r")) == everything(
        run(tiny(), tmp_path / "whole")
    )
    assert place in caplog.text
    assert "The run starts again" in caplog.text


def test_a_torn_configuration_is_named_and_nothing_is_deleted(
    tiny: Make, tmp_path: Path
) -> None:
    torn(tiny(), tmp_path / "r", "config.json", 40)
    with pytest.raises(RunDirectoryError, match=r"config\.json"):
        run(tiny(), tmp_path / "r")
    assert (tmp_path / "r" / "last" / "state.safetensors").exists()


def test_a_torn_last_line_is_written_again(tiny: Make, tmp_path: Path) -> None:
    whole = run(tiny(), tmp_path / "whole")
    with pytest.raises(Crash):
        run(tiny(), tmp_path / "r", watcher=crash_after(10))
    for name in ("metrics.jsonl", "heads.f32", "events.jsonl"):
        with open(tmp_path / "r" / name, "ab") as file:
            file.write(b'{"st')
    assert everything(run(tiny(), tmp_path / "r")) == everything(whole)


def test_a_checkpoint_of_another_model_is_refused(tiny: Make, tmp_path: Path) -> None:
    for place, remedy in (("a", "none"), ("b", "qk_norm")):
        with pytest.raises(Crash):
            run(tiny(remedy=remedy), tmp_path / place, watcher=crash_after(6))
    for file in ("last/state.safetensors", "metrics.jsonl", "heads.f32"):
        (tmp_path / "b" / file).write_bytes((tmp_path / "a" / file).read_bytes())
    with pytest.raises(
        RunDirectoryError,
        match=r"not a complete checkpoint of this run \(different tensors: .*q_norm",
    ):
        run(tiny(remedy="qk_norm"), tmp_path / "b")


def test_bad_configurations_fail_before_anything_is_written(
    tiny: Make, tmp_path: Path
) -> None:
    bad: list[tuple[RunConfig, type[Exception], str]] = [
        (tiny(remedy="qknorm"), UnknownNameError, "Did you mean 'qk_norm'"),
        (tiny(remedy="lalr:tua=0.1"), UnknownNameError, "Did you mean 'tau'"),
        (tiny(remedy="qk_norm+lalr"), RefusedError, "lalr at"),
        (
            tiny(model=ModelConfig(attention="gemma22")),
            UnknownNameError,
            "Did you mean 'gemma2'",
        ),
        (tiny(model=ModelConfig(d_model=12, n_heads=4)), InvalidValueError, "even"),
        (tiny(model=ModelConfig(attention="kna+qna")), InvalidValueError, "one preset"),
        (
            tiny(device="cuda:99"),
            InvalidValueError,
            "expected a device of this machine",
        ),
        (tiny(data=type(tiny().data)(source="nowhere.txt")), DataError, "no such file"),
    ]
    for config, kind, message in bad:
        with pytest.raises(kind, match=message):
            run(config, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_loss_that_is_not_finite_ends_the_run_as_collapsed(
    tiny: Make, tmp_path: Path
) -> None:
    config = tiny(
        optim_name="sgd", optim_lr=1e30, optim_grad_clip=0.0, optim_warmup=0.0
    )
    directory = run(config, tmp_path / "r")
    assert directory.status is RunStatus.DONE
    summary = directory.summary()
    assert summary["collapsed"] is True
    assert math.isnan(summary["val_loss"])
    assert summary["steps"] == 2
    assert directory.events()[-1]["event"].startswith("stopped")


def test_a_run_that_stopped_and_was_killed_before_its_summary_stops_again(
    tiny: Make, tmp_path: Path
) -> None:
    config = tiny(
        optim_name="sgd", optim_lr=1e30, optim_grad_clip=0.0, optim_warmup=0.0
    )
    whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "cut")
    for name in ("DONE", "summary.json"):
        (tmp_path / "cut" / name).unlink()
    again = run(config, tmp_path / "cut")
    assert str(timeless(again.summary())) == str(timeless(whole.summary()))


def test_an_exception_in_training_is_recorded_and_the_next_attempt_goes_on(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(record: Mapping[str, Any]) -> None:
        if record["step"] == 6:
            raise NonFiniteError("NaN in the weights")

    with pytest.raises(NonFiniteError):
        run(tiny(), tmp_path / "r", watcher=Watcher(on_record=broken))
    directory = RunDirectory(tmp_path / "r")
    assert directory.status is RunStatus.FAILED
    assert "NonFiniteError: NaN in the weights" in directory.failure()
    assert everything(run(tiny(), tmp_path / "r")) == everything(
        run(tiny(), tmp_path / "whole")
    )
    assert not directory.failure()


def test_a_full_disk_is_one_clear_error_and_the_run_can_go_on(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = disk.append

    def full(path: Path, data: bytes) -> None:
        if b'"step": 6,' in data:
            raise RunDirectoryError(
                "No space left on device; run the same command again to continue."
            )
        append(path, data)

    monkeypatch.setattr(disk, "append", full)
    with pytest.raises(
        RunDirectoryError, match=r"No space left on device.*run the same command again"
    ):
        run(tiny(), tmp_path / "r")
    monkeypatch.undo()
    assert everything(run(tiny(), tmp_path / "r")) == everything(
        run(tiny(), tmp_path / "whole")
    )


def test_a_disk_that_fills_up_in_a_checkpoint_keeps_the_one_before(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(1)
        if (
            os.readlink(f"/proc/self/fd/{descriptor}").find("state.safetensors") >= 0
            and len(calls) > 4
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        run(tiny(), tmp_path / "r")
    monkeypatch.undo()
    assert not list((tmp_path / "r" / "last").glob(".state*")), (
        "half a checkpoint was left behind"
    )
    assert everything(run(tiny(), tmp_path / "r")) == everything(
        run(tiny(), tmp_path / "whole")
    )


def test_a_directory_that_cannot_be_written_is_one_clear_error(
    tiny: Make, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        RunDirectoryError, match=r"cannot create .*Choose a writable directory"
    ):
        run(tiny(), tmp_path / "file" / "run")


def test_measuring_does_not_change_training(tiny: Make, tmp_path: Path) -> None:
    often, seldom = (
        tiny(log_every=1, eval_every=1, remedy="sigma_reparam"),
        tiny(log_every=12, remedy="sigma_reparam"),
    )
    last = [run(c, tmp_path / c.run_id).metrics()[-1] for c in (often, seldom)]
    assert timeless(last[0]) == timeless(last[1])


def test_a_run_may_be_steered_by_an_autopilot(tiny: Make, tmp_path: Path) -> None:
    directory = run(tiny(remedy="autopilot", steps=20, optim_lr=0.3), tmp_path / "r")
    assert directory.status is RunStatus.DONE
    assert directory.config()["remedy"] == "autopilot"


def test_environment_names_no_folder(tiny: Make, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_bytes(bytes(range(32, 127)) * 20)
    directory = run(
        tiny(data=type(tiny().data)(source=str(text), context=8, batch=2)),
        tmp_path / "r",
    )
    assert str(tmp_path) not in (tmp_path / "r" / "env.json").read_text()
    assert directory.env()["corpus"]["name"] == "notes.txt"


def test_records_before_the_checkpoint_must_be_whole(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = everything(run(tiny(), tmp_path / "whole"))

    def go_on(change: Callable[[list[bytes]], list[bytes]], said: str) -> None:
        place = tmp_path / said.replace(" ", "-")
        with pytest.raises(Crash):
            run(tiny(), place, watcher=crash_after(10))
        path = place / "metrics.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
        assert everything(run(tiny(), place)) == whole
        assert said in caplog.text

    go_on(
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        "metrics.jsonl lacks records",
    )


@pytest.mark.parametrize("remedy", ["none", "qk_norm"])
def test_the_recorded_logit_change_is_that_of_one_step(
    tiny: Make, tmp_path: Path, remedy: str
) -> None:
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
                )  # type: ignore[union-attr]
                seen = torch.ones(old.shape[-2:], dtype=torch.bool).tril()
                squares.append((new - old).double()[..., seen].square().mean())
            expected = float(torch.stack(squares).mean().sqrt())
            assert expected > 0
            assert records[step + 1]["logit_change"] == pytest.approx(
                expected, rel=1e-4
            )
