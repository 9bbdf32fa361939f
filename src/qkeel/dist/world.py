"""The processes that run this model."""

from __future__ import annotations

import torch
from torch import distributed as torch_distributed


def on() -> bool:
    """Returns whether torch.distributed is in use."""
    return torch_distributed.is_available() and torch_distributed.is_initialized()


def world() -> int:
    """The number of processes that train one model; 1 where torch.distributed is not in use."""
    return torch_distributed.get_world_size() if on() else 1


def rank() -> int:
    """This process's number among them."""
    return torch_distributed.get_rank() if on() else 0


def collective_device() -> torch.device:
    """The device that tensors must be on to be gathered: the GPU for NCCL, else the CPU."""
    if on() and torch_distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
