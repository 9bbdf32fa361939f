"""What training is, apart from files: corpus, model, optimizer, remedy, and one step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from qkeel.functional.classes import TokenClasses
from qkeel.functional.losses import z_loss
from qkeel.lab.checkpoint import Trained
from qkeel.lab.config import RunConfig
from qkeel.lab.evaluate import Probe, heldout_score, probe, token_loss
from qkeel.lab.model import autocast
from qkeel.lab.optim import build_optimizer
from qkeel.lab.schedule import learning_rate
from qkeel.lab.task import Examples
from qkeel.lab.tasks import load_task
from qkeel.lab.throughput import flops_per_token
from qkeel.remedies import apply


@final
class Trainer:
    """A resolved configuration in memory. Weights follow from the seed, batches from (seed, step)."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = load_task(config)
        self.corpus = self.task.corpus
        self.device = torch.device(config.device)
        self.heldout = self.task.heldout(config.eval_sequences).to(self.device)
        self.probed = self.task.heldout(config.probe_sequences).to(self.device)
        self.trained = self._build()

    def _build(self) -> Trained:
        config = self.config
        torch.manual_seed(config.seed)
        model = self.task.build(torch.Generator().manual_seed(config.seed))
        model.to(self.device)
        self.flops_per_token = flops_per_token(model, config.data.context)
        optimizer = build_optimizer(config.optim, model)
        handle = apply(config.remedy, model, optimizer, train_length=config.data.context)
        model.train()
        if config.compile:
            model.compile()
        return Trained(model, optimizer, handle)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One optimizer step: the batch's loss, and the gradient's norm before clipping. No host sync."""
        config = self.config
        self.set_rate(step)
        examples = self.task.batch(config.seed, step).to(self.device)
        torch.manual_seed(config.seed * 1_000_003 + step)  # of dropout: like the batch, a function of (seed, step)
        parts = examples.split(config.data.batch // config.accumulate)
        loss = torch.stack([self._backward(part) for part in parts]).sum()
        return loss, self.finish_step(self.trained.model.parameters())

    def finish_step(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Clip the gradient of these, all there are, take the optimizer's step, forget it: its norm before clipping."""
        trained, limit = self.trained, self.config.optim.grad_clip
        weights = [p for p in parameters if p.grad is not None]
        norm = get_total_norm([p.grad for p in weights if p.grad is not None], foreach=True)
        if limit:
            clip_grads_with_norm_(weights, limit, norm, foreach=True)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return norm

    def set_rate(self, step: int) -> None:
        """Give the optimizer the learning rate of a step."""
        rate = learning_rate(self.config.optim, step, self.config.steps)
        for group in self.trained.optimizer.param_groups:
            group["lr"] = rate

    def _backward(self, examples: Examples) -> Tensor:
        """Add the gradient of a part of the batch; its share of the loss."""
        config = self.config
        with autocast(config):
            logits = self.trained.model(examples.inputs)
        loss = token_loss(logits, examples.targets)
        total = loss + z_loss(logits, config.optim.z_loss) if config.optim.z_loss else loss
        (total / config.accumulate).backward()
        return loss.detach() / config.accumulate

    def probe(self) -> Probe:
        """Attention statistics on the probe."""
        inputs, task = self.probed.inputs, self.task
        classes = None
        if task.classes:
            of = task.input_classes(inputs)
            classes = TokenClasses(names=tuple(task.classes), query=of, key=of)
        with autocast(self.config):
            return probe(self.trained.model, inputs, classes)

    def evaluate(self) -> dict[str, float]:
        """Numbers on the held-out examples: val_loss, of kinds of targets too, val_accuracy; NaN for not finite."""
        with autocast(self.config):
            score = heldout_score(self.trained.model, self.heldout, 4 * self.config.data.batch)
        found = {"val_loss": score.loss}
        if score.kinds:
            found |= score.by_kind(self.task.kinds, self.task.trained)
        if self.task.classifies:
            found["val_accuracy"] = score.accuracy
        return {name: value if math.isfinite(value) else math.nan for name, value in found.items()}
