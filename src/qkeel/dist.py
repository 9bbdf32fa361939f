"""torch.distributed's one door: who else runs this model, and one packed gather among them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as torch_distributed


def world() -> int:
    """How many processes train together; 1 where torch.distributed is not in use."""
    return torch_distributed.get_world_size() if _on() else 1


def rank() -> int:
    """This process's number among them."""
    return torch_distributed.get_rank() if _on() else 0


def gather(vector: Tensor) -> Tensor:
    """[n] on every process -> [world n] on each, in the order of ranks, by one collective."""
    if not _on():
        return vector[None]
    out = vector.new_empty(world() * vector.numel())
    torch_distributed.all_gather_into_tensor(out, vector.contiguous())
    return out.view(world(), -1)


def collective_device() -> torch.device:
    """Where tensors must lie to be gathered: the GPU for NCCL, else the CPU."""
    if _on() and torch_distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _on() -> bool:
    return torch_distributed.is_available() and torch_distributed.is_initialized()
