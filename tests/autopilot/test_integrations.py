"""The callback of the Trainer with an autopilot, in a Trainer."""

import pytest
import torch
from tests.drawing import randint

from qkeel.errors import QkeelWarning

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
