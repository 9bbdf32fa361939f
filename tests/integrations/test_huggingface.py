"""The callback watches a real Trainer, changes no bit of the training, and its numbers reach the reporters."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qkeel.errors import InvalidTypeError
from qkeel.records import RunDirectory, RunStatus

transformers = pytest.importorskip("transformers")

from qkeel.integrations.huggingface import QkeelCallback  # noqa: E402


def tiny() -> Any:
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def test_events_as_a_trainer_sends_them(tmp_path: Path) -> None:
    """Without accelerate, which the Trainer itself needs."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = QkeelCallback(every=2, sinks=tmp_path / "run")
    state = SimpleNamespace(global_step=10, log_history=[])
    told: Any = (None, state, None)
    callback.on_train_begin(*told, model=model, optimizer=optimizer)
    for step in range(4):
        model(**batch(step)).loss.backward()
        optimizer.step()
        state.global_step += 1
    logs: dict[str, Any] = {"loss": 1.0}
    state.log_history.append({**logs, "step": 14})
    callback.on_log(*told, logs=logs)
    assert logs["attn/max_logit"] == state.log_history[-1]["attn/max_logit"]
    assert set(logs) == {"loss", "attn/max_logit", "attn/entropy", "attn/query_norm", "attn/key_norm"}
    again: dict[str, Any] = {"loss": 1.0}
    callback.on_log(*told, logs=again)
    evaluated: dict[str, Any] = {"eval_loss": 1.0}
    callback.on_log(*told, logs=evaluated)
    assert set(again) == {"loss"}  # nothing new was measured
    assert set(evaluated) == {"eval_loss"}
    callback.on_train_end(*told)
    run = RunDirectory(tmp_path / "run")
    assert run.status is RunStatus.DONE
    assert [record["step"] for record in run.metrics()] == [10, 12]  # goes on counting where the training stood
    assert not model._forward_pre_hooks


def test_only_a_trainer_is_attached_to() -> None:
    with pytest.raises(InvalidTypeError, match=r"expected a transformers\.Trainer, got str"):
        QkeelCallback().attach("trainer")  # type: ignore[arg-type]


def trained(callback: QkeelCallback | None = None, *, reporter: Any = None, first: bool = True) -> Any:
    pytest.importorskip("accelerate")
    transformers.set_seed(0)
    model = tiny()
    data = [{name: v[0].tolist() for name, v in batch(seed).items()} for seed in range(24)]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    given = [reporter] if reporter is not None else []
    if callback is not None and not first:
        given.append(callback)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=given)
    if callback is not None and first:
        callback.attach(trainer)
    trainer.train()
    return trainer


class Reporter(transformers.TrainerCallback):
    """What W&B's or TensorBoard's callback would send."""

    def __init__(self) -> None:
        self.sent: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.sent.append(dict(logs))


@pytest.mark.filterwarnings("ignore")  # what transformers and accelerate warn of is theirs
def test_training_is_bit_identical_and_reporters_get_the_numbers(tmp_path: Path) -> None:
    plain = trained()
    reporter = Reporter()
    seen = trained(QkeelCallback(every=1, sinks=tmp_path / "run"), reporter=reporter)
    losses = [[h["loss"] for h in t.state.log_history if "loss" in h] for t in (plain, seen)]
    assert losses[0] == losses[1]
    a, b = plain.model.state_dict(), seen.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    training = [sent for sent in reporter.sent if "loss" in sent]
    assert len(training) == 3
    assert all("attn/max_logit" in sent for sent in training)
    assert all("attn/max_logit" in entry for entry in seen.state.log_history if "loss" in entry)
    assert [record["step"] for record in RunDirectory(tmp_path / "run").metrics()] == list(range(6))


@pytest.mark.filterwarnings("ignore")
def test_given_as_a_callback_it_comes_after_the_reporters_but_is_in_the_history() -> None:
    reporter = Reporter()
    seen = trained(QkeelCallback(every=1, per_layer=True), reporter=reporter, first=False)
    assert all("attn/max_logit" not in sent for sent in reporter.sent)
    history = [entry for entry in seen.state.log_history if "loss" in entry]
    assert all("attn/layer_01/entropy" in entry for entry in history)
