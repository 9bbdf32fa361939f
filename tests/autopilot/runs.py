"""Training runs for the tests of autopilots: at this rate the logits of a small model grow to hundreds."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from qkeel.monitor import PlannedRates
from qkeel.nn import Decoder, DecoderConfig

STEPS, RATE = 24, 0.5
EAGER = "ladder:threshold=20,calm=4"  # acts early, and lets go again
_SHAPE = {"vocab_size": 32, "d_model": 32, "n_heads": 4, "n_layers": 2}


def decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**_SHAPE))  # type: ignore[arg-type]


class Foreign(nn.Module):
    """Attention by torch's function, in a model that is not qkeel's: sites must be seen.

    kind: "", or what is different: "fused", "grouped", "tied", "normed" or "frozen" queries and keys.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(32, 32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        if kind == "fused":
            self.q, self.k, self.v = nn.Linear(32, 96), None, None
        elif kind == "grouped":
            self.k, self.v = nn.Linear(32, 16), nn.Linear(32, 16)
        elif kind == "tied":
            self.k = self.q
        elif kind == "normed":
            self.norms = nn.ModuleList([nn.RMSNorm(8), nn.RMSNorm(8)])
        elif kind == "frozen":
            self.q.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        made = (
            self.q(x).chunk(3, -1)
            if self.kind == "fused"
            else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (one.unflatten(-1, (-1, 8)).transpose(1, 2) for one in made)
        if self.kind == "normed":
            q, k = self.norms[0](q), self.norms[1](k)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kind == "grouped"
        )
        return (
            self.out(x + self.drop(attended.transpose(1, 2).flatten(2)))
            @ self.embed.weight.mT
        )


def foreign(seed: int = 0, kind: str = "") -> Foreign:
    torch.manual_seed(seed)
    return Foreign(kind)


def batches(first: int = 0, last: int = STEPS) -> Iterator[Tensor]:
    for step in range(first, last):
        tokens = torch.randint(
            0, 32, (8, 33), generator=torch.Generator().manual_seed(step)
        )
        tokens[:, 1::2] = tokens[:, :-1:2]
        yield tokens


def adamw(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
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
        first: int = 0,
        last: int = STEPS,
        parts: int = 1,
        call: Callable[..., Tensor] | None = None,
    ) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qkeel.errors.QkeelWarning)
            for step, tokens in enumerate(batches(first, last), first):
                torch.manual_seed(1000 + step)  # dropout
                if isinstance(self.optimizer, torch.optim.LBFGS):
                    self.optimizer.step(
                        functools.partial(self._gradients, tokens, parts, call)
                    )
                else:
                    self._gradients(tokens, parts, call)
                    self.optimizer.step()
        return self

    def _gradients(
        self, tokens: Tensor, parts: int, call: Callable[..., Tensor] | None
    ) -> Tensor:
        self.optimizer.zero_grad()
        for part in tokens.chunk(parts):
            logits = (self.model if call is None else call)(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / parts
            loss.backward()
            self.losses.append(loss.item())
        return loss

    def bits(self) -> dict[str, Tensor]:
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for i, state in self.optimizer.state_dict()["state"].items():
            found |= {
                f"{i}.{name}": x.clone()
                for name, x in state.items()
                if isinstance(x, Tensor)
            }
        return found


def run(
    model: nn.Module | None = None,
    *,
    policy: Any = EAGER,
    rate: float = RATE,
    steps: int = STEPS,
    **options: Any,
) -> Run:
    model = foreign() if model is None else model
    optimizer = adamw(model, rate)
    options = {"every": 2, "planned": PlannedRates.of([rate] * steps), **options}
    return Run(
        model, optimizer, qkeel.autopilot(model, optimizer, policy=policy, **options)
    )


def plain(model: nn.Module | None = None, rate: float = RATE) -> Run:
    model = foreign() if model is None else model
    return Run(model, adamw(model, rate))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
