"""Tags of the tensors between q kᵀ and a softmax: what each is known to be."""

from __future__ import annotations

import dataclasses
import weakref

import torch
from torch import Tensor

from qkeel.sites.handwritten.products import Product
from qkeel.sites.see.running_modules import Frame


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """A tag on a tensor of scores: its origin, hidden pairs, the logits before a cap, which columns are keys.

    `parts` are the products that they are the sum of, `lost` says what else is in them and could not be followed.
    `before_tanh` is the input of a tanh whose factor has not come yet. `keys` are the columns that are keys, where
    others (sinks) were attached. `unshifted` are the scores from which each row's largest, or its logsumexp
    (`normalised`), was subtracted. `below`: a function mode alone does not see all that happened to them.
    """

    parts: tuple[Product, ...]
    frame: Frame
    lost: tuple[str, ...] = ()
    hidden: Tensor | None = None
    uncapped: Tensor | None = None
    cap: float | None = None
    before_tanh: Tensor | None = None
    scale: float = 1.0
    keys: tuple[int, int] | None = None
    unshifted: Tensor | None = None
    normalised: bool = False
    below: bool = False

    @property
    def table(self) -> bool:
        """True if they are no scores by themselves: products with what may be a weight."""
        return all(part.table for part in self.parts)

    def also_hidden(self, more: Tensor, like: Tensor) -> Scores:
        """The same with more pairs hidden."""
        more = more.to(torch.bool).broadcast_to(like.shape)
        return dataclasses.replace(self, hidden=more if self.hidden is None else self.hidden | more)


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Tag of a softmax output that is on its way to the values; None for the site of one that is missed."""

    site: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RowTop:
    """Tag of the largest score of each row, or of its logsumexp, after whose subtraction exponentials sum to 1."""

    normalises: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """Tag of exponentials of scores x, which their row sum makes a softmax."""

    scores: Scores
    x: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lost:
    """Tag of what an operation made of scores that is not understood: a softmax over it is an attention all the same.

    `rows` and `columns` are the numbers of queries and keys of the scores: without dimensions of these sizes it is
    something else. `frame` is where the product was made.
    """

    operation: str
    frame: Frame
    rows: int
    columns: int

    def passes_to(self, out: Tensor) -> bool:
        """True if a tensor may be one number per query and key still."""
        sizes = list(out.shape)
        if self.rows not in sizes or not out.is_floating_point():
            return False
        sizes.remove(self.rows)
        return self.columns in sizes and out.ndim > 2


# A Product alone tags q·k number by number, before the sum over a head's dimensions.
Tag = Scores | Product | RowTop | Powers | Weights | Lost


class Tags:
    """Tags by the identity of a tensor, gone with it. Never by its address, which batched tensors don't have."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}

    def get(self, x: object) -> Tag | None:
        """The tag of a tensor."""
        entry = self._of.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: Tensor, tag: Tag) -> None:
        """Tag a tensor."""
        key, table = id(x), self._of

        def forget(dead: weakref.ref[Tensor]) -> None:
            entry = table.get(key)
            if entry is not None and entry[0] is dead:
                del table[key]

        self._of[key] = (weakref.ref(x, forget), tag)

    def of_scores(self) -> list[tuple[Tensor, Scores]]:
        """The tensors of scores that are there still, with their tags."""
        alive = [(ref(), tag) for ref, tag in self._of.values()]
        return [(x, tag) for x, tag in alive if x is not None and isinstance(tag, Scores)]

    def drop(self, x: Tensor) -> None:
        """Forget a tensor."""
        self._of.pop(id(x), None)

    def __bool__(self) -> bool:
        return bool(self._of)

    def clear(self) -> None:
        """Forget everything."""
        self._of.clear()
