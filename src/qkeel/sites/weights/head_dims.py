"""The dimensions of q or k that are heads, found by experiment: slices along them are made of different features.

A dimension whose slices use the same features of a projection holds sequences, windows or tokens. Each slice gets a
number, and one gradient for each bit of these numbers shows which slice uses which feature at which token: for m
slices log₂ m gradients, which stop at the projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from qkeel.patching.modes import no_operators_seen
from qkeel.sites.calls.head_layout import Layout
from qkeel.sites.handwritten.products import Operand
from qkeel.sites.see.running_modules import Frame
from qkeel.sites.weights.autograd_walk import WHOLE_NORMS, Projection, Walk, nodes_of, walk

Split = tuple[int, int, int]  # of a dimension: the slowest part, heads, the fastest part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The factors of a product of scores that are queries and keys."""

    query: Operand
    key: Operand


def layout_of(sides: Sides, shape: torch.Size, keys: int, frame: Frame, names: dict[int, str]) -> Layout | None:
    """The layout of scores of this shape, softmax over dimension `keys`; None if the experiment does not show it.

    Heads are the dimensions along which q changes its features, or k where q does not change at all. Of the others
    the queries are the last along which k does not change; without such a one, the last but one of all.
    """
    walks = [_walk(side, frame, names) for side in (sides.query, sides.key)]
    splits: dict[int, Split] = {}
    for dim in range(len(shape)):
        if dim == keys:
            continue
        pairs = [(s, w) for s, w in zip((sides.query, sides.key), walks) if shape[dim] == 1 or s.varies(dim)]
        split = next((_split_of(s, w, dim, keys) for s, w in pairs if w is not None or shape[dim] == 1), None)
        if split is None and not pairs:
            split = (shape[dim], 1, 1)
        if split is None:
            return None
        splits[dim] = split
    return _read(sides, walks[1], splits, keys)


def _walk(side: Operand, frame: Frame, names: dict[int, str]) -> Walk | None:
    """The walk from a factor to its projections, None where there are none."""
    if side.x.grad_fn is None:
        return None
    for f in frame.line():
        found = walk(side.x.grad_fn, nodes_of(f.inputs), names)
        if found.nearest:
            return found
    return None


def _split_of(side: Operand, found: Walk | None, dim: int, keys: int) -> Split | None:
    assert side.index is not None
    size = side.index.shape[dim]
    if size == 1:
        return (1, 1, 1)
    assert found is not None
    index = side.index if dim == keys else side.index.narrow(keys, side.index.shape[keys] - 1, 1)
    index = _small(index, dim)
    return split_by_heads(side.vectors()[index.clamp_min(0)], dim, found)


def _small(index: Tensor, dim: int) -> Tensor:
    """The index with one number along every dimension over which it is the same, but for `dim`."""
    for i, step in enumerate(index.stride()):
        if step == 0 and i != dim and index.shape[i] > 1:
            index = index.narrow(i, 0, 1)
    return index


def _read(sides: Sides, key: Walk | None, splits: Mapping[int, Split], keys: int) -> Layout | None:
    """The layout from how heads are merged into each dimension."""
    groups = ["b"] * (len(splits) + 1)
    groups[keys] = "s"
    heads = [d for d, split in splits.items() if split[1] > 1]
    others = [d for d in splits if d not in heads]
    free = [d for d in splits if sides.query.varies(d) and not sides.key.varies(d)]
    rows = next((d for d in reversed(free) if d in others), None)
    letter = dict.fromkeys(splits, "b")  # of what a dimension holds besides heads
    if rows is None:
        merged = [d for d in free if d in heads and splits[d][1] < splits[d][0] * splits[d][1] * splits[d][2]]
        channels = [d for d in free if d in heads] if _are_features(sides.key, key, keys) else []
        if merged:
            letter[merged[-1]] = "t"
        elif channels:
            rows = channels[-1]
            heads.remove(rows)
        elif len(others) > 1 or (others and sum(splits[d] == (1, 1, 1) for d in others)):
            rows = others[-1]
    for d in heads:
        before, _, after = splits[d]
        if before > 1 and after > 1:
            return None
        groups[d] = (letter[d] if before > 1 else "") + "h" + (letter[d] if after > 1 else "")
    if rows is not None:
        groups[rows] = "t"
    sizes = tuple(splits[d][1] for d in sorted(heads))
    return Layout(groups=tuple(groups), sizes=sizes, headless=not heads and len(groups) == 3)


