"""Which rows of which weights belong to a head, and the shares of a factor that each weight takes."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from jaxtyping import Int64
from torch import Tensor

from qkeel import dist
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice, across
from qkeel.kernels.native import operators
from qkeel.kernels.triton import available
from qkeel.patching.modes import copy_to_all, lerp_all_in_place, multiply_all

# The rows of heads of many weights, copied, measured and scaled by a number of operators that does not grow.

WeightShare = tuple[int, HeadSlice]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadView:
    """Rows of a weight or bias as a view [n r m], with one factor for each of the n.

    `shares` are the numbers of the entries it belongs to, with their slices. The n are the heads of its one slice, or,
    in a `whole` view, the rows of the whole tensor, if its slices overlap without being equal or have no view. For a
    weight that is split over processes the view shows the rows of this process's part, which are its `span`.
    """

    weight: Tensor
    shares: tuple[WeightShare, ...]
    whole: bool
    span: dist.Span | None = None

    def view(self, like: Tensor | None = None) -> Tensor:
        """Returns the rows as a view of the weight, or of another tensor of its shape."""
        weight, own = dist.local(self.weight if like is None else like).detach(), self.shares[0][1]
        return own.rows_of(weight)[:, None] if self.whole else own.heads(weight)

    def places(self, counts: Sequence[int]) -> Tensor:
        """Returns the indices [n most] of the heads that own each row; the last index for rows without an owner.

        They are places in one row of numbers: one per head, entry after entry, and one more at the end. `counts` are
        the numbers of heads of the entries.
        """
        *firsts, last = itertools.accumulate(counts, initial=0)
        own = [(s, torch.arange(s.n) + firsts[i]) for i, s in self.shares]
        if not self.whole:
            return torch.stack([heads for _, heads in own], 1)
        rows = self.weight.shape[self.shares[0][1].axis]
        found = torch.stack([s.lines(heads, rows, nobody=last) for s, heads in own], 1)
        # A row with an owner repeats that owner's place for the missing ones, so that the last place does not count.
        found = torch.where(found == last, found.amin(1, keepdim=True), found)
        return found if self.span is None else found[slice(*self.span)]


def stacked(tables: Sequence[Tensor]) -> Tensor:
    """Stacks tables of indices; shorter rows repeat their first index."""
    most = max(t.shape[1] for t in tables)
    return torch.cat([torch.cat([t, t[:, :1].expand(-1, most - t.shape[1])], 1) for t in tables])


def head_views(weight: Tensor, shares: Sequence[WeightShare]) -> list[HeadView]:
    """Returns the fewest views that hold every row of the slices once, and other rows only if unavoidable."""
    if weight.ndim == 1:  # a bias has no columns
        shares = [(i, dataclasses.replace(s, axis=0)) for i, s in shares]
    groups: list[list[WeightShare]] = []
    for i, s in shares:
        group = next((g for g in groups if g[0][1].same(s)), None)
        if group is None:
            groups.append(group := [])
        group.append((i, s))
    numbers = torch.cat([g[0][1].index.flatten() for g in groups])
    disjoint = numbers.unique().numel() == numbers.numel()
    part = dist.local_block(shares[0][1].parameter, weight)
    if part is not None:
        return [HeadView(weight=weight, shares=tuple(shares), whole=True, span=part.spans[shares[0][1].axis])]
    if not disjoint or any(g[0][1].grid is None for g in groups):
        return [HeadView(weight=weight, shares=tuple(shares), whole=True)]
    return [HeadView(weight=weight, shares=tuple(g), whole=False) for g in groups]


def views_by_tensor(
    tensors: Sequence[Tensor | None], slices: Sequence[HeadSlice]
) -> list[tuple[Tensor, list[int], list[HeadView]]]:
    """Returns each tensor once, with its entries and the views of their rows."""
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            found.setdefault(id(tensor), (tensor, []))[1].append(i)
    return [
        (tensor, entries, head_views(tensor, [(i, slices[i]) for i in entries])) for tensor, entries in found.values()
    ]


def factor_per_row(shares: Sequence[tuple[HeadSlice, Tensor]], weight: Tensor) -> Tensor:
    """Returns one tensor with the per-head factors of all slices of a weight or bias; it broadcasts against the weight.

    Rows that no head owns get 1. Rows that several slices own, as in a weight that layers share, get the smallest."""
    axis = shares[0][0].axis if weight.ndim > 1 else 0
    rows = len(shares[0][0].rows_of(weight))
    if len(shares) == 1:
        lines = shares[0][0].lines(shares[0][1], rows)
    else:
        lines = torch.stack([s.lines(factor, rows, nobody=torch.inf) for s, factor in shares]).amin(0)
        lines = torch.where(lines.isinf(), 1.0, lines)
    return across(lines, axis, weight)


WeightNorm = Callable[[Tensor], Tensor]


def frobenius_norm(heads: Tensor) -> Tensor:
    """Returns ‖W^h‖_F of each head's part: [… r m] to […]."""
    return torch.linalg.vector_norm(heads, dim=(-2, -1))


