"""A run in memory, apart from its files: what it learns, its model, its optimizer and the remedy in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from qkeel.autopilot import Autopilot
from qkeel.lab.config import RunConfig
from qkeel.lab.model.optimizers import build_optimizer
from qkeel.lab.model.run_remedies import put_on
from qkeel.lab.tasks.text import load_task
from qkeel.lab.training.throughput import flops_per_token
from qkeel.metrics import Row


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
        self.probed = self.task.heldout(config.probe_sequences).to(self.device)
        torch.manual_seed(config.seed)
        self.model = self.task.build(torch.Generator().manual_seed(config.seed))
        self.model.to(self.device)
        self.flops_per_token = flops_per_token(self.model, config.data.context)
        self.optimizer = build_optimizer(config.optim, self.model)
        self.handle = put_on(config, self.model, self.optimizer)
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
