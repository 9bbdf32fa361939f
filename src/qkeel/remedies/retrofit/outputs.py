"""How far a changed model's outputs are from the old ones: as classes or as numbers, on data that was not fitted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.capture.example import Arguments, copied, mapped, tensors
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide

# What the outputs are: scores of classes, compared by KL, or numbers and channels, compared by squared error.
OutputKind = Literal["classes", "numbers"]

_IGNORED = -100  # a target that cross_entropy leaves out
_NOT_TOKENS = (
    "attention_mask",
    "position_ids",
    "token_type_ids",
)  # arguments of the same shape as the tokens


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The distance between a changed model and the old model."""

    #: mean over tokens of KL(old ‖ new) of the predicted distributions, in nats; NaN if the outputs are no classes
    kl: float
    #: mean squared difference of the outputs, divided by the variance of the old ones; None if the outputs are classes
    error: float | None = None
    #: change in the next-token loss, new minus old, in nats per token; None for models without such a loss
    loss: float | None = None

    @property
    def distance(self) -> float:
        """The number that a retrofit makes small: the KL or the squared error."""
        return self.kl if self.error is None else self.error

    def __str__(self) -> str:
        distance = (
            f"KL {self.kl:.4g}"
            if self.error is None
            else f"squared error {self.error:.4g} of the variance"
        )
        return distance if self.loss is None else f"{distance}, loss {self.loss:+.4g}"


def predictions(model: nn.Module, batch: Arguments) -> Tensor:
    """Returns the model's first floating-point output with a batch dimension, usually logits [b t vocabulary]."""
    returned = model(*copied(batch[0]), **copied(batch[1]))
    outputs = tuple(returned.values()) if isinstance(returned, dict) else returned
    for output in tensors(outputs):
        if output.is_floating_point() and output.ndim:
            return output
    raise RefusedError(
        f"expected a {type(model).__name__} that returns a floating-point tensor with a batch dimension, to compare "
        "its outputs before and after; there is none among its outputs"
    )


def kind_of_outputs(model: nn.Module, output: Tensor, batch: Arguments) -> OutputKind:
    """Returns whether outputs are scores of classes.

    They are where a config says how many labels there are, and where the batch holds tokens. A single number is no
    score, and other models may return anything, whose squared error is small only if all of it is close.
    """
    classes = output.shape[-1] if output.ndim > 1 else 1
    config = getattr(model, "config", None)
    if classes == 1 or getattr(config, "problem_type", None) == "regression":
        return "numbers"
    holds_tokens = any(
        not x.is_floating_point() and x.ndim >= 2 for x in tensors(batch)
    )
    return (
        "classes"
        if holds_tokens or getattr(config, "num_labels", None) == classes
        else "numbers"
    )