class HeadGroup(abc.ABC):
    """Views [n r m] of weights of one device and dtype, with a factor for each of their n heads or rows.

    A factor is the smallest of the numbers at its places in a row; `tables` [n places] hold the places of each view.
    What a step needs is in tensors that keep their memory, so a CUDA graph can hold it.
    """

    def __init__(self, views: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        self.views = list(views)
        self._places = stacked(tables).to(views[0].device)
        self._factors = views[0].new_ones(len(self._places), dtype=wide(views[0].dtype))

    def fill(self, row: Tensor, to: Tensor) -> None:
        """Writes into `to` the smallest number of the row at the indices of each factor."""
        torch.amin(row.to(to)[self._places], 1, out=to)

    @abc.abstractmethod
    def copy(self, measure: WeightNorm | None) -> list[Tensor]:
        """Keeps a copy until `interpolate` or `forget`; returns the measures of all n in one tensor, or nothing."""

    @abc.abstractmethod
    def decay(self, row: Tensor) -> None:
        """Multiplies the copies."""

    @abc.abstractmethod
    def interpolate(self, row: Tensor) -> None:
        """Sets w ← old + f · (w - old); at factor 1 the weights stay."""

    @abc.abstractmethod
    def scale(self, row: Tensor, *, on_host: bool = False) -> None:
        """Sets w ← f · w. With `on_host` the host reads the factors and skips those that are 1."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Drops the copies."""


@final
class _ListGroup(HeadGroup):
    """Uses torch's operators on lists. Views of one shape have one copy, which is dense and is what is measured."""

    def __init__(self, views: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        super().__init__(views, tables)
        self._keeps = torch.ones_like(self._factors)
        self._columns, self._keep_columns = (
            [x.view(-1, 1, 1) for x in row.split([len(v) for v in views])] for row in (self._factors, self._keeps)
        )
        self._shapes = [(key, len(list(same))) for key, same in itertools.groupby(self.views, form)]
        self._stacks: list[Tensor] = []
        self._olds: list[Tensor] = []

    def copy(self, measure: WeightNorm | None) -> list[Tensor]:
        like = self.views[0]
        if not self._stacks:
            self._stacks = [
                torch.empty_permuted((n, *shape), (0, *layout), dtype=like.dtype, device=like.device)
                for (shape, layout), n in self._shapes
            ]
            self._olds = [old for stack in self._stacks for old in stack.unbind(0)]
        copy_to_all(self._olds, self.views)
        return [] if measure is None else [torch.cat([measure(stack).flatten() for stack in self._stacks])]

    def decay(self, row: Tensor) -> None:
        self.fill(row, self._keeps)
        multiply_all(self._olds, self._keep_columns)

    def interpolate(self, row: Tensor) -> None:
        # From the new weight towards the old one, in place: what 1 - f rounds away of f is 2⁻²⁵ of the whole step.
        self.fill(row, self._factors)
        self._factors.neg_().add_(1)
        lerp_all_in_place(self.views, self._olds, self._columns)
        self.forget()

    def scale(self, row: Tensor, *, on_host: bool = False) -> None:
        self.fill(row, self._factors)
        if on_host:
            self._scale_some()
        else:
            multiply_all(self.views, self._columns)

    def _scale_some(self) -> None:
        """Scales the heads whose factor is not 1, one by one.

        For a sixth of the heads of 28 matrices of 1024 x 1024 that takes 2.7 ms. One product over all heads takes 7.9
        ms, and gathering the rows 7.1 ms."""
        if self.views[0].dtype == torch.float32 and operators.adamw_ready():
            operators.scale_heads(self.views, [x.flatten() for x in self._columns])
            return
        heads = ((v, h) for v in self.views for h in range(len(v)))
        over = [(v[h], f) for (v, h), f in zip(heads, self._factors.tolist()) if f != 1]
        if over:
            multiply_all([x for x, _ in over], [f for _, f in over])

    def forget(self) -> None:
        if not _keeps_memory(self.views[0].device):
            self._stacks, self._olds = [], []


@final
class _TritonGroup(HeadGroup):
    """Uses Triton kernels over all views at once."""

    def __init__(self, views: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        super().__init__(views, tables)
        self._table: Any = available.head_table(self.views)
        self._old: Tensor | None = None
        self._keeps: Tensor | None = None

    def copy(self, measure: WeightNorm | None) -> list[Tensor]:
        self.forget()
        if measure is frobenius_norm:
            self._old, norms = self._table.copy_and_norms()
            return [norms]
        self._old = self._table.copy()
        return [] if measure is None else [torch.cat([measure(view) for view in self.views])]

    def decay(self, row: Tensor) -> None:
        self._keeps = torch.empty_like(self._factors)
        self.fill(row, self._keeps)

    def interpolate(self, row: Tensor) -> None:
        self.fill(row, self._factors)
        self._table.move(self._old, self._factors, self._keeps)
        self.forget()

    def scale(self, row: Tensor, *, on_host: bool = False) -> None:
        self.fill(row, self._factors)
        self._table.scale(self._factors)

    def forget(self) -> None:
        self._old = self._keeps = None


@final
class HeadGroups:
    """Views grouped by device and dtype; they are grouped again when the address of a tensor has changed.

    The host knows the addresses of tensors, so nothing waits for a device. `table` gives the places of a view's
    factors in a row of numbers.
    """

    def __init__(self, table: Callable[[HeadView], Tensor]) -> None:
        self.all: list[HeadGroup] = []
        self.firsts: list[int] = []  # of each view among the numbers of all groups, one after the other
        self._table = table
        self._seen: list[int] | None = None

    def update(self, pairs: Sequence[tuple[HeadView, Tensor]]) -> bool:
        """Groups the views, each with the tensor that it shows, if needed; returns whether it was."""
        pairs = [(view, dist.local(tensor)) for view, tensor in pairs]
        seen = [tensor.data_ptr() for _, tensor in pairs]
        if seen == self._seen:
            return False
        self._seen, self.all, self.firsts = seen, [], [0] * len(pairs)
        views = [view.view(tensor) for view, tensor in pairs]
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for k, view in enumerate(views):
            if not view.numel():  # of weights that are split unevenly some processes hold nothing
                continue
            kinds.setdefault((view.device, view.dtype), []).append(k)
        first = 0
        for own in kinds.values():
            own.sort(key=lambda k: form(views[k]))
            for k in own:
                self.firsts[k], first = first, first + len(views[k])
            kind = _TritonGroup if available.takes_heads([views[k] for k in own]) else _ListGroup
            self.all.append(kind([views[k] for k in own], [self._table(pairs[k][0]) for k in own]))
        return True


def _keeps_memory(device: torch.device) -> bool:
    """True on a CPU, where memory for copies is kept because the allocator would map large blocks each time."""
    return device.type == "cpu"


def form(view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape, and the dimensions of a stack of such views from the widest stride to the narrowest."""
    return tuple(view.shape), tuple(sorted((1, 2, 3), key=lambda d: -view.stride(d - 1)))


# The power of γ that each weight takes so that every product of a logit is multiplied by γ and by nothing else.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitShare:
    """A weight that takes γ or, with `root`, √γ: for each of its n heads the smallest γ of the query heads `heads`."""

    weight: HeadSlice
    heads: Int64[Tensor, "n r"]
    root: bool


def logit_shares(site: AttentionSite, *, by_group: bool) -> list[LogitShare] | None:
    """Returns the shares of the last weights of every term of a site; None if no powers of γ suit all products.

    The powers of the two sides of a product add up to 1. A weight that query heads share takes none, so its partner
    takes γ, and other partners of that one take none; all remaining weights take √γ. With `by_group` a weight that a
    group of query heads shares is not left alone: it and its partner take √γ of the worst.
    """
    weights: list[HeadSlice] = []
    terms = [(_place(weights, t.query[-1]), _place(weights, t.key[-1])) for t in site.terms]
    h = site.n_heads
    alone = {i for i, s in enumerate(weights) if s.n < h and (not by_group or s.n == 1 < site.n_kv_heads)}
    for a, b in terms:
        if {a, b} <= alone:
            alone -= {a, b}
    powers = _powers(terms, alone)
    if powers is None:
        return None
    found = []
    for part in _connected(terms, len(weights)):
        n = min(weights[i].n for i in part)
        for i in part:
            s, power = weights[i], powers.get(i, 0.5)
            if power == 1.0 and s.n != h:
                return None
            if power == 1.0:
                found.append(LogitShare(weight=s, heads=torch.arange(h)[:, None], root=False))
            elif power == 0.5:
                if s.n not in (n, h):
                    return None
                heads = site.users(n) if s.n == n else site.users(n)[site.used(n)]
                found.append(LogitShare(weight=s, heads=heads, root=True))
    return found


def _place(weights: list[HeadSlice], s: HeadSlice) -> int:
    """Returns the index of a weight's rows among the known ones, and adds new ones."""
    for i, other in enumerate(weights):
        if other.parameter == s.parameter and other.same(s):
            return i
    weights.append(s)
    return len(weights) - 1


def _powers(terms: Sequence[tuple[int, int]], alone: set[int]) -> dict[int, float] | None:
    """Returns the powers that follow if those weights take none; None if they contradict each other."""
    powers = dict.fromkeys(alone, 0.0)
    both = [*terms, *((b, a) for a, b in terms)]
    for _ in terms:  # each round reaches one product further
        for a, b in both:
            if a in powers and powers.setdefault(b, 1.0 - powers[a]) != 1.0 - powers[a]:
                return None
    return powers


def _connected(terms: Sequence[tuple[int, int]], n: int) -> list[list[int]]:
    """Returns the weights in groups that products connect."""
    part = list(range(n))
    for a, b in terms:
        old, new = part[a], part[b]
        part = [new if p == old else p for p in part]
    return [[i for i in range(n) if part[i] == p] for p in dict.fromkeys(part)]
