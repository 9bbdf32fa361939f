"""The callback watches a real Trainer and changes no bit of it; every reporter gets each number at its step."""

from __future__ import annotations

import ast
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qkeel import apply, load
from qkeel.errors import (
    InvalidValueError,
    QkeelWarning,
    UnknownNameError,
)
from qkeel.monitor import LogSpaced

transformers = pytest.importorskip("transformers")

from qkeel.integrations.huggingface import QkeelCallback  # noqa: E402


def tiny() -> Any:
    shape = {
        "vocab_size": 64,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    )


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def recorded(path: Path) -> dict[int, float]:
    """The largest logit by step, as the run directory has it."""
    steps = load(path).steps
    return dict(zip(steps["step"].tolist(), steps["max_logit"].tolist()))


def test_events_without_a_trainer(tmp_path: Path) -> None:
    """Without accelerate, which the Trainer itself needs: no reporter is in reach, and that is said."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = QkeelCallback(every=2, sinks=tmp_path / "run")
    state = SimpleNamespace(global_step=10, max_steps=16, log_history=[])
    event: Any = (None, state, SimpleNamespace(should_training_stop=False))
    with pytest.warns(
        QkeelWarning, match=r"no transformers\.Trainer calls this callback"
    ):
        callback.on_train_begin(*event, model=model, optimizer=optimizer)
    for step in range(6):
        callback.on_step_begin(*event)
        model(**batch(step)).loss.backward()
        optimizer.step()
        state.global_step += 1
        callback.on_step_end(*event)
    assert [entry["step"] for entry in state.log_history] == [
        10,
        12,
        14,
        15,
    ]  # goes on counting; the last one too
    whole = {"attn/max_logit", "attn/entropy", "attn/query_norm", "attn/key_norm"}
    layers = {
        name.replace("attn/", f"attn/layer_0{i}/") for name in whole for i in range(2)
    }
    assert {"step", *whole, *layers} <= set(state.log_history[0])
    callback.on_train_end(*event)
    assert load(tmp_path / "run").status == "done"
    assert list(recorded(tmp_path / "run")) == [10, 12, 14, 15]
    assert not model._forward_pre_hooks


class Reporter(transformers.TrainerCallback):
    """Keeps what W&B's or MLflow's callback would send."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, float]]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        self.sent.append((state.global_step, dict(logs)))

    @property
    def logits(self) -> dict[int, float]:
        return {
            step: logs["attn/max_logit"]
            for step, logs in self.sent
            if "attn/max_logit" in logs
        }


def trained(
    *callbacks: Any, folder: Path | None = None, resume: bool = False, **options: Any
) -> Any:
    pytest.importorskip("accelerate")
    transformers.set_seed(0)
    data = [
        {name: v[0].tolist() for name, v in batch(seed).items()} for seed in range(24)
    ]
    more = {
        name: options.pop(name)
        for name in ("eval_dataset", "optimizers", "compute_loss_func")
        if name in options
    }
    given = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        **options,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder or tempfile.mkdtemp()), per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True,
        **given,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=tiny(),
        args=arguments,
        train_dataset=data,
        callbacks=list(callbacks),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.filterwarnings(
    "ignore"
)  # what transformers and accelerate warn of is theirs
def test_training_is_bit_identical_and_its_logs_are_what_they_were(
    tmp_path: Path,
) -> None:
    plain, seen = (
        trained(logging_steps=2),
        trained(QkeelCallback(every=1), logging_steps=2),
    )
    losses = [
        [(h["step"], h["loss"]) for h in t.state.log_history if "loss" in h]
        for t in (plain, seen)
    ]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    a, b = plain.model.state_dict(), seen.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.filterwarnings("ignore")
