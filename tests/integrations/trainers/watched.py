"""One training by a trainer of others, watched or plain: python -m tests.integrations.trainers.watched CASE FOLDER [watch]

The losses of all steps and the weights at the end are written to FOLDER, with what the monitor recorded.
"""

import pickle
import sys
from pathlib import Path

import torch
from tests.attention import values
from tests.drawing import randint
from tests.training import adamw
from torch import nn

import qkeel

STEPS = 3


def llama(**changes):
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | changes))


def stored(folder):
    """The path of the model, from which a trainer loads its reference too."""
    llama().save_pretrained(folder / "model")
    return str(folder / "model")


def tokenizer():
    """Words w3 … w63, made here: nothing is downloaded."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 64)}
    model = tokenizers.models.WordLevel(words, unk_token="w3")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def words(generator, n):
    ids = torch.randint(3, 64, (n,), generator=generator)
    return " ".join(f"w{int(i)}" for i in ids)


def texts(*columns, n=12):
    """A data set of random words; a column "label" is true for every second row."""
    import datasets

    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            column: i % 2 == 0 if column == "label" else words(generator, 4 + i % 3)
            for column in columns
        }
        for i in range(n)
    ]
    return datasets.Dataset.from_list(rows)


def arguments(folder, **more):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    } | more


def finished(trainer, watches):
    """Trains, with the callback if `watches`."""
    callback = None
    if watches:
        from qkeel.integrations.huggingface import QkeelCallback

        callback = QkeelCallback(every=1)
        trainer.add_callback(callback)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    monitor = None if callback is None else callback.monitor
    return losses, trainer.model, monitor


def sft(folder, watches):
    import trl

    trainer = trl.SFTTrainer(
        llama(),
        args=trl.SFTConfig(**arguments(folder, max_length=16)),
        train_dataset=texts("text"),
        processing_class=tokenizer(),
    )
    return finished(trainer, watches)


def dpo(folder, watches):
    import trl

    trainer = trl.DPOTrainer(
        stored(folder),
        args=trl.DPOConfig(**arguments(folder, max_length=32)),
        train_dataset=texts("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
    )
    return finished(trainer, watches)


def kto(folder, watches):
    import trl

    trainer = trl.KTOTrainer(
        stored(folder),
        args=trl.KTOConfig(**arguments(folder, max_length=32)),
        train_dataset=texts("prompt", "completion", "label"),
        processing_class=tokenizer(),
    )
    return finished(trainer, watches)


def grpo(folder, watches):
    import trl

    def reward(completions, **_):
        return [float(len(set(text.split()))) for text in completions]

    more = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    trainer = trl.GRPOTrainer(
        stored(folder),
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments(folder, **more)),
        train_dataset=texts("prompt"),
        processing_class=tokenizer(),
    )
    return finished(trainer, watches)


class Int8Linear(nn.Module):
    """A frozen linear layer of 8-bit numbers with a scale for each row, as QLoRA's libraries store it."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (linear.weight.detach() / scale).round().to(torch.int8)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scale", scale)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return nn.functional.linear(x, self.numbers.to(x.dtype) * self.scale)


class Adapter(nn.Module):
    """A low-rank adapter beside a frozen layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def qlora(folder, watches):
    import transformers

    model = llama()
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            base = Int8Linear(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, Adapter(base))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    ids = randint(3, 64, (2 * STEPS, 12), seed=1)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments(folder)),
        train_dataset=rows,
    )
    return finished(trainer, watches)


def loop(
    model,
    optimizer,
    loss_of,
    watches,
    watched=None,
    backward=lambda loss: loss.backward(),
):
    monitor = qkeel.watch(watched or model, optimizer) if watches else None
    losses = []
    for step in range(STEPS):
        loss = loss_of(step)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    return losses, model, monitor


def batches():
    return randint(3, 64, (STEPS, 2, 12), seed=1)


def nnsight(folder, watches):
    import nnsight

    inner, ids = llama(), batches()
    model = nnsight.NNsight(inner)
    optimizer = adamw(inner, 0.01)
    saved = []

    def loss_of(step):
        with model.trace(input_ids=ids[step], labels=ids[step]):
            hidden = model.model.layers[0].output[0].save()
            loss = model.output.loss.save()
        saved.append(tuple(hidden.shape))
        return loss

    result = loop(inner, optimizer, loss_of, watches)
    assert len(set(saved)) == 1
    return result


def transformer_lens(folder, watches):
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    # It loads the tokenizer once more, by its name.
    tokenizer().save_pretrained(folder / "tokenizer")
    model = TransformerBridge.boot_transformers(
        "meta-llama/Llama-3.2-1B",
        hf_model=llama(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        device="cpu",
    )
    optimizer = adamw(model, 0.01)
    ids = batches()
    return loop(
        model, optimizer, lambda step: model(ids[step], return_type="loss"), watches
    )


def fabric(folder, watches):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    inner, ids = llama(), batches()
    optimizer = adamw(inner, 0.01)
    model, optimizer = fabric.setup(inner, optimizer)

    def loss_of(step):
        return model(input_ids=ids[step], labels=ids[step]).loss

    return loop(inner, optimizer, loss_of, watches, model, fabric.backward)


def tft(folder, watches):
    """The temporal fusion transformer of pytorch-forecasting under Lightning's Trainer."""
    import lightning.pytorch as lightning
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    generator = torch.Generator().manual_seed(0)
    frame = pd.DataFrame(
        {
            "time": [*range(40)] * 2,
            "group": ["a"] * 40 + ["b"] * 40,
            "value": torch.randn(80, generator=generator).tolist(),
        }
    )
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
    )
    torch.manual_seed(0)
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=16, attention_head_size=4, dropout=0.1, learning_rate=1e-2
    )
    losses = []

    class Keep(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *_):
            losses.append(float(outputs["loss"]))

    callbacks = [Keep()]
    if watches:
        from qkeel.integrations.lightning import LightningCallback

        callbacks.append(LightningCallback(every=1))
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = data.to_dataloader(train=True, batch_size=8, num_workers=0, shuffle=False)
    trainer.fit(model, loader)
    return losses, model, callbacks[-1].monitor if watches else None


CASES = {
    "sft": ("trl", sft),
    "dpo": ("trl", dpo),
    "kto": ("trl", kto),
    "grpo": ("trl", grpo),
    "qlora": ("accelerate", qlora),
    "nnsight": ("nnsight", nnsight),
    "transformer_lens": ("transformer_lens", transformer_lens),
    "fabric": ("lightning", fabric),
    "tft": ("pytorch_forecasting", tft),
}


def main(case, folder, *options):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    losses, model, monitor = CASES[case][1](folder, "watch" in options)
    recorded = None
    if monitor is not None:
        history = monitor.history
        recorded = history.steps.tolist(), {**history.heads}, monitor.sites.share
    weights = values(model)
    (folder / "result.pickle").write_bytes(pickle.dumps((losses, weights, recorded)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
