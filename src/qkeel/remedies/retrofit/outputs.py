"""How far a changed model's outputs are from the old ones: as classes or as numbers, on data that was not fitted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.capture.example import Arguments, copied, mapped, tensors
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.remedies.retrofit.report import Gap

# What the outputs are: scores of classes, compared by KL, or numbers and channels, compared by squared error.
OutputKind = Literal["classes", "numbers"]

# a target that cross_entropy leaves out.
_IGNORED = -100
# Arguments of the same shape as the tokens.
_NOT_TOKENS = ("attention_mask", "position_ids", "token_type_ids")


def by_name(model: nn.Module, batch: Arguments) -> Arguments:
    """The batch with its positional arguments by name if forward names them all, as masks are known by their names."""
    args, kwargs = batch
    parameters = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    named = {parameter.name: value for parameter, value in zip(parameters, args)}
    is_named = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if len(named) < len(args) or not is_named or named.keys() & kwargs.keys():
        return batch
    return (), {**named, **kwargs}


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
    is_labelled = getattr(config, "num_labels", None) == classes
    holds_tokens = any(
        not x.is_floating_point() and x.ndim >= 2 for x in tensors(batch)
    )
    return "classes" if is_labelled or holds_tokens else "numbers"


def held_out(
    batches: Sequence[Arguments],
) -> tuple[list[Arguments], list[Arguments], str]:
    """Divides batches into those that are fitted and those on which the result is measured, a fifth, and says which.

    Of a single batch, rows are held out. A batch of one row, or one that does not show its rows, is measured itself.
    """
    n = len(batches)
    if n > 1:
        first = n - max(1, n // 5)
        return [*batches[:first]], [*batches[first:]], f"{n - first} of {n} batches"
    (batch,) = batches
    rows = max((len(x) for x in tensors(batch) if x.ndim), default=1)
    if rows < 2 or any(x.ndim and len(x) not in (1, rows) for x in tensors(batch)):
        return [batch], [batch], ""
    first = rows - max(1, rows // 5)

    def cut(start: int, end: int) -> Arguments:
        def rows_of(x: object) -> object:
            if isinstance(x, Tensor) and x.ndim and len(x) == rows:
                return x[start:end]
            return x

        args, kwargs = mapped(batch, rows_of)
        return args, kwargs

    return [cut(0, first)], [cut(first, rows)], f"{rows - first} of {rows} sequences"


def next_tokens(logits: Tensor, batch: Arguments) -> Tensor | None:
    """Returns the tokens [b t-1] that logits [b t vocabulary] predict, -100 where padding or a label leaves one out."""
    tokens = batch[1].get("input_ids")
    if tokens is None:
        others = {name: x for name, x in batch[1].items() if name not in _NOT_TOKENS}
        for x in tensors((batch[0], others)):
            if not x.is_floating_point() and x.ndim == 2:
                tokens = x
                break
    if (
        not isinstance(tokens, Tensor)
        or logits.ndim != 3
        or logits.shape[:2] != tokens.shape
        or tokens.shape[1] < 2
    ):
        return None
    targets = tokens.long()
    for name, left_out in (("attention_mask", 0), ("labels", _IGNORED)):
        marks = batch[1].get(name)
        if isinstance(marks, Tensor) and marks.shape == tokens.shape:
            targets = targets.masked_fill(marks == left_out, _IGNORED)
    return targets[:, 1:]


@final
class Reference:
    """The old model's outputs on some batches, with which a changed model is compared.

    All means are over the tokens of all batches together, however many each batch has."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Arguments]) -> None:
        self.model, self.batches = model, batches
        self.old = [predictions(model, batch) for batch in batches]
        self.kind = kind_of_outputs(model, self.old[0], batches[0])
        # Error is a share of the old outputs' variance, so that units don't matter.
        values = torch.cat([output.flatten().double() for output in self.old])
        # Outputs that are all equal have no variance to divide by.
        self._variance = float(values.var(correction=0)) or 1.0
        self.loss = self._loss(self.old)  #: the old model's next-token loss

    def distance(self) -> Tensor:
        """Returns the distance of the model's current state, averaged over the tokens of all batches, with
        gradients."""
        return self._distance([predictions(self.model, b) for b in self.batches])

    @torch.no_grad()
    def gap(self) -> Gap:
        """Returns the gap of the model's current state on all batches, per token."""
        outputs = [predictions(self.model, batch) for batch in self.batches]
        distance, loss = float(self._distance(outputs)), self._loss(outputs)
        change = None if loss is None or self.loss is None else loss - self.loss
        if self.kind == "classes":
            return Gap(kl=distance, loss=change)
        return Gap(kl=math.nan, error=distance, loss=change)

    def _distance(self, outputs: Sequence[Tensor]) -> Tensor:
        sums, counts = [], []
        for old, new, batch in zip(self.old, outputs, self.batches):
            old, new = (x.to(wide(x.dtype)) for x in (old, new))
            if self.kind == "classes":
                p, q = (x.log_softmax(-1) for x in (old, new))
                values = (p.exp() * (p - q)).sum(-1)
            else:
                values = (new - old).square() / self._variance
                values = values.mean(-1) if values.ndim > 2 else values
            mask = batch[1].get("attention_mask")
            if not isinstance(mask, Tensor) or mask.shape != values.shape:
                mask = torch.ones_like(values)
            sums.append((values * mask).sum())
            counts.append(mask.sum())
        return torch.stack(sums).sum() / torch.stack(counts).sum().clamp_min(1)

    def _loss(self, outputs: Sequence[Tensor]) -> float | None:
        total = count = 0.0
        for logits, batch in zip(outputs, self.batches):
            targets = next_tokens(logits, batch)
            if targets is None:
                return None
            predicted = logits[:, :-1].flatten(0, 1)
            total += float(
                nn.functional.cross_entropy(
                    predicted.to(wide(predicted.dtype)),
                    targets.flatten(),
                    reduction="sum",
                )
            )
            count += int((targets != _IGNORED).sum())
        return total / count if count else None
