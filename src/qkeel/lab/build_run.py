"""The model, optimizer and remedies of a run, built from its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from qkeel import remedies
from qkeel.errors import InvalidValueError
from qkeel.handle import Handle
from qkeel.lab.config import (
    IMAGE_SIZE,
    ModelConfig,
    OptimConfig,
    RunConfig,
    with_values,
)
from qkeel.lab.muon import Muon, fusable
from qkeel.nn import Decoder, DecoderConfig, EncoderDecoder, ViT
from qkeel.patching.optimizers import Group
from qkeel.spec import AttentionSpec, layer_specs
from qkeel.spec.presets import attention_spec

# The optimizer of a run (AdamW, SGD or Muon) and its learning rate as a function of the step.


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer for all parameters. Weight decay applies to matrices only, and Muon to hidden matrices only.

    The parameter groups are the hidden matrices, the embedding and the head, and the vectors and scalars. Groups added
    later have no weight decay.

    Independent weight decay is w ← w - s·λ·w, where s is the step's rate relative to the peak rate; an optimizer that
    multiplies decay by its rate η·s therefore gets λ / η.

    Source: Wortsman et al. 2023, arXiv 2309.14322, section 3.2.
    """
    hidden, tables, gains = _split(model)
    decay = config.weight_decay
    if config.decay == "independent":
        decay /= config.lr
    groups: list[Group] = [
        {"params": hidden, "weight_decay": decay},
        {"params": tables, "weight_decay": decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if config.name == "muon":
        groups[0]["muon"] = True
        return Muon(
            groups, lr=config.lr, momentum=config.momentum, betas=betas, eps=config.eps
        )
    fused = all(fusable(p) for p in model.parameters())
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=0.0, fused=fused
    )


def _split(
    model: nn.Module,
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    # Tables of tokens are matrices too, but neither Muon nor µP treats them like hidden ones.
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = dict(model.named_children()).get("head")
    if isinstance(head, nn.Linear):
        tables.add(id(head.weight))
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim >= 2]
    return (
        [p for p in matrices if id(p) not in tables],
        [p for p in matrices if id(p) in tables],
        [p for p in parameters if p.ndim < 2],
    )


# The share of steps in which "wsd" decays. Hu et al. 2024 (MiniCPM, arXiv 2404.06395) use the last tenth or fifth.
DECAY_SHARE = 0.2


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Returns the learning rate of step `step` (from 0) of `steps`: linear warm-up, then constant, cosine or wsd.

    >>> [round(learning_rate(OptimConfig(lr=1.0, warmup=0.5, schedule="constant"), s, 4), 3) for s in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    warm = round(config.warmup * steps)
    if step < warm:
        # Counted from 1: a first step at rate 0 would be computed, recorded and change nothing.
        return config.lr * (step + 1) / warm
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        # A run that is all warm-up has no steps left to divide by.
        done = (step - warm) / max(1, steps - warm)
        return config.lr * (
            config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done))
        )
    fall = max(1, min(round(DECAY_SHARE * steps), steps - warm))
    done = max(0.0, (step - (steps - fall)) / fall)
    return config.lr * (1 - (1 - config.final) * done)


def rules(text: str) -> list[str]:
    """Returns the rules of a run's remedies that act on steps, the loss or a block, with their options filled in.

    >>> rules("none"), rules("qk_lr:factor=0.5")[0][:6]
    ([], 'qk_lr:')
    """
    return [
        f"{remedy.name}: {remedy.written_rule()}"
        for remedy in remedies.parse(text)
        if remedy.rule
    ]


def put_on(config: RunConfig, model: nn.Module, optimizer: Optimizer) -> Handle:
    """Applies the remedy of a run to its model."""
    return remedies.apply(
        model,
        remedies.canonical(config.remedy),
        optimizer,
        train_length=config.data.context,
    )


