"""How far a changed model's outputs are from the old ones: as classes or as numbers, on data that was not fitted."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.capture.example import Arguments, copied, mapped, tensors
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.remedies.retrofit.report import Gap

_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_BESIDE_TOKENS = re.compile("mask|position|type_ids|segment")
# What the outputs are: scores of classes, compared by KL, or numbers and channels, compared by squared error.
OutputKind = Literal["classes", "numbers"]


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
    args, kwargs = batch
    # Masks and positions are whole numbers of every token too, but none that a model would predict.
    named = [x for name, x in kwargs.items() if not _BESIDE_TOKENS.search(name)]
    holds_tokens = any(
        x.dtype in _WHOLE_NUMBERS and x.ndim >= 2 for x in tensors((args, named))
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

    def distance(self) -> Tensor:
        """Returns the distance of the model's current state, averaged over the tokens of all batches, with
        gradients."""
        sums, counts = [], []
        for old, batch in zip(self.old, self.batches):
            new = predictions(self.model, batch)
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

    @torch.no_grad()
    def gap(self) -> Gap:
        """Returns the gap of the model's current state on all batches, per token."""
        distance = float(self.distance())
        if self.kind == "classes":
            return Gap(kl=distance)
        return Gap(kl=math.nan, error=distance)
