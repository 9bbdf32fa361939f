"""The Trainer of transformers, with accelerate: DistributedDataParallel or fully_shard."""

import accelerate
import torch
import transformers
from tests.contract.processes.wrapped import batch, llama
from tests.integrations.trainers.run import BATCH, CLIP, STEPS, outcome, world
from torch import Tensor

import qkeel
from qkeel.integrations.huggingface import QkeelCallback


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The sequences of the global batches, one after the other."""

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, i):
        ids = batch(i // BATCH)[i % BATCH]
        return {"input_ids": ids, "labels": ids}


class Clip(transformers.TrainerCallback):
    """Applies the clip when the model is wrapped and its optimizer made."""

    def __init__(self, sites):
        self.sites = sites

    def on_train_begin(self, *args, model, optimizer, **kwargs):
        qkeel.apply(model, CLIP, optimizer, sites=self.sites)


def shard(trainer):
    """Accelerate shards on GPUs only, and says nothing of the plugin that it leaves out on CPUs: it is put there."""
    state = trainer.accelerator.state
    state.distributed_type = accelerate.DistributedType.FSDP
    state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        **trainer.args.fsdp_plugin_args
    )
    trainer.is_fsdp_enabled = True


def train(variant, folder):
    model = llama()
    sites = qkeel.find_sites(model, batch(0)[:1])
    several = world() > 1
    fsdp = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / variant),
        per_device_train_batch_size=BATCH // world(),
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        adam_epsilon=1e-5,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        **(fsdp if several and variant == "fsdp2" else {}),
    )
    watching = QkeelCallback(every=1)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Texts(), callbacks=[Clip(sites), watching]
    )
    if several and variant == "fsdp2":
        shard(trainer)
    trainer.train()
    is_sharded = qkeel.distributed.wrapped_by(model) == "fully_shard"
    assert is_sharded == (several and variant == "fsdp2")
    return outcome(model, watching.monitor)
