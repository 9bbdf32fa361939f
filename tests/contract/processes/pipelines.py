"""A decoder as stages of torch's pipeline, and the passes of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.contract.processes.wrapped import LAYERS, batch, llama
from torch import Tensor, nn
from torch import distributed as dist

INTERLEAVED = "pipeline_interleaved"


class Stage(nn.Module):
    """Some layers of a Llama; the first embeds, the last gives logits. Its layers are numbered from 0."""

    def __init__(self, model: nn.Module, first: int, last: int, n: int) -> None:
        super().__init__()
        inner = model.model  # type: ignore[union-attr]
        self.layers = nn.ModuleList(inner.layers[first:last])  # type: ignore[index,union-attr]
        self.rotary = inner.rotary_emb  # type: ignore[union-attr]
        self.embedding = inner.embed_tokens if first == 0 else None  # type: ignore[union-attr]
        self.norm, self.head = (
            (inner.norm, model.lm_head) if last == n else (None, None)
        )  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        rotated = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=rotated)
        return x if self.norm is None else self.head(self.norm(x))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


def layers_of(setup: str) -> int:
    """The layers of the whole model: one for each stage."""
    return 2 * LAYERS if setup == INTERLEAVED else LAYERS


def pipelined(
    setup: str,
) -> tuple[nn.Module, Callable[[nn.Module, torch.optim.Optimizer, int], float]]:
    """This process's stage, or a ModuleList of its two, and what runs the passes of a step."""
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
    )

    rank, world, n = dist.get_rank(), dist.get_world_size(), layers_of(setup)
    model = llama(layers=n)
    parts = [Stage(model, i, i + 1, n) for i in range(rank, n, world)]
    stages = [
        PipelineStage(p, i, n, torch.device("cpu"))
        for p, i in zip(parts, range(rank, n, world))
    ]
    stage: nn.Module = nn.ModuleList(parts) if setup == INTERLEAVED else parts[0]
    if setup == INTERLEAVED:
        schedule: Any = ScheduleInterleaved1F1B([*stages], 2, loss_fn=_loss)
    else:
        schedule = {"pipeline": ScheduleGPipe, "pipeline_1f1b": Schedule1F1B}[setup](
            stages[0], 2, loss_fn=_loss
        )

    def run(_: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch(step))
        else:
            schedule.step(target=batch(step), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    return stage, run
