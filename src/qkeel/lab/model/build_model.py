"""From a configuration to a model on a device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn

from qkeel.errors import InvalidValueError
from qkeel.lab.config import ModelConfig, RunConfig, with_values
from qkeel.lab.model.optimizers import build_optimizer
from qkeel.lab.model.run_remedies import canonical, put_on
from qkeel.nn import Decoder, DecoderConfig, EncoderDecoder, ViT
from qkeel.spec import AttentionSpec, layer_specs
from qkeel.spec.presets import attention_spec

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with every `auto` decided on this machine and the remedy in its one spelling.

    Raises: the errors of an unknown remedy, preset or option; InvalidValueError for a device that is not here.
    """
    device = _device(config.device)
    kinds = {"auto": "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"}
    layers(config.model, config.data.context)
    if config.data.task == "vision":  # a token is a patch
        config = with_values(config, data={"context": (config.images.image_size // config.images.patch) ** 2})
    dtype = kinds.get(config.dtype, config.dtype)
    return with_values(config, device=device, dtype=dtype, remedy=canonical(config.remedy))


def check(config: RunConfig) -> None:
    """Raises if the model cannot be built or the remedy refuses it, in a few milliseconds."""
    model = config.model
    depth = model.n_layers if model.position else 1
    narrow = dataclasses.replace(
        model, d_model=8, n_layers=depth, head_dim=model.head_dim or model.d_model // model.n_heads
    )
    length = config.data.context
    builders: dict[str, Callable[[], nn.Module]] = {
        "vision": lambda: build_vit(narrow, 2, 1, 1),
        "translation": lambda: build_translator(narrow, 2, length),
    }
    small = builders.get(config.data.task, lambda: build_decoder(narrow, vocab_size=2, train_length=length))()
    put_on(config, small, build_optimizer(config.optim, small))


def layers(config: ModelConfig, train_length: int | None = None) -> tuple[AttentionSpec, ...]:
    """The spec of each layer; `train_length` is for positions that depend on it."""
    specs = layer_specs(attention_spec(config.attention), config.n_layers, config.position, train_length)
    return specs if config.parametrisation == "standard" else tuple(_mup(spec, config) for spec in specs)


def width_ratio(config: ModelConfig) -> float:
    """The width as a multiple of µP's base width; 1 in the standard parametrisation."""
    return 1.0 if config.parametrisation == "standard" else config.d_model / config.base_width


def _mup(spec: AttentionSpec, config: ModelConfig) -> AttentionSpec:
    """The spec with its scale 1/√d times √(base_head_dim / d): under µP logits are q·k / d. Other scales stay."""
    size = config.head_dim or config.d_model // config.n_heads
    return spec.replace(scale=spec.scale.with_multiplier((config.base_head_dim / size) ** 0.5))


def build_decoder(config: ModelConfig, vocab_size: int, train_length: int | None = None) -> Decoder:
    """The model with PyTorch's initial weights; `Decoder.init_weights` gives it the run's."""
    return Decoder(_sizes(config, vocab_size, train_length))


def build_vit(config: ModelConfig, classes: int, patches: int, width: int) -> ViT:
    """The same sizes as a vision transformer of so many patches, each of `width` numbers."""
    return ViT(_sizes(config, classes, patches), patches=patches, width=width)


def build_translator(config: ModelConfig, vocab_size: int, length: int) -> EncoderDecoder:
    """The same sizes on both sides of an encoder–decoder, for sources of `length` tokens."""
    return EncoderDecoder(_sizes(config, vocab_size, length), source=length)


def _sizes(config: ModelConfig, vocab_size: int, train_length: int | None) -> DecoderConfig:
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
        base_width=None if config.parametrisation == "standard" else config.base_width,
    )


def autocast(config: RunConfig) -> contextlib.AbstractContextManager[object]:
    """The arithmetic of a resolved configuration: bf16 or fp16 autocast, or nothing."""
    if config.dtype not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(config.device.split(":")[0], dtype=HALF[config.dtype])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Computes with `count` CPU threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"  # not mps before it is measured to be faster
    kind, _, number = name.partition(":")
    if kind == "cuda" and not (torch.cuda.is_available() and int(number or 0) < torch.cuda.device_count()):
        raise InvalidValueError(f"expected a device of this machine, got {name!r}: {_cuda()}; try --device cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InvalidValueError("expected a device of this machine, got 'mps': it has none; try --device cpu")
    return name


def _cuda() -> str:
    return f"it has {torch.cuda.device_count()} CUDA device(s)" if torch.cuda.is_available() else "it has no CUDA"
