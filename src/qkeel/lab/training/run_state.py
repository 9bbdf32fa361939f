"""A run in memory, apart from its files: what it learns, its model, its optimizer and the remedy in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from qkeel.autopilot import Autopilot
from qkeel.lab.config import RunConfig
from qkeel.lab.model.build_model import width_ratio
from qkeel.lab.model.optimizers import build_optimizer
from qkeel.lab.model.run_remedies import put_on
from qkeel.lab.tasks.text import load_task
from qkeel.lab.training.loss_scale import LossScale
from qkeel.lab.training.throughput import flops_per_token
from qkeel.metrics import Row
from qkeel.nn.spec_module import SpecModule


@final
class RunState:
    """A resolved configuration in memory: initial weights follow from the seed, batches from (seed, step). Training
    changes `model`, `optimizer` and what the remedy's `handle` remembers; nothing else.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = load_task(config)
        self.device = torch.device(config.device)
        self.heldout = self.task.heldout(config.eval_sequences).to(self.device)
        corpus = self.task.corpus
        # Of a batch it is not counted: its loss is noise of one batch in any unit.
        self.tokens_per_unit = {
            "train": corpus.tokens_per_unit(corpus.train),
            "heldout": corpus.tokens_per_unit(self.heldout.targets.cpu().numpy()),
        }
        self.probed = self.task.heldout(config.probe_sequences).to(self.device)
        torch.manual_seed(config.seed)
        self.model = self.task.build(torch.Generator().manual_seed(config.seed))
        _nudge(self.model, config.nudge)
        self.model.to(self.device)
        self.attentions = tuple(name for name, m in self.model.named_modules() if isinstance(m, SpecModule))
        self.flops_per_token = flops_per_token(self.model, config.data.context)
        self.optimizer = build_optimizer(config.optim, self.model, width_ratio(config.model))
        self.handle = put_on(config, self.model, self.optimizer)
        self.loss_scale = LossScale() if config.dtype == "fp16" else None
        self.model.train()
        if config.compile:
            self.model.compile()

    def close(self) -> None:
        """The training is over."""
        if isinstance(self.handle, Autopilot):
            self.handle.close()

    @property
    def events(self) -> Sequence[Row]:
        """The events of an autopilot so far."""
        return self.handle.events if isinstance(self.handle, Autopilot) else ()


@torch.no_grad()
def _nudge(model: nn.Module, ulps: int) -> None:
    """Moves the first weight of the first matrix of the blocks up by so many float32 steps."""
    weight = next((p for p in model.get_submodule("blocks").parameters() if p.dim() == 2), None) if ulps else None
    if weight is not None:
        first = weight.detach().view(-1)[:1]
        first.view(torch.int32).add_(-ulps if first < 0 else ulps)  # magnitudes are in the order of their bits
