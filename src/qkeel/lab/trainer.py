"""What training is, apart from files: corpus, model, optimizer, remedy, and one step."""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from qkeel.functional.losses import z_loss
from qkeel.lab.checkpoint import Trained
from qkeel.lab.config import RunConfig
from qkeel.lab.data import batch, heldout, load
from qkeel.lab.evaluate import Probe, heldout_loss, probe, token_loss
from qkeel.lab.model import autocast, build_decoder
from qkeel.lab.optim import build_optimizer
from qkeel.lab.schedule import learning_rate
from qkeel.lab.throughput import flops_per_token
from qkeel.remedies import apply


@final
class Trainer:
    """A resolved configuration in memory. Weights follow from the seed, batches from (seed, step)."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.corpus = load(config.data)
        self.device = torch.device(config.device)
        context = config.data.context
        self._heldout = self._move(heldout(self.corpus, context, config.eval_sequences))
        self._probed = self._move(heldout(self.corpus, context, config.probe_sequences))
        self.trained = self._build()

    def _build(self) -> Trained:
        config = self.config
        torch.manual_seed(config.seed)
        model = build_decoder(config.model, self.corpus.vocab_size, config.data.context)
        model.init_weights(torch.Generator().manual_seed(config.seed))
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
        config, trained = self.config, self.trained
        for group in trained.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, config.steps)
        tokens = self._move(batch(self.corpus, config.data, config.seed, step))
        loss = torch.stack([self._backward(part) for part in tokens.chunk(config.accumulate)]).sum()
        weights = [p for p in trained.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in weights if p.grad is not None], foreach=True)
        if config.optim.grad_clip:
            clip_grads_with_norm_(weights, config.optim.grad_clip, norm, foreach=True)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return loss, norm

    def _backward(self, tokens: Tensor) -> Tensor:
        """Add the gradient of a part of the batch; its share of the loss."""
        config = self.config
        with autocast(config):
            logits = self.trained.model(tokens[:, :-1])
        loss = token_loss(logits, tokens[:, 1:])
        total = loss + z_loss(logits, config.optim.z_loss) if config.optim.z_loss else loss
        (total / config.accumulate).backward()
        return loss.detach() / config.accumulate

    def probe(self) -> Probe:
        """Attention statistics on the probe."""
        with autocast(self.config):
            return probe(self.trained.model, self._probed)

    def val_loss(self) -> float:
        """Loss on the held-out windows; NaN where a weight is not finite."""
        with autocast(self.config):
            loss = heldout_loss(self.trained.model, self._heldout, 4 * self.config.data.batch)
        return loss if math.isfinite(loss) else math.nan

    def _move(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(tokens).to(self.device, non_blocking=True)
