"""The rows of the weights from which head h is computed, and the dimensions of q and k that hold heads.

A probe is the gradient of a random combination of elements of q or k with respect to the features of a projection. It
stops at the projection, so it is cheap however large the weights are. Norms on the path pass gradients on as if the
size by which they divide were a constant, so that a norm over all heads together does not mix the heads. Powers of two
distinguish the heads: because a backward pass is linear, the contribution of head h to the second of two gradients is
exactly 2ʰ times its contribution to the first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from qkeel.capture.calls import HeadLayout
from qkeel.capture.example import ModuleCall
from qkeel.capture.products import Operand
from qkeel.errors import QkeelError
from qkeel.functional.norms import widest
from qkeel.heads.site import HeadSlice, QKProduct
from qkeel.heads.walk import (
    WHOLE_NORMS,
    Projection,
    Walk,
    leaves_of,
    nodes_of,
    variable_of,
    walk,
)
from qkeel.patching.autograd import is_wrapper


class UnknownRowsError(QkeelError, LookupError):
    """The weights of a site are unknown, for the reason that the message gives. Statistics are still computed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitPath:
    """The projections from the module's input to q or k, input first, and the indices within a head that they
    produce."""

    projections: tuple[Projection, ...]
    dims: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """The q or k of a call, x [b h t d], with its name `what` and the result of the search for its projections."""

    x: Tensor
    what: str
    paths: tuple[LogitPath, ...]
    found: Walk

    def slices(self, path: LogitPath, dims: frozenset[int]) -> tuple[HeadSlice, ...]:
        """The rows of each projection on a path that produce the entries of each head at these indices."""
        part = self.x if len(dims) == self.x.shape[-1] else self.x[..., sorted(dims)]
        last = len(path.projections) - 1
        with opened(self.found.mixers), only(path.projections[-1], self.found.nearest):
            index = [
                _rows(part, p, self.what, inner=i < last)
                for i, p in enumerate(path.projections)
            ]
        found = [_slice(p, rows) for p, rows in zip(path.projections, index)]
        # The last projection is one with separate rows for each head; a convolution after it may be shared by all
        # heads.
        return tuple(sorted(found, key=lambda s: s.n > 1))

    @property
    def normed(self) -> bool:
        """True if there is a norm between the projections and x."""
        return any(p.normed for p in self.found.nearest)


def logit_terms(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    frame: ModuleCall,
    names: dict[int, str],
) -> tuple[tuple[QKProduct, ...], bool]:
    """Returns the terms of q [b h t d] · k [b g s d], and whether there is a norm between the weights and the logit.

    Raises:
        UnknownRowsError: the rows are unknown; the message gives the reason.
    """
    query, key = side(q, frame, names, "q"), side(k, frame, names, "k")
    terms = tuple(
        QKProduct(query=query.slices(a, shared), key=key.slices(b, shared))
        for a in query.paths
        for b in key.paths
        if (shared := a.dims & b.dims)
    )
    if not terms:
        raise UnknownRowsError(
            "no part of a head is computed by projections of both q and k"
        )
    return terms, query.normed or key.normed


def sum_terms(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    frame: ModuleCall,
    names: dict[int, str],
) -> tuple[tuple[QKProduct, ...], bool]:
    """Like `logit_terms`, but returns the terms of a sum of products, each of which is q [b h t d] · k [b g s d].

    Raises:
        UnknownRowsError: the rows of one product are unknown; the message says which product it is.
    """
    terms, normed = [], False
    for i, (q, k) in enumerate(products):
        try:
            if q is None or k is None:
                raise UnknownRowsError(
                    "the operations on it hide the q and k from which it is computed"
                )
            own, after_norm = logit_terms(q, k, frame, names)
        except UnknownRowsError as error:
            which = f"its logit is a sum of {len(products)} products, and product {i + 1} is not known: "
            raise UnknownRowsError(
                f"{which if len(products) > 1 else ''}{error}"
            ) from error
        # Two products of the same weights, as of ReRoPE's near and far keys, are one term.
        terms += [
            term for term in own if not any(_same(term, other) for other in terms)
        ]
        normed = normed or after_norm
    return tuple(terms), normed


def _same(one: QKProduct, other: QKProduct) -> bool:
    """True if two terms have the same rows of the same weights."""
    if (len(one.query), len(one.key)) != (len(other.query), len(other.key)):
        return False
    pairs = zip((*one.query, *one.key), (*other.query, *other.key))
    return all(a.parameter == b.parameter and a.same(b) for a, b in pairs)


