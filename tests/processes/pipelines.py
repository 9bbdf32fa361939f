"""A decoder as stages of torch's pipeline, and the passes of one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.processes.wrapped import batch, llama
from torch import Tensor, nn
from torch import distributed as dist


class Stage(nn.Module):
    """Some layers of a Llama; the first embeds, the last gives logits. Its layers are numbered from 0."""

    def __init__(self, model: nn.Module, first: int, last: int, n: int) -> None:
        super().__init__()
        inner = model.model  # type: ignore[union-attr]
        self.layers = nn.ModuleList(inner.layers[first:last])  # type: ignore[index,union-attr]
        self.rotary = inner.rotary_emb  # type: ignore[union-attr]
        self.embedding = inner.embed_tokens if first == 0 else None  # type: ignore[union-attr]
        self.norm, self.head = (inner.norm, model.lm_head) if last == n else (None, None)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        rotated = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=rotated)
        return x if self.norm is None else self.head(self.norm(x))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def pipelined(setup: str) -> tuple[nn.Module, Callable[[nn.Module, torch.optim.Optimizer, int], float]]:
    """This process's stage, and what runs the passes of a step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    model = llama()
    stage = Stage(model, rank, rank + 1, world)
    schedules = {"pipeline": ScheduleGPipe, "pipeline_1f1b": Schedule1F1B}
    schedule = schedules[setup](PipelineStage(stage, rank, world, torch.device("cpu")), 2, loss_fn=_loss)

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
