"""The optimizer of a run, AdamW, SGD or Muon over clean parameter groups, and its rate, a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from qkeel.lab.config import OptimConfig
from qkeel.lab.model.muon import Muon, fusable
from qkeel.patching.adam_groups import Group

RATE = "rate"  # of a group's options: its rate as a multiple of the run's


def build_optimizer(config: OptimConfig, model: nn.Module, width: float = 1.0) -> torch.optim.Optimizer:
    """The optimizer over all parameters; weight decay on matrices only, Muon on the hidden ones. Groups: hidden
    matrices, embedding and head, vectors and scalars. A group added later has no weight decay.

    Under µP the rate of hidden matrices is η · base width / width. Independent weight decay is w ← w - s·λ·w, with s
    the step's share of the peak rate, so an optimizer that decays by its rate η·s is given λ / η.

    Args:
        config: what it is. model: whose parameters it steps. width: that of the model as a multiple of µP's base
            width; 1 in the standard parametrisation.

    Source: Yang et al. 2022, arXiv 2203.03466, table 8 (Adam); Wortsman et al. 2023, arXiv 2309.14322, section 3.2.
    """
    hidden, tables, gains = _split(model)
    groups: list[Group] = [
        {"params": hidden, "weight_decay": _decay(config, 1 / width), RATE: 1 / width},
        {"params": tables, "weight_decay": _decay(config)},
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


def _decay(config: OptimConfig, rate: float = 1.0) -> float:
    """The weight decay of a group whose rate is such a multiple of the run's, which its optimizer multiplies by it."""
    return config.weight_decay if config.decay == "coupled" else config.weight_decay / (config.lr * rate)


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


# Of the steps, for "wsd": Hu et al. 2024 (MiniCPM, arXiv 2404.06395) decay over the last tenth or fifth.
DECAY_SHARE = 0.2


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then constant, cosine or wsd.

    >>> [round(learning_rate(OptimConfig(lr=1.0, warmup=0.5, schedule="constant"), s, 4), 3) for s in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    warm = round(config.warmup * steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        done = (step - warm) / max(1, steps - warm)
        return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done)))
    fall = max(1, min(round(DECAY_SHARE * steps), steps - warm))
    done = max(0.0, (step - (steps - fall)) / fall)
    return config.lr * (1 - (1 - config.final) * done)