def held_out(
    batches: Sequence[Arguments],
) -> tuple[list[Arguments], list[Arguments], str]:
    """Divides batches into those that are fitted and those on which the result is measured, a fifth, and says which.

    Of a single batch, rows are held out. A batch of one row, or one that does not show its rows, is measured itself.
    """
    if len(batches) > 1:
        first = len(batches) - max(1, len(batches) // 5)
        return (
            list(batches[:first]),
            list(batches[first:]),
            f"{len(batches) - first} of {len(batches)} batches",
        )
    (batch,) = batches
    rows = max((len(x) for x in tensors(batch) if x.ndim), default=1)
    if rows < 2 or any(x.ndim and len(x) not in (1, rows) for x in tensors(batch)):
        return [batch], [batch], ""
    first = rows - max(1, rows // 5)

    def part(start: int, end: int) -> Arguments:
        def cut(x: object) -> object:
            return (
                x[start:end]
                if isinstance(x, Tensor) and x.ndim and len(x) == rows
                else x
            )

        args, kwargs = mapped(batch, cut)
        return args, kwargs

    return [part(0, first)], [part(first, rows)], f"{rows - first} of {rows} sequences"


def padding(shape: torch.Size, batch: Arguments) -> Tensor | None:
    """Returns the batch's attention_mask if it marks tokens [b t] of this shape."""
    mask = batch[1].get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.shape == shape else None


def divergence(old: Tensor, new: Tensor, batch: Arguments) -> Tensor:
    """Returns the mean over tokens of KL(old ‖ new), excluding tokens that an attention_mask marks as padding."""
    p, q = (torch.log_softmax(z.to(wide(z.dtype)), -1) for z in (old, new))
    return _mean_over_tokens((p.exp() * (p - q)).sum(-1), batch)


def squared_error(old: Tensor, new: Tensor, batch: Arguments) -> Tensor:
    """Returns the mean squared difference, excluding tokens that an attention_mask marks as padding."""
    squares = (new.to(wide(new.dtype)) - old.to(wide(old.dtype))).square()
    return _mean_over_tokens(squares.mean(-1) if squares.ndim > 2 else squares, batch)


def _mean_over_tokens(values: Tensor, batch: Arguments) -> Tensor:
    mask = padding(values.shape, batch)
    return (
        values.mean()
        if mask is None
        else (values * mask).sum() / mask.sum().clamp_min(1)
    )


def next_token_loss(logits: Tensor, batch: Arguments) -> tuple[float, int] | None:
    """Returns the next-token cross-entropy on the batch's own tokens with the number of tokens that it averages, or
    None if the batch has no tokens. Padding, and tokens whose label is -100, are left out."""
    tokens = _tokens(batch)
    if (
        tokens is None
        or logits.ndim != 3
        or logits.shape[:2] != tokens.shape
        or tokens.shape[1] < 2
    ):
        return None
    targets = tokens[:, 1:].long()
    mask, labels = padding(tokens.shape, batch), batch[1].get("labels")
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, _IGNORED)
    if isinstance(labels, Tensor) and labels.shape == tokens.shape:
        targets = targets.masked_fill(labels[:, 1:] == _IGNORED, _IGNORED)
    predicted = logits[:, :-1].flatten(0, 1)
    loss = float(
        nn.functional.cross_entropy(
            predicted.to(wide(predicted.dtype)), targets.flatten()
        )
    )
    return loss, int((targets != _IGNORED).sum())


def _tokens(batch: Arguments) -> Tensor | None:
    named = batch[1].get("input_ids")
    if isinstance(named, Tensor):
        return named
    candidates = {name: x for name, x in batch[1].items() if name not in _NOT_TOKENS}
    for x in tensors((batch[0], candidates)):
        if not x.is_floating_point() and x.ndim == 2:
            return x
    return None


@final
class Reference:
    """The old model's outputs on some batches, with which a changed model is compared."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Arguments]) -> None:
        self.model, self.batches = model, batches
        self.old = [predictions(model, batch) for batch in batches]
        self.kind = kind_of_outputs(model, self.old[0], batches[0])
        self.counts = [
            _count(output, batch, self.kind) for output, batch in zip(self.old, batches)
        ]
        self.losses = [
            next_token_loss(output, batch) for output, batch in zip(self.old, batches)
        ]
        self._variance = self._old_variance()

    def _old_variance(self) -> float:
        values = torch.cat([output.detach().flatten().double() for output in self.old])
        return float(values.var(correction=0)) or 1.0

    @property
    def loss(self) -> float | None:
        """The old model's next-token loss."""
        return weighted_mean(self.losses)

    def distance(self) -> Tensor:
        """Returns the distance of the model's current state, averaged over the tokens of all batches, with
        gradients."""
        distances = torch.stack(
            [
                self.distance_of(i, predictions(self.model, b))
                for i, b in enumerate(self.batches)
            ]
        )
        return weighted(
            distances,
            torch.tensor(self.counts, dtype=distances.dtype, device=distances.device),
        )

    def distance_of(self, index: int, new: Tensor) -> Tensor:
        """Returns the distance of the outputs for one batch, with gradients."""
        old, batch = self.old[index], self.batches[index]
        if self.kind == "classes":
            return divergence(old, new, batch)
        return squared_error(old, new, batch) / self._variance

    @torch.no_grad()
    def gap(self) -> Gap:
        """Returns the gap of the model's current state on all batches, per token."""
        distances: list[tuple[float, float]] = []
        losses: list[tuple[float, float] | None] = []
        for i, (batch, before) in enumerate(zip(self.batches, self.losses)):
            new = predictions(self.model, batch)
            distances.append((float(self.distance_of(i, new)), self.counts[i]))
            after = next_token_loss(new, batch)
            losses.append(
                None
                if after is None or before is None
                else (after[0] - before[0], after[1])
            )
        distance, loss = weighted_mean(distances) or 0.0, weighted_mean(losses)
        return (
            Gap(kl=distance, loss=loss)
            if self.kind == "classes"
            else Gap(kl=math.nan, error=distance, loss=loss)
        )


def _count(output: Tensor, batch: Arguments, kind: OutputKind) -> float:
    """Returns the number of tokens, or of numbers, over which the distance averages."""
    shape = output.shape[:-1] if kind == "classes" or output.ndim > 2 else output.shape
    mask = padding(shape, batch)
    return float(math.prod(shape) if mask is None else mask.sum())


def weighted_mean(values: Sequence[tuple[float, float] | None]) -> float | None:
    """Returns the mean of the batches' means, each weighted by its count; None if one is missing or nothing was
    counted."""
    if None in values:
        return None
    counted = list(_counted(values))  # a mean of nothing may be NaN
    if len({count for _, count in counted}) == 1:
        return sum(mean for mean, _ in counted) / len(counted)
    return (
        sum(mean * count for mean, count in counted)
        / sum(count for _, count in counted)
        if counted
        else None
    )


def _counted(
    values: Sequence[tuple[float, float] | None],
) -> Iterator[tuple[float, float]]:
    for value in values:
        if value is not None and value[1]:
            yield value


def weighted(means: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean over batches of means [n …], each weighted by its count [n …]."""
    if bool((counts == counts[:1]).all()):
        return means.mean(0)
    return (means * counts).sum(0) / counts.sum(0).clamp_min(1)