def weights_behind(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    frame: ModuleCall,
    names: dict[int, str],
) -> frozenset[tuple[str, str]] | None:
    """The nearest weights behind the queries and keys of products, each as the side and the name; None if unknown."""
    sides = [
        (x, what) for pair in products for x, what in zip(pair, "qk") if x is not None
    ]
    try:
        walks = [
            (what, _walk_back(x, frame, names, what, depth=1)) for x, what in sides
        ]
    except UnknownRowsError:
        return None
    return (
        frozenset(
            (what, p.parameter) for what, walk_back in walks for p in walk_back.nearest
        )
        or None
    )


def normed_on_the_way(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    frame: ModuleCall,
    names: dict[int, str],
) -> bool:
    """True if there is a norm between the weights and a logit that is a sum of products of the form
    q [b h t d] · k [b g s d]."""
    sides = [(x, what) for pair in products for x, what in zip(pair, "qk")]
    if any(x is None for x, _ in sides):
        return False
    try:
        found = [
            _walk_back(x, frame, names, what, depth=1)
            for x, what in sides
            if x is not None
        ]
    except UnknownRowsError:
        return False
    return any(p.normed for one in found for p in one.nearest)


def side(
    x: Float[Tensor, "b h t d"], frame: ModuleCall, names: dict[int, str], what: str
) -> Side:
    """The q or k of a call, x [b h t d], and the projections from which it was computed.

    Raises:
        UnknownRowsError: the rows are unknown; the message gives the reason.
    """
    found = _walk_back(x, frame, names, what)
    return Side(x=x, what=what, paths=tuple(_paths(x, found)), found=found)


def _walk_back(
    x: Tensor, frame: ModuleCall, names: dict[int, str], what: str, *, depth: int = 3
) -> Walk:
    """Searches the graph from x [b h t d] back to the input of the module that made the call, or, if there is nothing
    in between because that input is q itself, to the input of the module around it. Up to `depth` successive
    projections are followed."""
    if x.grad_fn is None:
        raise UnknownRowsError(
            f"{what} has no gradient: it is a constant, or comes from a cache, an autograd.Function (as in other "
            "libraries' gradient checkpointing) or an optimised script"
        )
    found = Walk(nearest=())
    for f in frame.line():
        found = walk(x.grad_fn, nodes_of(f.inputs), names, depth)
        if found.nearest or found.opaque:
            found = _within(found, f, frame.line()[-1].module)
            break
    if found.opaque:
        raise UnknownRowsError(
            f"{what} is a product with {', '.join(found.opaque)}, whose rows cannot be assigned to heads"
        )
    if not found.nearest:
        return Walk(nearest=_tables(x, names, what))
    tables = [_entries(x, node, names) for node in found.tables]
    return dataclasses.replace(found, nearest=(*found.nearest, *filter(None, tables)))


def _tables(x: Tensor, names: dict[int, str], what: str) -> tuple[Projection, ...]:
    """The parameters that x is, or whose sum it is, as for keys that depend only on the position. They may have been
    read outside the module, for all layers."""
    assert x.grad_fn is not None
    leaves = [
        leaf
        for leaf in leaves_of(x.grad_fn, set()) or ()
        if id(variable_of(leaf)) in names
    ]
    if not leaves:
        raise UnknownRowsError(
            f"no matrix product with a parameter lies between the module's input and {what}"
        )
    found = [_entries(x, leaf, names) for leaf in leaves]
    known = tuple(table for table in found if table is not None)
    if len(known) < len(found):
        shared = ", ".join(
            names[id(variable_of(leaf))]
            for leaf, table in zip(leaves, found)
            if table is None
        )
        raise UnknownRowsError(
            f"heads of {what} share some entries of {shared} but not others"
        )
    return known


def _entries(x: Tensor, node: Node, names: dict[int, str]) -> Projection | None:
    """The parameter whose entries x holds: rows or columns for each head, or features that all heads share. None if the
    heads share some entries but not others."""
    p = variable_of(node)
    table = functools.partial(Projection, node=node, parameter=names[id(p)], table=True)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for h in range(x.shape[1]):
        grad = _probe(x[:, h], node)
        used = (
            (torch.zeros_like(p) if grad is None else grad.detach())
            .ne(0)
            .view(len(p), -1)
        )
        for axis in (0, 1):
            parts[axis].append(used.any(1 - axis))
    rows, columns = (torch.stack(heads) for heads in parts)
    if bool((rows == rows[:1]).all()) and bool((columns == columns[:1]).all()):
        # The columns if there is one for each feature of a head, otherwise the full parameter, as for a table with one
        # row for each feature.
        if p.ndim > 1 and int(columns[0].sum()) == x.shape[-1]:
            return table(axis=1, size=columns.shape[1])
        return table(axis=0, size=len(p), shared=True)
    apart = [
        axis
        for axis, heads in enumerate((rows, columns))
        if bool((heads.sum(0) <= 1).all())
    ]
    return (
        table(axis=apart[0], size=(rows, columns)[apart[0]].shape[1]) if apart else None
    )