def test_every_reporter_gets_each_number_at_its_step(tmp_path: Path) -> None:
    """Whatever the cadence, the Trainer's own logs and the order of the callbacks; the last step is measured."""
    cadences: list[tuple[Any, list[int], dict[str, Any]]] = [
        (50, [0, 5], {}),
        (1, [0, 1, 2, 3, 4, 5], {"logging_steps": 2, "gradient_accumulation_steps": 1}),
        (4, [0, 4, 5], {"logging_steps": 3, "logging_first_step": True}),
        (LogSpaced(per_decade=3), [0, 1, 2, 5], {"logging_strategy": "no"}),
    ]
    for i, (every, steps, options) in enumerate(cadences):
        before, after, run = Reporter(), Reporter(), tmp_path / f"run{i}"
        seen = trained(
            before,
            QkeelCallback(every=every, sinks=run, per_layer=i == 1),
            after,
            **options,
        )
        assert list(recorded(run)) == steps, every
        history = {
            h["step"]: h["attn/max_logit"]
            for h in seen.state.log_history
            if "attn/max_logit" in h
        }
        for tool in (before.logits, after.logits, history):
            assert tool == pytest.approx(recorded(run)), every
        assert ("attn/layer_01/entropy" in before.sent[0][1]) == (i == 1)


@pytest.mark.filterwarnings("ignore")
def test_the_loss_is_that_of_the_trainer_and_evaluations_are_sent() -> None:
    reporter, callback = Reporter(), QkeelCallback(every=1)
    data = [
        {name: v[0].tolist() for name, v in batch(seed).items()} for seed in range(4)
    ]
    options = {
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 4,
    }
    trainer = trained(reporter, callback, eval_dataset=data, **options)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert callback.monitor is not None
    assert callback.monitor.history.values["train_loss"].tolist() == pytest.approx(
        losses, rel=1e-3
    )
    assert any("eval_attn/max_logit" in logs for _, logs in reporter.sent)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_the_trainer_computes_itself_is_recorded(accumulation: int) -> None:
    """As DPO's, which uses the logits of a pass whose own loss nobody trains."""

    def shifted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs["logits"].square().mean() + 7

    callback = QkeelCallback(every=1)
    trainer = trained(
        callback,
        compute_loss_func=shifted,
        logging_steps=1,
        max_steps=3,
        gradient_accumulation_steps=accumulation,
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert callback.monitor is not None
    assert callback.monitor.history.values["train_loss"].tolist() == pytest.approx(
        losses, rel=1e-3
    )


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_watched_does_not_stop_the_training() -> None:
    """As with optimizers that step layer by layer in backward, where the Trainer's own is a dummy."""
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(QkeelWarning, match="training goes on without it"):
        trainer = trained(
            QkeelCallback(),
            optimizers=(foreign, torch.optim.lr_scheduler.ConstantLR(foreign)),
        )
    assert trainer.state.global_step == 6


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_prints_two_numbers_of_a_sample_and_sends_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = Reporter()
    trained(reporter, QkeelCallback(every=5), logging_strategy="no")
    printed = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "attn/max_logit" in line
    ]
    assert len(printed) == 2  # steps 0 and 5
    assert all(
        sorted(ast.literal_eval(line)) == ["attn/entropy", "attn/max_logit"]
        for line in printed
    )
    assert "attn/layer_01/max_logit" in reporter.sent[0][1]


class Stopper(transformers.TrainerCallback):
    """Stops before the planned end, as on a lack of progress."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 5


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_another_callback_stops_is_recorded_up_to_there(
    tmp_path: Path,
) -> None:
    stopped = trained(Stopper(), max_steps=8)
    for i, order in enumerate([(Stopper(),), ()]):
        reporter, run = Reporter(), tmp_path / f"run{i}"
        later = [] if order else [Stopper()]
        seen = trained(
            *order, QkeelCallback(every=3, sinks=run), *later, reporter, max_steps=8
        )
        assert list(recorded(run)) == [0, 3]
        assert reporter.logits == pytest.approx(recorded(run))
        a, b = stopped.model.state_dict(), seen.model.state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)


CLIP = "qk_clip:threshold=0.02,steps=matched"


class AppliedByHand(transformers.TrainerCallback):
    """The recipe without the argument: it sees the Trainer's own optimizer in an event."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self.handle = apply(kwargs["model"], CLIP, kwargs["optimizer"])


