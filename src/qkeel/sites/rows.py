"""The rows of the weights from which head h is computed, and the dimensions of scores that hold heads.

A probe is the gradient of a random combination of elements of q or k with respect to
the features of a projection. It stops at the projection, so it is cheap however large
the weights are. Norms on the path pass gradients on as if the size by which they divide
were a constant, so that a norm over all heads together does not mix the heads.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qkeel.capture.calls import HeadLayout
from qkeel.capture.example import ModuleCall
from qkeel.capture.products import Operand
from qkeel.capture.score_calls import Sides
from qkeel.errors import QkeelError
from qkeel.patching.autograd import is_wrapper, nodes_of, variable_of
from qkeel.sites.graph import (
    WHOLE_NORMS,
    Projection,
    Walk,
    leaves_of,
    parameters_behind,
    walk,
)
from qkeel.sites.site import HeadSlice, QKProduct

QKPair = tuple[Tensor | None, Tensor | None]


class UnknownRowsError(QkeelError, LookupError):
    """The weights of a site are unknown, for the reason that the message gives. Statistics are still computed."""


# --- The weights behind q and k


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """The q or k of a call, x [b h t d], its name "q", "k" or "v", and the result of the search for its projections.

    A path holds the projections from the module's input to x, input first, and the
    indices within a head that they produce.
    """

    x: Tensor
    name: str
    walk: Walk
    names: dict[int, str]
    around: ModuleCall

    @property
    def normed(self) -> bool:
        """True if there is a norm between the projections and x."""
        return any(p.normed for p in self.walk.nearest)

    def paths(self) -> list[tuple[tuple[Projection, ...], frozenset[int]]]:
        """The paths to x."""
        nearest, width = self.walk.nearest, self.x.shape[-1]
        paths = []
        for projection in nearest:
            features = range(width)
            if len(nearest) > 1:
                with self._gradients(projection):
                    gradients = (_probe(self.x[..., d], projection) for d in features)
                    features = [
                        d
                        for d, grad in enumerate(gradients)
                        if grad is not None and bool(grad.any())
                    ]
            for above in projection.above or (None,):
                chain = (projection,) if above is None else (above, projection)
                paths.append((chain, frozenset(features)))
        return paths

    def slices(
        self, path: Sequence[Projection], features: frozenset[int]
    ) -> tuple[HeadSlice, ...]:
        """The rows of each projection on a path that produce these features of each head."""
        x = self.x
        if len(features) < x.shape[-1]:
            x = x[..., sorted(features)]
        rows = []
        with self._gradients(path[-1]):
            for projection in path:
                index = self._rows(x, projection, inner=projection is not path[-1])
                vector, shift = projection.bias_shift(int(index.min()))
                rows.append(
                    HeadSlice(
                        parameter=projection.parameter,
                        axis=projection.axis,
                        index=index,
                        bias=None if vector is None else self.names[id(vector)],
                        bias_shift=shift,
                    )
                )
        # The last weight is one with separate rows for each head; a convolution after
        # it may be shared by all heads.
        return tuple(sorted(rows, key=lambda s: s.n > 1))

    def _rows(self, x: Tensor, projection: Projection, *, inner: bool) -> Tensor:
        """The rows [n r] of a projection for each head, with n = 1 if all heads share them."""
        name, everything = projection.parameter, torch.arange(projection.size)[None]
        if projection.table:
            return everything
        used = features_used(x, 1, projection)
        if used is None:
            raise UnknownRowsError(
                f"heads of {self.name} share some rows of {name} but not others"
            )
        sizes = used.sum(1).unique().tolist()
        if sizes == [0]:
            # The first of two matrices of which the second is zero at the start, as in
            # a low-rank adapter, has no gradient yet.
            if inner:
                return everything
            raise UnknownRowsError(
                f"{self.name} does not depend on {name} here: its gradient is zero"
            )
        if len(sizes) > 1:
            raise UnknownRowsError(
                f"heads of {self.name} use unequal numbers of rows of {name}: {sizes}"
            )
        if bool((used == used[:1]).all()):
            used = used[:1]
        elif int(used.sum(0).max()) > 1:
            raise UnknownRowsError(
                f"heads of {self.name} share some rows of {name} but not others"
            )
        return used.nonzero()[:, 1].view(len(used), -1)

    def between(self, paths: Iterable[HeadSlice]) -> Iterator[HeadSlice]:
        """The other parameters that x is computed from, from the projections on: gains of norms, vectors that are added
        or multiplied into it, tables of positions; and what makes the projections' input in the same module, as the
        first of two matrices with a norm between them does. paths: what is known of x."""
        known = {name for s in paths for name in (s.parameter, s.bias)}
        stops, nearest = nodes_of(self.around.inputs), self.walk.nearest
        ends = {node for p in nearest if (node := p.input) is not None}
        last, _ = parameters_behind(self.x.grad_fn, stops | ends)
        first, is_one_layer = parameters_behind(self.x.grad_fn, stops)
        earlier = {
            name: p
            for p in first
            if (name := self.names.get(id(p), ""))
            and _in_one_module(nearest[0].parameter, name, self.around)
        }
        behind = {self.names.get(id(p), ""): p for p in last}
        # Without a matrix, it is the norm before the projections, which is that of the values too.
        if is_one_layer and any(earlier[x].ndim > 1 for x in earlier.keys() - behind):
            behind |= earlier
        for name, parameter in behind.items():
            if not name or name in known:
                continue
            rows = torch.arange(math.prod(parameter.shape[:1]))
            if parameter.numel() == len(rows):
                # A vector for the features of a fused projection acts on values too.
                (grad,) = torch.autograd.grad(
                    self.x, parameter, probe_weights(self.x), retain_graph=True
                )
                is_used = grad.flatten().ne(0).cpu()
                rows = rows[is_used] if bool(is_used.any()) else rows
            yield HeadSlice(parameter=name, axis=0, index=rows[None])

    def _gradients(self, projection: Projection) -> AbstractContextManager[None]:
        return gradients_to(projection, self.walk)


def side(
    x: Float[Tensor, "b h t d"],
    frame: ModuleCall,
    names: dict[int, str],
    name: str,
    *,
    depth: int = 3,
) -> Side:
    """Searches the graph from x back to the input of the module that made the call, or, if there is nothing in between
    because that input is x itself, to the input of the module around it. Up to `depth` successive projections are
    followed.

    Raises:
        UnknownRowsError: the rows are unknown; the message gives the reason.
    """
    if x.grad_fn is None:
        raise UnknownRowsError(
            f"{name} has no gradient: it is a constant, or comes from a cache, an autograd.Function (as in other "
            "libraries' gradient checkpointing) or an optimised script"
        )
    around, behind = frame, Walk(nearest=())
    for around in frame.line():
        behind = walk(x.grad_fn, nodes_of(around.inputs), names, depth)
        if behind.nearest or behind.opaque:
            break
    if behind.opaque:
        raise UnknownRowsError(
            f"{name} is a product with {', '.join(behind.opaque)}, whose rows cannot be assigned to heads"
        )
    nearest = [
        dataclasses.replace(
            p,
            above=tuple(
                a for a in p.above if _in_one_module(p.parameter, a.parameter, around)
            ),
        )
        for p in behind.nearest
    ]
    # Parameters that x is, or whose sum it is, as for keys that depend only on the
    # position. They may have been read outside the module, for all layers.
    for leaf in () if nearest else leaves_of(x.grad_fn, set()) or ():
        parameter = variable_of(leaf)
        if id(parameter) in names:
            nearest.append(
                Projection(
                    node=leaf,
                    parameter=names[id(parameter)],
                    size=len(parameter),
                    features=0,
                    table=True,
                )
            )
    if not nearest:
        raise UnknownRowsError(
            f"no matrix product with a parameter lies between the module's input and {name}, or an autograd.Function "
            "hides it"
        )
    behind = dataclasses.replace(behind, nearest=tuple(nearest))
    return Side(x=x, name=name, walk=behind, names=names, around=around)


def _in_one_module(name: str, other: str, frame: ModuleCall) -> bool:
    """True if two weights belong to the module of the frame. A key from another layer leads to everything that precedes
    that layer."""
    prefix = f"{frame.name}." if frame.name else ""
    return name.startswith(prefix) and other.startswith(prefix)


def sum_terms(
    products: Sequence[QKPair], frame: ModuleCall, names: dict[int, str]
) -> tuple[tuple[QKProduct, ...], list[Side], tuple[HeadSlice, ...]]:
    """Returns the terms of a sum of products q [b h t d] · k [b g s d], the q and k of each product, and what else they are
    computed from.

    Raises:
        UnknownRowsError: the rows of one product are unknown; the message says which product it is.
    """
    terms: dict[str, QKProduct] = {}
    factors: list[Side] = []
    between: dict[str, HeadSlice] = {}
    for i, (q, k) in enumerate(products):
        try:
            if q is None or k is None:
                raise UnknownRowsError(
                    "the operations on it hide the q and k from which it is computed"
                )
            query, key = side(q, frame, names, "q"), side(k, frame, names, "k")
            of_term: list[QKProduct] = []
            for (of_query, a), (of_key, b) in itertools.product(
                query.paths(), key.paths()
            ):
                if not a & b:
                    continue
                term = QKProduct(
                    query=query.slices(of_query, a & b), key=key.slices(of_key, a & b)
                )
                of_term.append(term)
                # Two products of the same weights, as of ReRoPE's near and far keys,
                # are one term.
                terms.setdefault(_rows_of_term(term), term)
            if not of_term:
                raise UnknownRowsError(
                    "no part of a head is computed by projections of both q and k"
                )
        except UnknownRowsError as error:
            which = f"its logit is a sum of {len(products)} products, and product {i + 1} is not known: "
            raise UnknownRowsError(
                f"{which if len(products) > 1 else ''}{error}"
            ) from error
        factors += [query, key]
        others = (
            *query.between([s for term in of_term for s in term.query]),
            *key.between([s for term in of_term for s in term.key]),
        )
        between |= {str((s.parameter, s.index.tolist())): s for s in others}
    return tuple(terms.values()), factors, tuple(between.values())


def _rows_of_term(term: QKProduct) -> str:
    paths = (term.query, term.key)
    return str([[(s.parameter, s.axis, s.index.tolist()) for s in x] for x in paths])


def sides(
    products: Sequence[QKPair], frame: ModuleCall, names: dict[int, str]
) -> list[Side]:
    """The queries and keys of products with the nearest projections behind them; none if one of them is unknown."""
    try:
        return [
            side(x, frame, names, name, depth=1)
            for pair in products
            for x, name in zip(pair, "qk")
            if x is not None
        ]
    except UnknownRowsError:
        return []


# Gradients that reach one projection only, with norms held constant.


@contextmanager
def gradients_to(projection: Projection, behind: Walk) -> Iterator[None]:
    """A context in which gradients pass norms as if these multiplied by a constant, and stop at the other projections,
    so that only what depends on this one directly reaches it."""
    with ExitStack() as undo:
        for node in behind.norms:
            if node.name() in WHOLE_NORMS:
                undo.callback(node.register_hook(_as_factor).remove)
            else:
                undo.callback(node.register_prehook(_nothing).remove)
        for other in behind.nearest:
            if other.node is not projection.node:
                undo.callback(other.node.register_prehook(_nothing).remove)
        yield


def _as_factor(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    if outputs[0] is None or inputs[0] is None:
        return inputs
    return (outputs[0].reshape(inputs[0].shape), *inputs[1:])


def _nothing(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else torch.zeros_like(g) for g in grads)


def probe_weights(x: Tensor) -> Tensor:
    # The same in every search, and all of one sign, so that no two elements cancel.
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.5
    return weights.to(x)


def _probe(
    x: Tensor, projection: Projection, mask: Tensor | float = 1.0
) -> Tensor | None:
    """The gradient of a fixed random combination of the elements of x that a mask selects, with respect to the features
    of a projection."""
    (grad,) = torch.autograd.grad(
        x,
        GradientEdge(projection.node, 0),
        probe_weights(x) * mask,
        retain_graph=True,
        allow_unused=True,
    )
    if grad is not None and is_wrapper(grad):
        raise UnknownRowsError(
            "its projections are split across processes, which hides their rows; find the sites before the model is "
            "split"
        )
    return grad


def features_used(
    x: Tensor, dim: int, projection: Projection
) -> Bool[Tensor, "m features"] | None:
    """The features of a projection that each of the m slices of x along a dimension uses; None if some of the slices share
    a feature of a token.

    Each gradient is that of half of the slices, and no two slices are in the same halves. A feature of a single slice is
    therefore reached by half of the gradients, one of all slices by all of them, and one of several by more than half.
    """
    size = x.shape[dim]
    shape = [size if i == dim % x.ndim else 1 for i in range(x.ndim)]
    codes = half_codes(size)
    reached = []
    for mask in codes.T.to(x.device):
        grad = _probe(x, projection, mask.view(shape))
        if grad is None:
            return torch.zeros(size, 1, dtype=torch.bool)
        reached.append(projection.by_feature(grad).ne(0).cpu())
    seen = torch.stack(reached, -1)
    half, weights = int(codes[0].sum()), seen.sum(-1)
    is_shared = weights == codes.shape[1]
    if bool(((weights != 0) & (weights != half) & ~is_shared).any()):
        return None
    used = is_shared.any(0).expand(size, -1).clone()
    tokens, features = (weights == half).nonzero(as_tuple=True)
    slices = (seen[tokens, features].float() @ codes.float().T == half).nonzero()
    used[slices[:, 1], features[slices[:, 0]]] = True
    return used


def half_codes(n: int) -> Bool[Tensor, "n m"]:
    """For each of n items, the m tests that it is in: half of them, and no two items in the same half. If a test shows
    what any of its items does, the tests tell every item from every other one.

    >>> half_codes(3).int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    tests = 2
    while math.comb(tests, tests // 2) < n:
        tests += 1
    codes = torch.zeros(n, tests, dtype=torch.bool)
    halves = itertools.combinations(range(tests), tests // 2)
    for code, half in zip(codes, halves):
        code[list(half)] = True
    return codes


# --- The dimensions of scores that hold heads, found by experiment: slices along them are computed from different
# features

# Scores may hold heads and batch or queries in one dimension: the sizes of what is outside the heads, of the heads, and of
# what is inside, in the order of memory.
Split = tuple[int, int, int]


def layout_of(
    names: dict[int, str], sides: Sides, shape: torch.Size, keys: int, frame: ModuleCall
) -> HeadLayout | None:
    """The layout of scores of this shape whose softmax is over dimension `keys`, or None if the experiment does not
    show it.

    The heads are in the dimensions along which the features used by q change, or those
    used by k if q does not vary there. Among the other dimensions, the queries are in
    the last one along which k does not vary or, if there is none, in the second to last
    of all dimensions.
    """
    query, key = _Factor(sides.query, frame, names), _Factor(sides.key, frame, names)
    splits: dict[int, Split] = {}
    for dim in [dim for dim in range(len(shape)) if dim != keys]:
        split: Split | None = (shape[dim], 1, 1)
        varying = [f for f in (query, key) if f.varies(dim) and f.walk is not None]
        if shape[dim] > 1 and (query.varies(dim) or key.varies(dim)):
            split = varying[0].split(dim, keys) if varying else None
        if split is None:
            return None
        splits[dim] = split
    heads = [dim for dim, split in splits.items() if split[1] > 1]
    others = [dim for dim in splits if dim not in heads]
    free = [dim for dim in splits if query.varies(dim) and not key.varies(dim)]
    rows = next((dim for dim in reversed(free) if dim in others), None)
    if rows is None:
        if any(d in heads and splits[d][1] < shape[d] for d in free):
            # Heads and queries are in one dimension.
            return None
        if free and (of_keys := key.split(keys, keys)) and of_keys[1] > 1:
            # The softmax is over features, as in attention between channels.
            rows = free[-1]
            heads.remove(rows)
        elif len(others) > 1 or any(shape[dim] == 1 for dim in others):
            rows = others[-1]
    groups = ["b"] * len(shape)
    groups[keys] = "s"
    for dim in heads:
        before, _, after = splits[dim]
        if before > 1 and after > 1:
            return None
        groups[dim] = f"{'b' * (before > 1)}h{'b' * (after > 1)}"
    if rows is not None:
        groups[rows] = "t"
    return HeadLayout(
        groups=tuple(groups),
        sizes=tuple(splits[dim][1] for dim in heads),
        headless=not heads and len(groups) == 3,
    )


class _Factor:
    """A factor of a product of scores, and the search from it back to its projections; None if there are none."""

    def __init__(
        self, operand: Operand, frame: ModuleCall, names: dict[int, str]
    ) -> None:
        self.x, self.varies = operand.x, operand.varies
        self.walk: Walk | None = None
        node = self.x.grad_fn
        for around in () if node is None else frame.line():
            assert node is not None
            behind = walk(node, nodes_of(around.inputs), names)
            if behind.nearest:
                self.walk = behind
                break

    def split(self, dim: int, keys: int) -> Split | None:
        """The split of a dimension into its parts and heads, or (m, 1, 1) if all slices use the same features. None if
        this cannot be decided, because no feature is reached or because features are shared by some slices but not by
        others."""
        if self.walk is None:
            return None
        x = self.x if dim == keys else self.x.narrow(keys, self.x.shape[keys] - 1, 1)
        size = x.shape[dim]
        splits: set[Split | None] = set()
        for projection in self.walk.nearest:
            # A convolution may be the same for all heads, as when keys are pooled; the
            # heads are then those of its input.
            above = projection.above if projection.convolves else ()
            for target in (projection, *above):
                with gradients_to(projection, self.walk):
                    used = features_used(x, dim, target)
                if used is None or not bool(used.any()):
                    break
                splits.add(split := _split(used))
                if split != (size, 1, 1):
                    break
        heads = splits - {(size, 1, 1)}
        if None in splits or len(heads) > 1 or not splits:
            return None
        return heads.pop() if heads else (size, 1, 1)


def _split(used: Bool[Tensor, "m features"]) -> Split | None:
    """The split of m slices according to the features that they use."""
    kinds = used[:, used.any(0)].unique(dim=1)
    size, n = kinds.shape
    if not bool((kinds.sum(1) == 1).all()):
        return None
    if n == 1:
        return (size, 1, 1)
    kind = kinds.long().argmax(1)
    run = int((kind == kind[0]).long().cumprod(0).sum())
    if size % (n * run):
        return None
    grid = kind.view(-1, n, run)
    even = bool((grid == grid[:1, :, :1]).all())
    return (size // (n * run), n, run) if even else None