def _are_features(side: Operand, found: Walk | None, keys: int) -> bool:
    """True if the softmax runs over features, as in attention between channels: keys are made of different ones."""
    split = None if found is None else _split_of(side, found, keys, keys)
    return split is not None and split[1] > 1


def split_by_heads(x: Float[Tensor, ...], dim: int, found: Walk) -> Split | None:
    """The parts that a dimension of x consists of, with its heads; (m, 1, 1) if all slices use the same features.

    None where that cannot be said: no feature is reached, or features are shared by some slices and not by others.
    """
    size = x.shape[dim]
    splits: set[Split] = set()
    reached = size == 1
    for projection in found.nearest:
        with opened(found.mixers), only(projection, found.nearest):
            used = _used(x, dim, projection)
        if used is None or not bool(used.any()):
            continue
        reached = True
        split = _split(used)
        if split is None:
            return None
        splits.add(split)
        if split == (size, 1, 1) and projection.convolves:
            # One that is the same for all heads, as where keys are pooled: they are those of what is pooled.
            with opened(found.mixers), only(projection, found.nearest):
                made = [_used(x, dim, upper) for upper in projection.above]
            splits |= {split for used in made if used is not None and used.any() and (split := _split(used))}
    heads = {split for split in splits if split[1] > 1}
    if len(heads) > 1 or not reached:
        return None
    return heads.pop() if heads else (size, 1, 1)


def _used(x: Tensor, dim: int, projection: Projection) -> Bool[Tensor, "m features"] | None:
    """The features that each slice along a dimension uses; None where one number at one token is used by several."""
    size = x.shape[dim]
    numbers = torch.arange(1, size + 1, device=x.device)
    weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    weights = weights.to(x)
    shape = [size if i == dim % x.ndim else 1 for i in range(x.ndim)]
    codes: Tensor | None = None
    for bit in range(size.bit_length()):
        own = ((numbers >> bit) & 1).view(shape).to(x)
        with no_operators_seen():
            grad = torch.autograd.grad(
                x, GradientEdge(projection.node, 0), weights * own, retain_graph=True, allow_unused=True
            )[0]
        if grad is None:
            return None
        part = projection.by_feature(grad).ne(0).long() << bit
        codes = part if codes is None else codes | part
    assert codes is not None
    found = torch.zeros(1 << size.bit_length(), codes.shape[1], dtype=torch.bool, device=x.device)
    found.scatter_(0, codes, True)
    return None if bool(found[size + 1 :].any()) else found[1 : size + 1]


def _split(used: Bool[Tensor, "m features"]) -> Split | None:
    """The split of m slices by the features that they use."""
    kinds = used[:, used.any(0)].unique(dim=1)
    size, n = kinds.shape
    if n == 1:
        return (size, 1, 1)
    if not bool((kinds.sum(1) == 1).all()):
        return None
    kind = kinds.long().argmax(1)
    run = int((kind == kind[0]).long().cumprod(0).sum())
    if size % (n * run):
        return None
    grid = kind.view(-1, n, run)
    even = bool((grid == grid[:1, :, :1]).all())
    return (size // (n * run), n, run) if even else None


@contextmanager
def only(one: Projection, among: Sequence[Projection]) -> Iterator[None]:
    """While it lasts gradients do not pass the others: what reaches a projection came to it directly."""
    with ExitStack() as undo:
        for other in among:
            if other.node is not one.node:
                undo.callback(other.node.register_prehook(_nothing).remove)
        yield


@contextmanager
def opened(nodes: Sequence[Node]) -> Iterator[None]:
    """While it lasts gradients pass norms as if these multiplied by a constant."""
    with ExitStack() as undo:
        for node in nodes:
            undo.callback(_pass_through(node).remove)
        yield


def _pass_through(node: Node) -> RemovableHandle:
    if node.name() in WHOLE_NORMS:
        return node.register_hook(_as_factor)
    return node.register_prehook(_nothing)


def _as_factor(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    first = outputs[0]
    if first is None or inputs[0] is None:
        return inputs
    return (first.reshape(inputs[0].shape), *inputs[1:])


def _nothing(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else torch.zeros_like(g) for g in grads)