@pytest.mark.filterwarnings("ignore")
def test_a_remedy_acts_on_the_optimizer_that_the_trainer_makes(tmp_path: Path) -> None:
    options = {"learning_rate": 0.05, "weight_decay": 0.1, "max_steps": 8}
    callback = QkeelCallback(remedy=CLIP)
    clipped, by_hand = trained(callback, **options), trained(AppliedByHand(), **options)
    plain = trained(**options)
    a, b, c = (x.model.state_dict() for x in (clipped, by_hand, plain))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    assert callback.handle is not None
    assert callback.handle.active  # after the training, too
    groups = [
        [(group["weight_decay"], len(group["params"])) for group in x.param_groups]
        for x in (clipped.optimizer, plain.optimizer)
    ]
    assert groups[0] == groups[1]
    # A training that was stopped and resumed ends at the same bits.
    saved = {"save_strategy": "steps", "save_steps": 4, "folder": tmp_path / "out"}
    options |= saved | {"lr_scheduler_type": "constant"}
    whole = trained(QkeelCallback(remedy=CLIP), **options)
    shutil.rmtree(tmp_path / "out" / "checkpoint-8")
    resumed = trained(QkeelCallback(remedy=CLIP), resume=True, **options)
    a, b = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.filterwarnings("ignore")
def test_a_remedy_that_the_callback_cannot_take_is_refused_at_once() -> None:
    with pytest.raises(UnknownNameError):
        QkeelCallback(remedy="qk_clap")
    with pytest.raises(InvalidValueError, match=r"before the Trainer is made.*qk_norm"):
        QkeelCallback(remedy="lalr+qk_norm")
    with pytest.raises(InvalidValueError, match="either remedy or autopilot"):
        QkeelCallback(remedy="lalr", autopilot=True)


@pytest.mark.filterwarnings("ignore")
def test_a_second_training_goes_on_with_the_remedy() -> None:
    callback = QkeelCallback(remedy=CLIP)
    trainer = trained(callback, learning_rate=0.05)
    handle = callback.handle
    trainer.train()
    assert callback.handle is handle or not handle.active
    assert callback.handle.active


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_training_goes_on_at_its_steps(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "folder": tmp_path / "out"}
    trained(QkeelCallback(every=3, sinks=tmp_path / "a"), max_steps=4, **options)
    reporter = Reporter()
    trained(
        reporter,
        QkeelCallback(every=3, sinks=tmp_path / "b"),
        max_steps=8,
        resume=True,
        **options,
    )
    assert list(recorded(tmp_path / "a")) == [0, 3]
    assert list(recorded(tmp_path / "b")) == [6, 7]
    assert reporter.logits == pytest.approx(recorded(tmp_path / "b"))


@pytest.mark.filterwarnings("ignore")
def test_the_event_files_of_tensorboard_have_each_number_at_its_step(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from .stored import tensorboard_scalars

    trained(
        QkeelCallback(every=4, sinks=tmp_path / "run"),
        report_to=["tensorboard"],
        folder=tmp_path / "out",
    )
    found = tensorboard_scalars(tmp_path / "out", "train/attn/max_logit")
    assert list(found) == [0, 4, 5]
    assert found == pytest.approx(recorded(tmp_path / "run"), rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_what_wandb_and_mlflow_store_of_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, mlflow = pytest.importorskip("wandb"), pytest.importorskip("mlflow")
    from .stored import wandb_rows

    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    trained(
        QkeelCallback(every=4, sinks=tmp_path / "run"),
        report_to=["wandb", "mlflow"],
        logging_steps=4,
    )
    wandb.finish()
    wandb.teardown()
    expected = recorded(tmp_path / "run")
    rows = [row for row in wandb_rows(tmp_path) if "train/attn/max_logit" in row]
    assert {
        row["train/global_step"]: row["train/attn/max_logit"] for row in rows
    } == pytest.approx(expected)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "attn/max_logit")
    assert {entry.step: entry.value for entry in history} == pytest.approx(expected)
