"""The place of the heads in a tensor of scores: a dimension of their own, several, or one merged with the batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The dimensions of scores in letters: b batch, h heads, t queries, s keys; "bh" is one of both, merged.

    `sizes` are those of the dimensions h, in order; any number of dimensions may be b. `headless`: the scores of one
    head of several. `guess` says why the layout is a guess from the shape of the scores, "" where it is none.
    """

    groups: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    headless: bool = False
    guess: str = ""

    def __str__(self) -> str:
        return " ".join(g if len(g) == 1 else f"({' '.join(g)})" for g in self.groups)

    @property
    def keys(self) -> int:
        """The dimension of the keys."""
        return next(i for i, group in enumerate(self.groups) if "s" in group)

    def fitted(self, shape: torch.Size) -> Layout | None:
        """The layout of other scores of the same site, of this shape; None if they have another one.

        Heads that were a dimension of their own on one sequence may be merged with the batch in fact.
        """
        if len(shape) != len(self.groups):
            return None
        sizes, groups = iter(self.sizes), list(self.groups)
        for place, (n, group) in enumerate(zip(shape, self.groups)):
            heads = math.prod([next(sizes) for letter in group if letter == "h"])  # torch.compile takes no generator
            if n % heads or (n != heads and group == "h" and len(shape) > 3):
                return None
            if n != heads and group == "h":
                groups[place] = "bh"
        return self if groups == list(self.groups) else dataclasses.replace(self, groups=tuple(groups))

    def apply(self, x: Shaped[Tensor, ...]) -> Shaped[Tensor, "b h t s"]:
        """[b h t s] of a tensor with the scores' dimensions."""
        if self.groups == ("b", "h", "t", "s"):
            return x
        sizes, order = self._single(x.shape)
        letters = "".join(self.groups)
        shape = [math.prod([n for n, letter in zip(sizes, letters) if letter == role]) for role in "bhts"]
        return x.reshape(sizes).permute(order).reshape(shape)

    def undo(self, x: Shaped[Tensor, "b h t s"], shape: Sequence[int]) -> Shaped[Tensor, ...]:
        """A tensor of this shape with the scores' dimensions, of one [b h t s]: the opposite of `apply`."""
        if self.groups == ("b", "h", "t", "s"):
            return x
        sizes, order = self._single(shape)
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([sizes[i] for i in order]).permute(back).reshape(list(shape))

    def _single(self, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """The sizes of single letters in a tensor of this shape, and their places in the order b, h, t, s."""
        heads, sizes = iter(self.sizes), []
        for n, group in zip(shape, self.groups):
            parts = [next(heads) if letter == "h" else 1 for letter in group]
            rest = n // math.prod(parts) if len(group) > 1 else n
            sizes += [part if letter == "h" and len(group) > 1 else rest for letter, part in zip(group, parts)]
        letters = "".join(self.groups)
        return sizes, [i for role in "bhts" for i, letter in enumerate(letters) if letter == role]


def head_counts(module: nn.Module) -> frozenset[int]:
    """Numbers that the module, or its configuration, calls heads: a hint where a shape alone is ambiguous."""
    holders = [vars(module)]
    config = vars(module).get("config")
    if config is not None and not isinstance(config, (dict, str, int, float)):
        holders.append(vars(config))
    found: set[int] = set()
    for holder in holders:
        for name, value in holder.items():
            if "head" in name and "dim" not in name and type(value) is int and value > 0:
                found.add(value)
    return frozenset(found)


def layout(
    shape: Sequence[int], hints: frozenset[int], batch: int, keys: int | None = None, rows: int | None = None
) -> Layout:
    """The layout of scores of this shape, guessed from numbers that are called heads and from the batch size.

    Args:
        shape: of the scores.
        hints: see `head_counts`.
        batch: first size of the module's input, 0 if unknown.
        keys: the dimension of the softmax, by default the last.
        rows: the dimension of the queries, by default the last but that.
    """
    n = len(shape)
    keys = n - 1 if keys is None else keys
    rows = max((i for i in range(n) if i != keys), default=keys) if rows is None else rows
    places = [i for i in range(n) if i not in (keys, rows)]
    lead = [shape[i] for i in places]
    letters, sizes, certain = _lead(lead, hints, batch)
    groups = ["b"] * n
    groups[keys], groups[rows] = "s", "t"
    for place, letter in zip(places, letters):
        groups[place] = letter
    headless = not sizes and len(lead) < 2
    guess = "" if certain else f"scores of shape {tuple(shape)} do not show which dimension is heads"
    return Layout(groups=tuple(groups), sizes=sizes, headless=headless, guess=guess)


def _lead(lead: Sequence[int], hints: frozenset[int], batch: int) -> tuple[list[str], tuple[int, ...], bool]:
    """The letters of the dimensions before those of queries and keys, the sizes of heads, and whether it is sure."""
    n = len(lead)
    if n == 0:
        return [], (), True
    if n == 1:
        return _merged(lead[0], hints, batch)
    if n == 2:
        if lead[1] == batch != lead[0] and lead[1] not in hints:
            return ["h", "b"], (lead[0],), True
        certain = lead[0] == batch != lead[1] or (lead[1] in hints and lead[0] not in hints)
        return ["b", "h"], (lead[1],), certain or 1 in lead
    if lead[1] * lead[2] in hints:
        return ["b", "h", "h", *"b" * (n - 3)], (lead[1], lead[2]), True
    for place in (1, 2, 0):
        if lead[place] in hints:
            letters = ["h" if i == place else "b" for i in range(n)]
            return letters, (lead[place],), sum(size == lead[place] for size in lead) == 1
    return ["b", "h", "h", *"b" * (n - 3)], (lead[1], lead[2]), False


def _merged(size: int, hints: frozenset[int], batch: int) -> tuple[list[str], tuple[int, ...], bool]:
    for n in sorted(hints, reverse=True):
        if batch and size == n * batch:
            return ["bh"], (n,), True
    if batch and size > batch and size % batch == 0:
        return ["bh"], (size // batch,), False
    if size == batch:
        return ["b"], (), True
    split = max((n for n in hints if size % n == 0), default=size)
    return ["bh"], (split,), False


def fewest_keys(k: Float[Tensor, "b h s d"]) -> Float[Tensor, "b g s d"]:
    """[b g s d] of keys [b h s d] repeated for grouped queries in blocks: g heads that differ."""
    h = k.shape[1]
    if not bool(k.any()):
        return k
    for r in (r for r in range(h, 1, -1) if h % r == 0):
        groups = k.unflatten(1, (h // r, r))
        if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
            return groups[:, :, 0]
    return k


def known_keys(heads: tuple[int, int], k: Float[Tensor, "b h s d"]) -> Float[Tensor, "b g s d"]:
    """The same where it is known how many query and key heads there are: nothing is compared."""
    n, groups = heads
    return k.unflatten(1, (groups, n // groups))[:, :, 0] if k.shape[1] == n != groups else k


def key_heads(k: Float[Tensor, "b h s d"]) -> tuple[int, ...] | None:
    """The key head of each query head where keys are repeated for them in another order than blocks; else None.

    Key heads are numbered in the order in which the query heads use them; each must serve equally many.
    """
    h = k.shape[1]
    if h < 3 or not bool(k.any()):
        return None
    _, same = k.detach().transpose(0, 1).flatten(1).unique(dim=0, return_inverse=True)
    order = list(dict.fromkeys(same.tolist()))
    found = tuple(order.index(i) for i in same.tolist())
    counts = {found.count(j) for j in range(len(order))}
    return found if 1 < len(order) < h and len(counts) == 1 and list(found) != sorted(found) else None
