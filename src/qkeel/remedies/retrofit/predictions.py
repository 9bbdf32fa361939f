"""The cost of a retrofit: the predictions of a model on batches before and after, and the report of their distance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.example import Arguments, copied
from qkeel.capture.modules import tensors
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The distance of a changed model from the old one on the batches given."""

    kl: float  #: mean over tokens of KL(old ‖ new) of the predicted distributions, in nats
    loss: float | None  #: of the next tokens, new minus old, in nats; None where there is no such loss

    def __str__(self) -> str:
        return f"KL {self.kl:.4g}" + ("" if self.loss is None else f", loss {self.loss:+.4g}")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGap:
    """One site: KL of its attention weights, and the model's gap if this site alone is normed."""

    name: str  #: of the site
    attention_kl_naive: tuple[float, ...]  #: KL per head in nats, gains as they start
    attention_kl: tuple[float, ...]  #: KL per head in nats, gains as fitted
    alone: Gap  #: of the model with a norm at this site alone

    def __str__(self) -> str:
        before, after = (sum(v) / len(v) for v in (self.attention_kl_naive, self.attention_kl))
        return (
            f"{self.name}: attention KL {before:.4g} -> {after:.4g} (head {max(self.attention_kl):.4g}); {self.alone}"
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitReport:
    """The gap to the old model after each stage of a retrofit; None for what was not done or did not help."""

    old_loss: float | None  #: of the next tokens, in nats; None where there is no such loss
    naive: Gap  #: with gains as they start
    fitted: Gap  #: with gains as fitted
    balanced: Gap | None  #: with queries balanced against keys
    distilled: Gap | None  #: after distillation
    layers: tuple[LayerGap, ...]  #: one for each site

    @property
    def gap(self) -> Gap:
        """The gap of the model as it was left."""
        return self.distilled or self.balanced or self.fitted

    def __str__(self) -> str:
        loss = "" if self.old_loss is None else f"loss before {self.old_loss:.4g}\n"
        steps = [f"naive insertion: {self.naive}", f"gains fitted:    {self.fitted}"]
        if self.balanced is not None:
            steps.append(f"q, k balanced:   {self.balanced}")
        if self.distilled is not None:
            steps.append(f"distilled:       {self.distilled}")
        return loss + "\n".join([*steps, *map(str, self.layers)])


def predictions(model: nn.Module, batch: Arguments) -> Tensor:
    """The first floating-point output [b t vocabulary], or whatever has two dimensions or more."""
    returned = model(*copied(batch[0]), **copied(batch[1]))
    plain = tuple(returned.values()) if isinstance(returned, dict) else returned
    found = next((x for x in tensors(plain) if x.is_floating_point() and x.ndim > 1), None)
    if found is None:
        raise RefusedError(
            f"expected a {type(model).__name__} that returns logits [batch tokens vocabulary], to compare before and "
            "after; its output holds no such tensor"
        )
    return found


def divergence(old: Tensor, new: Tensor, batch: Arguments) -> Tensor:
    """The mean over tokens of KL(old ‖ new); padded ones, by an attention_mask, left out."""
    p, q = (torch.log_softmax(z.to(wide(z.dtype)), -1) for z in (old, new))
    kl = (p.exp() * (p - q)).sum(-1)
    mask = batch[1].get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == kl.shape:
        return (kl * mask).sum() / mask.sum().clamp_min(1)
    return kl.mean()


def next_token_loss(logits: Tensor, batch: Arguments) -> float | None:
    """Cross-entropy of each next token of the batch's own tokens; None if it has none."""
    tokens = next((x for x in tensors(batch) if not x.is_floating_point() and x.ndim == 2), None)
    if tokens is None or logits.shape[:2] != tokens.shape or tokens.shape[1] < 2 or logits.ndim != 3:
        return None
    targets = tokens[:, 1:].long()
    mask = batch[1].get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        targets = targets.masked_fill(mask[:, 1:] == 0, -100)
    predicted = logits[:, :-1].flatten(0, 1)
    return float(nn.functional.cross_entropy(predicted.to(wide(predicted.dtype)), targets.flatten()))


class Reference:
    """The old model's predictions on the batches, and the gap of a new one."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Arguments]) -> None:
        self.model, self.batches = model, batches
        self.old = [predictions(model, batch) for batch in batches]
        self.losses = [next_token_loss(z, batch) for z, batch in zip(self.old, batches)]

    @property
    def loss(self) -> float | None:
        """The old model's loss."""
        return _mean(self.losses)

    def divergence(self) -> Tensor:
        """The mean over the batches of KL(old ‖ new) of the model as it is now, with gradients."""
        pairs = zip(self.old, self.batches)
        return torch.stack([divergence(old, predictions(self.model, b), b) for old, b in pairs]).mean()

    @torch.no_grad()
    def gap(self, some: int | None = None) -> Gap:
        """Of the model as it is now, on the first `some` batches or all."""
        kls, losses = [], []
        for old, was, batch in list(zip(self.old, self.losses, self.batches))[:some]:
            new = predictions(self.model, batch)
            kls.append(float(divergence(old, new, batch)))
            loss = next_token_loss(new, batch)
            losses.append(None if loss is None or was is None else loss - was)
        return Gap(kl=sum(kls) / len(kls), loss=_mean(losses))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
