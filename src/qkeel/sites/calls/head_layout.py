"""The place of the heads in a tensor of scores: merged with the batch, a dimension of their own, or grouped."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The dimensions that turn scores [... t s] into [b h t s]: batch and head, or the first split into (b, split)."""

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    split: int = 0
    headless: bool = False

    def apply(self, x: Shaped[Tensor, ...]) -> Shaped[Tensor, "b h t s"]:
        """[b h t s] of a tensor with the scores' leading dimensions."""
        if self.split:
            return x.unflatten(0, (-1, self.split))
        n = x.ndim
        ordered = x.permute(*self.batch, *self.heads, n - 2, n - 1)
        b = math.prod(x.shape[i] for i in self.batch)
        h = math.prod(x.shape[i] for i in self.heads)
        return ordered.reshape(b, h, *x.shape[-2:])


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


def layout(shape: torch.Size, hints: frozenset[int], batch: int) -> Layout:
    """The layout of scores of this shape, softmax over the last dimension.

    Args:
        shape: of the scores.
        hints: see `head_counts`.
        batch: first size of the module's input, 0 if unknown.
    """
    lead = shape[:-2]
    if len(lead) == 0:
        return Layout(batch=(), heads=(), headless=True)
    if len(lead) == 1:
        return _merged(lead[0], hints, batch)
    if len(lead) == 2:
        first = lead[0] in hints and lead[1] not in hints and lead[1] == batch
        return Layout(batch=(1,), heads=(0,)) if first else Layout(batch=(0,), heads=(1,))
    if lead[1] * lead[2] in hints:
        return Layout(batch=(0, *range(3, len(lead))), heads=(1, 2))
    for place in (1, 2, 0):
        if lead[place] in hints:
            return Layout(batch=tuple(i for i in range(len(lead)) if i != place), heads=(place,))
    return Layout(batch=(0, *range(3, len(lead))), heads=(1, 2))


def _merged(size: int, hints: frozenset[int], batch: int) -> Layout:
    for n in sorted(hints, reverse=True):
        if batch and size == n * batch:
            return Layout(batch=(), heads=(), split=n)
    if batch and size > batch and size % batch == 0:
        return Layout(batch=(), heads=(), split=size // batch)
    if size == batch:
        return Layout(batch=(0,), heads=(), headless=True)
    split = max((n for n in hints if size % n == 0), default=size)
    return Layout(batch=(), heads=(), split=split)


def fewest_keys(k: Float[Tensor, "b h s d"]) -> Float[Tensor, "b g s d"]:
    """[b g s d] of keys [b h s d] repeated for grouped queries: g heads that differ."""
    h = k.shape[1]
    if not bool(k.any()):
        return k
    for r in (r for r in range(h, 1, -1) if h % r == 0):
        groups = k.unflatten(1, (h // r, r))
        if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
            return groups[:, :, 0]
    return k
