"""The optimizer of a run: AdamW, SGD or Muon over clean parameter groups."""

from __future__ import annotations

import torch
from torch import nn

from qkeel.lab.config import OptimConfig
from qkeel.lab.model.muon import Muon, fusable
from qkeel.patching.adam_groups import Group


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters; weight decay on matrices only, Muon on the hidden ones. Groups: hidden
    matrices, embedding and head, vectors and scalars. A group added later has no weight decay.
    """
    hidden, tables, gains = _split(model)
    decay = {"weight_decay": config.weight_decay}
    groups: list[Group] = [
        {"params": hidden, **decay},
        {"params": tables, **decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if config.name == "muon":
        groups[0]["muon"] = True
        return Muon(groups, lr=config.lr, momentum=config.momentum, betas=betas, eps=config.eps)
    fused = all(fusable(p) for p in model.parameters())
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=0.0, fused=fused)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
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
