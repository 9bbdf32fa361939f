"""Torchtitan's own Trainer with its debug model, cut to two layers: fully_shard, tensor parallel, its defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils
from tests.contract.processes.wrapped import batch
from tests.integrations.trainers.run import BATCH, CLIP, STEPS, Outcome, outcome, world
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import qkeel

# Torchtitan takes CUDA where there is no accelerator, and asks it for what torch.cpu does not have.
torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = SimpleNamespace(  # type: ignore[assignment]
    **{**vars(torch.cpu), "current_device": lambda: 0},
    get_device_name=str,
    get_device_properties=lambda _: SimpleNamespace(total_memory=1),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer, dist_utils  # noqa: E402

dist_utils.set_pg_timeouts = lambda **_: (
    None
)  # by a barrier of devices, which gloo has not


class Batches(BaseDataLoader):
    """This process's sequences of the global batches."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, **kwargs: Any
    ) -> None:
        self.place = dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in range(STEPS):
            tokens = batch(step).chunk(self.place[0])[self.place[1]]
            yield {"input": tokens[:, :-2]}, tokens[:, 1:-1]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Tokens come as numbers."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        pass

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def configured(variant: str, folder: Path) -> Trainer.Config:
    config = llama3_debugmodel()
    config.model_spec = spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # FlexAttention is compiled for a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    config.dataloader, config.tokenizer = Batches.Config(), NoTokenizer.Config()
    config.optimizer = default_adamw(lr=1e-2, eps=1e-5)
    config.dump_folder = str(folder)
    config.validator.enable = False
    config.checkpoint.enable = False
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = BATCH, 10, STEPS
    training.disable_cuda_graphs = True
    if not variant.startswith(
        "defaults"
    ):  # those recompute activations, and compute in bfloat16
        training.dtype = training.mixed_precision_param = (
            training.mixed_precision_reduce
        ) = "float32"
        config.activation_checkpoint = None  # type: ignore[assignment]
    config.parallelism.spmd_backend = (
        "partial_dtensor"  # with "spmd_types" it does not start on torch 2.13
    )
    if variant == "tp":
        config.parallelism.tensor_parallel_degree = world()
    else:
        training.local_batch_size = BATCH // world()
    return config


def train(variant: str, folder: Path) -> Outcome:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29531")
    config = configured(variant, folder)
    whole = config.model_spec.model.build()  # type: ignore[union-attr]
    torch.manual_seed(0)
    with torch.no_grad():
        whole.init_weights()
    sites = qkeel.find_sites(whole, batch(0)[:1])
    trainer = Trainer(config)
    model, optimizer = trainer.model_parts[0], trainer.optimizers.optimizers[0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(
                True
            )  # gloo has no sum that multiplies first
    weights = dict(
        whole.named_parameters()
    )  # torch makes other random numbers on other processes
    for name, p in model.named_parameters():
        part = qkeel.distributed.local_block(name, p)
        spans = tuple(slice(*span) for span in part.spans) if part is not None else ()
        qkeel.distributed.local(p).data.copy_(
            weights[name.replace("_checkpoint_wrapped_module.", "")].detach()[spans]
        )
    monitor = (
        None
        if variant == "defaults_alone"
        else qkeel.watch(model, optimizer, rules=[], sites=sites)
    )
    if not variant.startswith("defaults"):
        qkeel.apply(model, CLIP, optimizer, sites=sites)
    trainer.train()
    found = outcome(model, monitor)
    trainer.close()
    return found