def _within(found: Walk, frame: ModuleCall, model: nn.Module) -> Walk:
    """The search result without projections of other modules above those that were found, because a key from another
    layer leads to everything that precedes that layer."""
    nearest = [
        dataclasses.replace(
            p,
            above=tuple(
                a
                for a in p.above
                if _in_one_module(p.parameter, a.parameter, frame, model)
            ),
        )
        for p in found.nearest
    ]
    return dataclasses.replace(found, nearest=tuple(nearest))


def _in_one_module(one: str, other: str, frame: ModuleCall, model: nn.Module) -> bool:
    """True if two weights belong to the same module, either the module of the frame or another one at least as deep
    inside the model."""
    a, b, around = ([*name.split(".")] for name in (one, other, frame.name or "."))
    shared = [
        x
        for x, _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(a[:-1], b[:-1])
        )
    ]
    if not frame.name or shared[: len(around)] == around:
        return True
    # The depth matters because two parts of another layer are no more in the same module than two layers are.
    inside = model.get_submodule(".".join(shared))
    return len(shared) >= len(around) and not isinstance(
        inside, (nn.ModuleList, nn.ModuleDict)
    )


def _slice(projection: Projection, rows: Tensor) -> HeadSlice:
    first, last = int(rows.min()), int(rows.max())
    part = next(
        (p for p in projection.biases if p.first <= first and last < p.first + p.size),
        None,
    )
    return HeadSlice(
        parameter=projection.parameter,
        axis=projection.axis,
        index=rows,
        bias=None if part is None else part.parameter,
        bias_shift=0 if part is None else part.shift,
    )


def _paths(x: Tensor, found: Walk) -> Iterator[LogitPath]:
    whole = frozenset(range(x.shape[-1]))
    for projection in found.nearest:
        made = whole
        if len(found.nearest) > 1:
            with opened(found.mixers), only(projection, found.nearest):
                made = _dims(x, projection)
        for above in projection.above or (None,):
            if made:
                yield LogitPath(
                    projections=(projection,) if above is None else (above, projection),
                    dims=made,
                )


def _probe(outputs: Tensor, node: Node) -> Tensor | None:
    """The gradient of a fixed random combination of `outputs` with respect to the output of a node."""
    return _gradient(outputs, _weights(outputs), node)