# Models and devices.

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(config: RunConfig) -> RunConfig:
    """Returns the configuration with every `auto` replaced for this machine and the remedy in its canonical spelling.

    Raises:
        QkeelError: a remedy, preset or option is unknown, or the device does not exist here.
    """
    device = _device(config.device)
    kinds = {
        "auto": "bf16"
        if device.startswith("cuda") and torch.cuda.is_bf16_supported()
        else "fp32"
    }
    # An unknown preset or position is an error here, not in a worker.
    layers(config.model, config.data.context)
    # a token is a patch.
    if config.data.task == "vision":
        config = with_values(
            config,
            data={"context": (IMAGE_SIZE // config.images.patch) ** 2},
        )
    dtype = kinds.get(config.dtype, config.dtype)
    return with_values(
        config, device=device, dtype=dtype, remedy=remedies.canonical(config.remedy)
    )


def check(config: RunConfig) -> None:
    """Raises an error if the model cannot be built or the remedy cannot be applied to it; takes a few milliseconds."""
    model = config.model
    depth = model.n_layers if model.position else 1
    # Whether a remedy fits depends on the attention and the heads, not on the width: 8 keeps this cheap.
    narrow = dataclasses.replace(
        model,
        d_model=8,
        n_layers=depth,
        head_dim=model.head_dim or model.d_model // model.n_heads,
    )
    length = config.data.context
    builders: dict[str, Callable[[], nn.Module]] = {
        "vision": lambda: build_vit(narrow, 2, 1, 1),
        "translation": lambda: build_translator(narrow, 2, length),
    }
    small = builders.get(
        config.data.task,
        lambda: build_decoder(narrow, vocab_size=2, train_length=length),
    )()
    put_on(config, small, build_optimizer(config.optim, small))


def layers(
    config: ModelConfig, train_length: int | None = None
) -> tuple[AttentionSpec, ...]:
    """Returns the spec of each layer; `train_length` is used by position encodings that depend on it."""
    return layer_specs(
        attention_spec(config.attention), config.n_layers, config.position, train_length
    )


def build_decoder(
    config: ModelConfig, vocab_size: int, train_length: int | None = None
) -> Decoder:
    """Builds the model with PyTorch's initial weights; `Decoder.init_weights` then sets those of the run."""
    return Decoder(_sizes(config, vocab_size, train_length))


def build_vit(config: ModelConfig, classes: int, patches: int, width: int) -> ViT:
    """Builds a vision transformer of the same sizes, for `patches` patches of `width` values each."""
    return ViT(_sizes(config, classes, patches), patches=patches, width=width)


def build_translator(
    config: ModelConfig, vocab_size: int, length: int
) -> EncoderDecoder:
    """Builds an encoder–decoder with the same sizes on both sides, for sources of `length` tokens."""
    return EncoderDecoder(_sizes(config, vocab_size, length), source=length)


def _sizes(
    config: ModelConfig, vocab_size: int, train_length: int | None
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=config.d_model,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        spec=layers(config, train_length),
        attention=config.block,
        mlp=config.mlp,
        mlp_ratio=config.mlp_ratio,
        norm_order=config.norm_order,
        tied=config.tied,
        deepnorm=config.deepnorm,
    )


def autocast(config: RunConfig) -> contextlib.AbstractContextManager[object]:
    """Returns the autocast context of a resolved configuration: bf16, fp16, or a context without autocast."""
    if config.dtype not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(config.device.split(":")[0], dtype=HALF[config.dtype])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of CPU threads and restores it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> str:
    if name == "auto":
        # Mps has not been shown to be faster.
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind == "cuda" and not (
        torch.cuda.is_available() and int(number or 0) < torch.cuda.device_count()
    ):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        has = f"it has {count} CUDA device(s)" if count else "it has no CUDA"
        raise InvalidValueError(
            f"expected a device of this machine, got {name!r}: {has}; try --device cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InvalidValueError(
            "expected a device of this machine, got 'mps', which it does not have; try --device cpu"
        )
    return name
