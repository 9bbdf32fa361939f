"""The callback of the Trainer with an autopilot, by the events that a Trainer sends and in a Trainer."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.drawing import randint
from tests.training import adamw

from qkeel.errors import QkeelWarning, UnknownNameError

transformers = pytest.importorskip("transformers")

from qkeel.integrations.huggingface import QkeelCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    f"ignore::{QkeelWarning.__module__}.{QkeelWarning.__name__}"
)
DATA = [randint(0, 64, (8,), seed=i) for i in range(40)]


def collated(examples):
    ids = torch.stack(examples)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def tiny():
    torch.manual_seed(0)
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


def begun(step, model, optimizer):
    """A callback at the beginning of training, and the events' arguments."""
    callback = QkeelCallback(every=1, autopilot="ladder:threshold=2,patience=1")
    event = (None, SimpleNamespace(global_step=step, log_history=[]), None)
    callback.on_train_begin(*event, model=model, optimizer=optimizer)
    return callback, event


def trained(model, optimizer, first, last):
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        loss = model(**collated(DATA[2 * step : 2 * step + 2])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_training_resumed_from_a_checkpoint_goes_on_with_what_was_in_force():
    with pytest.raises(UnknownNameError):
        QkeelCallback(autopilot="lader")
    model = tiny()
    optimizer = adamw(model, 0.3)
    callback, event = begun(0, model, optimizer)
    trained(model, optimizer, 0, 12)
    assert callback.pilot.remedies.handles
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    whole = trained(model, optimizer, 12, 16)
    callback.on_train_end(*event)
    assert not optimizer._optimizer_step_post_hooks
    model = tiny()
    optimizer = adamw(model, 0.3)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    resumed, _ = begun(12, model, optimizer)
    assert trained(model, optimizer, 12, 16) == whole
    assert resumed.pilot.decisions == callback.pilot.decisions


def test_a_trainer_resumes_what_was_in_force(tmp_path):
    """Its checkpoint is read before the callback makes the autopilot."""

    def finished(resumes, seed):
        torch.manual_seed(seed)
        model = tiny() if not resumes else transformers.GPT2LMHeadModel(tiny().config)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=14,
            save_steps=10,
            lr_scheduler_type="constant",
            learning_rate=0.3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        callback = QkeelCallback(every=1, autopilot="ladder:threshold=2,patience=1")
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=DATA,
            data_collator=collated,
            callbacks=[callback],
        )
        kept = Kept(callback)
        trainer.add_callback(kept)
        trainer.train(str(tmp_path / "checkpoint-10") if resumes else None)
        return model.state_dict(), kept.decisions

    whole, decisions = finished(False, 0)
    resumed, decisions_again = finished(True, 1)
    assert any(d.remedy for d in decisions)
    assert decisions_again == decisions
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class Kept(transformers.TrainerCallback):
    """Keeps an autopilot's decisions, which go with it when training ends."""

    def __init__(self, callback):
        self.callback, self.decisions = callback, []

    def on_step_end(self, *_, **__):
        self.decisions = list(self.callback.pilot.decisions)