def _weights(x: Tensor) -> Tensor:
    """Fixed random values between 0.5 and 1.5, in the shape of x."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return (torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.5).to(x)


def _gradient(outputs: Tensor, weights: Tensor, node: Node) -> Tensor | None:
    """The gradient of the sum of `weights` times `outputs` with respect to the output of a node."""
    edge = GradientEdge(node, 0)
    grad = torch.autograd.grad(
        outputs, edge, weights, retain_graph=True, allow_unused=True
    )[0]
    if grad is not None and is_wrapper(grad):
        raise UnknownRowsError(
            "its projections are split across processes, which hides their rows; find the sites before the model is "
            "split"
        )
    return grad


def _dims(x: Tensor, projection: Projection) -> frozenset[int]:
    """The indices within a head that a projection reaches, found by one probe per index for all heads at once."""
    probes = (_probe(x[..., d], projection.node) for d in range(x.shape[-1]))
    return frozenset(
        d for d, grad in enumerate(probes) if len(projection.reached(grad))
    )


def _rows(x: Tensor, projection: Projection, what: str, *, inner: bool) -> Tensor:
    """The rows [n r] of a projection for each head, with n = 1 if all heads share them.

    An `inner` projection whose gradient is zero is assigned to all heads. It is the first of two matrices of which the
    second is zero at the start, as in a low-rank adapter.
    """
    if projection.shared:
        return torch.arange(projection.size)[None]
    used = features_used(x, 1, projection, by_token=False) if x.shape[1] > 2 else None
    if used is None:  # use one probe for each head
        heads = [
            projection.reached(_probe(x[:, h], projection.node))
            for h in range(x.shape[1])
        ]
    else:
        heads = [projection.numbers(torch.from_numpy(features)) for features in used]
    sizes = {len(rows) for rows in heads}
    if sizes == {0} and inner:
        return torch.arange(projection.size)[None]
    if sizes == {0}:
        raise UnknownRowsError(
            f"{what} does not depend on {projection.parameter} here: its gradient is zero"
        )
    if len(sizes) > 1:
        raise UnknownRowsError(
            f"heads of {what} use unequal numbers of rows of {projection.parameter}: {sorted(sizes)}"
        )
    index = torch.stack(heads)
    if bool((index == index[:1]).all()):
        return index[:1]
    if index.unique().numel() != index.numel():
        raise UnknownRowsError(
            f"heads of {what} share some rows of {projection.parameter} but not others"
        )
    return index


_AT_ONCE = 64  # slices whose powers of two fit the range of a float; in half precision, gradients may underflow


def features_used(
    x: Tensor, dim: int, projection: Projection, *, by_token: bool = True
) -> np.ndarray | None:
    """The features [m features] of a projection that each of the m slices of x along a dimension uses, found with two
    gradients for up to 64 slices. None if several slices use the same feature (with `by_token`, at the same token), or
    if there is no gradient.

    Both gradients are those of a random combination of the elements of x. In the second one, slice i has a weight 2ⁱ
    times as large. A backward pass is linear, and multiplication by a power of two is exact, so where slice i is the
    only one to use a feature, the second gradient is exactly 2ⁱ times the first.
    """
    size, parts = x.shape[dim], list[np.ndarray]()
    weights = _weights(x)
    shape = [size if i == dim % x.ndim else 1 for i in range(x.ndim)]
    for start in range(0, size, _AT_ONCE):
        n = min(_AT_ONCE, size - start)
        powers = np.zeros((2, size))
        powers[0, start : start + n] = 1.0
        powers[1, start : start + n] = np.exp2(np.arange(n) - n // 2)
        found = []
        for own in torch.from_numpy(powers).to(x):
            grad = _gradient(x, weights * own.view(shape), projection.node)
            if grad is None:
                return None
            features = projection.by_feature(grad).to(widest(grad.device))
            found.append(
                (features if by_token else features.abs().sum(0, keepdim=True))
                .cpu()
                .double()
                .numpy()
            )
        one, other = found
        reached = (one != 0) | (other != 0)
        with np.errstate(all="ignore"):
            mantissa, exponent = np.frexp(other / one)
        number = np.where(reached, exponent - 1 + n // 2, n)
        if not (~reached | ((mantissa == 0.5) & (number >= 0) & (number < n))).all():
            return None
        used = np.zeros((n + 1, one.shape[1]), dtype=bool)
        np.put_along_axis(used, number, True, 0)
        parts.append(used[:n])
    return np.concatenate(parts)


# --- The dimensions of q or k that hold heads, found by experiment: slices along them are computed from different
# features

Split = tuple[
    int, int, int
]  # the sizes of a dimension's slowest part, heads and fastest part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The factors of a product of scores that serve as queries and keys."""

    query: Operand
    key: Operand


def layout_of(
    sides: Sides, shape: torch.Size, keys: int, frame: ModuleCall, names: dict[int, str]
) -> HeadLayout | None:
    """The layout of scores of this shape whose softmax is over dimension `keys`, or None if the experiment does not
    show it.

    The heads are in the dimensions along which the features used by q change, or those used by k if q does not vary
    there. Among the other dimensions, the queries are in the last one along which k does not vary or, if there is none,
    in the second to last of all dimensions.
    """
    walks = [_walk(side, frame, names) for side in (sides.query, sides.key)]
    splits: dict[int, Split] = {}
    for dim in range(len(shape)):
        if dim == keys:
            continue
        pairs = [
            (s, w)
            for s, w in zip((sides.query, sides.key), walks)
            if shape[dim] == 1 or s.varies(dim)
        ]
        split = next(
            (
                _split_of(s, w, dim, keys)
                for s, w in pairs
                if w is not None or shape[dim] == 1
            ),
            None,
        )
        if split is None and not pairs:
            split = (shape[dim], 1, 1)
        if split is None:
            return None
        splits[dim] = split
    return _read(sides, walks[1], splits, keys)


def _walk(side: Operand, frame: ModuleCall, names: dict[int, str]) -> Walk | None:
    """The result of the search from a factor back to its projections, or None if there are none."""
    if side.x.grad_fn is None:
        return None
    for f in frame.line():
        found = walk(side.x.grad_fn, nodes_of(f.inputs), names)
        if found.nearest:
            return found
    return None


def _split_of(side: Operand, found: Walk | None, dim: int, keys: int) -> Split | None:
    size = side.x.shape[dim]
    if size == 1:
        return (1, 1, 1)
    assert found is not None
    x = side.x if dim == keys else side.x.narrow(keys, side.x.shape[keys] - 1, 1)
    return split_by_heads(x, dim, found)


