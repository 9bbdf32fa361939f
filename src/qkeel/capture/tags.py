"""What a tensor is on the way from q kᵀ to the values: scores, what a softmax makes of them, or something lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from qkeel.capture.calls import ScoresCall
from qkeel.capture.example import ModuleCall
from qkeel.capture.products import Product
from qkeel.patching.modes import Args, Kwargs

SCALES = frozenset({"mul", "multiply", "rmul", "div", "divide", "true_divide"})
JOINS = frozenset({"cat", "concat"})
# Fields of scores that hold logits.
LOGITS = ("bias", "uncapped", "unshifted")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """A tensor of scores.

    Args:
        products: the products whose sum the scores are.
        frame: the module call in which they were made.
        scale: the constant by which the products were multiplied.
        hidden: the pairs that masks have hidden, or None.
        bias: what was added to the products before a cap, apart from masks, or None.
        uncapped: the logits before a tanh cap, and `cap` its bound.
        keys: the range of columns that are keys, if others, such as a sink, were attached.
        unshifted: the scores before each row's largest or its logsumexp was subtracted.
        normalised: whether it was the logsumexp, so that the exponentials are weights.
    """

    products: tuple[Product, ...]
    frame: ModuleCall
    scale: float = 1.0
    hidden: Tensor | None = None
    bias: Tensor | None = None
    uncapped: Tensor | None = None
    cap: float | None = None
    keys: tuple[int, int] | None = None
    unshifted: Tensor | None = None
    normalised: bool = False

    @property
    def only_tables(self) -> bool:
        """True if all products have a possible weight as a factor, so that they are features by themselves."""
        return all(product.table for product in self.products)

    def hiding(self, mask: Tensor, scores: Tensor) -> Scores:
        """The tag with more pairs hidden."""
        mask = mask.to(torch.bool).broadcast_to(scores.shape)
        return dataclasses.replace(
            self, hidden=mask if self.hidden is None else self.hidden | mask
        )

    def beside(
        self, names: Iterable[str], change: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The tensors of these names that stand beside the scores, as far as there are any, after a change."""
        tensors = {name: getattr(self, name) for name in names}
        return {name: change(x) for name, x in tensors.items() if x is not None}

    def multiplied(self, factor: float) -> Scores:
        """The tag of the scores times a constant; after a cap, the bound grows by it as the logits before the cap
        do."""
        return dataclasses.replace(
            self,
            scale=self.scale if self.cap is not None else self.scale * factor,
            cap=None if self.cap is None else self.cap * abs(factor),
            **self.beside(LOGITS, lambda x: x * factor),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a call on their way to the values. `call` is None if they could not be read; `reason` says why
    this has not been reported yet."""

    call: WaitingCall | None = None
    reason: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class WaitingCall:
    """A call that was read at its softmax and is reported once its weights meet the values, or when the module ends.

    Scores without a batch dimension (`is_matrix`) may be similarities of samples, so they have to meet values. `dim` is
    the dimension over which torch's softmax ran, and `strides` are those of its output.
    """

    frame: ModuleCall
    call: ScoresCall
    is_matrix: bool
    dim: int | None = None
    strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RowTop:
    """The largest score of each row, or its logsumexp, after whose subtraction the exponentials sum to one."""

    normalises: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """Exponentials of scores x, which become weights once they are divided by their sum."""

    scores: Scores
    x: Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSum:
    """The sums of the rows of exponentials."""

    powers: Powers
    exponentials: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lost:
    """The result of an operation on scores that is not understood; `columns` is the number of keys.

    `is_foreign` is True for a softmax over scores that no product of queries and keys was seen to make.
    """

    operation: str
    frame: ModuleCall
    columns: int
    products: tuple[Product, ...] = ()
    is_foreign: bool = False

    def holds(self, x: Tensor) -> bool:
        """True if a tensor may hold one value per query and key."""
        return x.ndim > 1 and x.is_floating_point() and self.columns in x.shape


Tag = Scores | Weights | RowTop | Powers | RowSum | Lost


class Tags(WeakIdKeyDictionary):
    """Tags by the identity of a tensor, which end with it."""

    def get(self, key: object, default: None = None) -> Tag | None:
        """The tag of a tensor, and None for anything else."""
        return super().get(key, default) if isinstance(key, Tensor) else default


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A call of a torch function in a pass, with its name without outer underscores, and what it returned."""

    name: str
    frame: ModuleCall
    args: Args
    kwargs: Kwargs
    out: Any

    def argument(self, name: str, position: int, default: object = None) -> Any:
        """The argument of this name or at this position."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def arguments(self) -> list[Any]:
        """All arguments; those of a concatenation are the tensors that it joins."""
        if self.name in JOINS or self.name == "stack":
            return list(self.argument("tensors", 0))
        return [*self.args, *self.kwargs.values()]

    def operand(self, x: Tensor) -> Any:
        """The other operand of a function of two."""
        for key, value in (*enumerate(self.args), *self.kwargs.items()):
            if value is not x and key not in ("alpha", "out"):
                return value
        return x

    def dim(self, x: Tensor) -> int:
        """The dimension of x over which a softmax runs."""
        dim = self.argument("dim", 1, -1)
        return dim % x.ndim if isinstance(dim, int) else x.ndim - 1

    def is_over_last(self, x: Tensor) -> bool:
        """True for a reduction over the last dimension of x only."""
        dim = self.argument("dim", 1)
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        return type(dim) is int and dim % x.ndim == x.ndim - 1

    def constant(self, x: Tensor) -> float | None:
        """The constant by which a function multiplies x, or None if it does not, or by a tensor."""
        if self.name not in SCALES:
            return None
        operand = self.operand(x)
        if isinstance(operand, Tensor) and not isinstance(operand, nn.Parameter):
            operand = float(operand.detach()) if operand.numel() == 1 else operand
        if isinstance(operand, bool) or not isinstance(operand, (int, float)):
            return None
        return 1.0 / operand if "div" in self.name else float(operand)
