"""Training runs for the tests of autopilots: at this rate the logits of a small model grow to hundreds."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch
from tests.attention import Attention, fused_causal
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from qkeel.monitor import PlannedRates
from qkeel.nn import Decoder, DecoderConfig

STEPS, RATE = 24, 0.5
EAGER = "ladder:threshold=20,calm=4"  # acts early


class Foreign(Attention):
    """Attention by torch's function, in a model that is not qkeel's: sites must be seen.

    kind: "", or what is different: "tied", "normed" or "frozen" queries and keys.
    """

    def __init__(self, kind=""):
        super().__init__(fused_causal, 32, 4)
        self.embed = nn.Embedding(32, 32)
        self.out, self.drop = nn.Linear(32, 32), nn.Dropout(0.1)
        norms = (nn.RMSNorm(8) if kind == "normed" else nn.Identity() for _ in "qk")
        self.norms = nn.ModuleList(norms)
        if kind == "tied":
            self.k = self.q
        self.q.requires_grad_(kind != "frozen")

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.norms[0](q), self.norms[1](k), v

    def forward(self, tokens):
        x = self.embed(tokens)
        attended = self.drop(super().forward(x))
        return self.out(x + attended) @ self.embed.weight.mT


def decoder():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=32, d_model=32, n_heads=4, n_layers=2))


def foreign(seed=0, kind=""):
    torch.manual_seed(seed)
    return Foreign(kind)


def batches(first=0, last=STEPS):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 32, (8, 33), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]
        yield tokens


EXAMPLE = next(batches())[:, :-1]


def adamw(model, rate=RATE):
    return torch.optim.AdamW(model.parameters(), lr=rate)


@dataclasses.dataclass
class Run:
    """A model in training, with an autopilot or without."""

    model: Any
    optimizer: Any
    pilot: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)

    def train(
        self,
        first=0,
        last=STEPS,
        call=None,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qkeel.errors.QkeelWarning)
            for step, tokens in enumerate(batches(first, last), first):
                torch.manual_seed(1000 + step)  # dropout
                self.optimizer.step(functools.partial(self._gradients, tokens, call))
        return self

    def _gradients(self, tokens, call):
        self.optimizer.zero_grad()
        logits = (self.model if call is None else call)(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.losses.append(loss.item())
        return loss

    def bits(self):
        bits = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for i, state in self.optimizer.state_dict()["state"].items():
            for name, x in state.items():
                if isinstance(x, Tensor):
                    bits[f"{i}.{name}"] = x.clone()
        return bits

    def left(self):
        """How many hooks and marks are on the model and its optimizer."""
        held = [
            self.optimizer._optimizer_step_pre_hooks,
            self.optimizer._optimizer_step_post_hooks,
        ]
        for module in self.model.modules():
            held += [module._forward_pre_hooks, module._forward_hooks]
            held.append(vars(module).get("_qkeel_applied", {}))
        return [len(hooks) for hooks in held]


def run(
    model=None,
    *,
    policy=EAGER,
    rate=RATE,
    **options,
):
    model = foreign() if model is None else model
    optimizer = adamw(model, rate)
    options = {"every": 2, "planned": PlannedRates.of([rate] * STEPS), **options}
    pilot = qkeel.autopilot(model, optimizer, policy=policy, **options)
    return Run(model, optimizer, pilot)


def plain(rate=RATE):
    return Run(model := foreign(), adamw(model, rate))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