def _read(
    sides: Sides, key: Walk | None, splits: Mapping[int, Split], keys: int
) -> HeadLayout | None:
    """The layout, derived from how heads are merged into each dimension."""
    groups = ["b"] * (len(splits) + 1)
    groups[keys] = "s"
    heads = [d for d, split in splits.items() if split[1] > 1]
    others = [d for d in splits if d not in heads]
    free = [d for d in splits if sides.query.varies(d) and not sides.key.varies(d)]
    rows = next((d for d in reversed(free) if d in others), None)
    letter = dict.fromkeys(splits, "b")  # what a dimension contains besides heads
    if rows is None:
        merged = [
            d
            for d in free
            if d in heads and splits[d][1] < splits[d][0] * splits[d][1] * splits[d][2]
        ]
        channels = (
            [d for d in free if d in heads]
            if _are_features(sides.key, key, keys)
            else []
        )
        if merged:
            letter[merged[-1]] = "t"
        elif channels:
            rows = channels[-1]
            heads.remove(rows)
        elif len(others) > 1 or (
            others and sum(splits[d] == (1, 1, 1) for d in others)
        ):
            rows = others[-1]
    for d in heads:
        before, _, after = splits[d]
        if before > 1 and after > 1:
            return None
        groups[d] = (
            (letter[d] if before > 1 else "") + "h" + (letter[d] if after > 1 else "")
        )
    if rows is not None:
        groups[rows] = "t"
    sizes = tuple(splits[d][1] for d in sorted(heads))
    return HeadLayout(
        groups=tuple(groups), sizes=sizes, headless=not heads and len(groups) == 3
    )


def _are_features(side: Operand, found: Walk | None, keys: int) -> bool:
    """True if the softmax is over features, as in attention between channels, so that the keys are computed from
    different features."""
    split = None if found is None else _split_of(side, found, keys, keys)
    return split is not None and split[1] > 1


def split_by_heads(x: Float[Tensor, ...], dim: int, found: Walk) -> Split | None:
    """The split of a dimension of x into its parts and heads, or (m, 1, 1) if all slices use the same features.

    None if this cannot be decided, because no feature is reached or because features are shared by some slices but not
    by others.
    """
    size = x.shape[dim]
    splits: set[Split] = set()
    reached = size == 1
    by_one: list[
        int
    ] = []  # for each projection used by a single slice, the index of that slice
    for projection in found.nearest:
        with opened(found.mixers), only(projection, found.nearest):
            used = features_used(x, dim, projection)
        if used is None or not used.any():
            continue
        reached = True
        users = np.flatnonzero(used.any(1))
        if len(users) == 1:
            by_one.append(int(users[0]))
        split = _split(torch.from_numpy(used))
        if split is None:
            return None
        splits.add(split)
        if split == (size, 1, 1) and projection.convolves:
            # A convolution may be the same for all heads, as when keys are pooled; the heads are then those of its
            # input.
            with opened(found.mixers), only(projection, found.nearest):
                made = [features_used(x, dim, upper) for upper in projection.above]
            splits |= {
                split
                for used in made
                if used is not None
                and used.any()
                and (split := _split(torch.from_numpy(used)))
            }
    if size > 1 and sorted(by_one) == [*range(size)]:
        return (
            1,
            size,
            1,
        )  # there is a projection for each head, and their outputs are stacked
    heads = {split for split in splits if split[1] > 1}
    if len(heads) > 1 or not reached:
        return None
    return heads.pop() if heads else (size, 1, 1)


def _split(used: Bool[Tensor, "m features"]) -> Split | None:
    """The split of m slices according to the features that they use."""
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
    """A context in which gradients stop at the other projections, so that only what depends on this one directly
    reaches it."""
    with ExitStack() as undo:
        for other in among:
            if other.node is not one.node:
                undo.callback(other.node.register_prehook(_nothing).remove)
        yield


@contextmanager
def opened(nodes: Sequence[Node]) -> Iterator[None]:
    """A context in which gradients pass norms as if these multiplied by a constant."""
    with ExitStack() as undo:
        for node in nodes:
            undo.callback(_pass_through(node).remove)
        yield


def _pass_through(node: Node) -> RemovableHandle:
    if node.name() in WHOLE_NORMS:
        return node.register_hook(_as_factor)
    return node.register_prehook(_nothing)


def _as_factor(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    first = outputs[0]
    if first is None or inputs[0] is None:
        return inputs
    return (first.reshape(inputs[0].shape), *inputs[1:])


def _nothing(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else torch.zeros_like(g) for g in grads)
