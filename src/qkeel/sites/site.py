"""AttentionSite: one attention layer of a model, with its geometry and the slice of each weight that belongs to each
head."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar, final

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn

from qkeel.capture.calls import HeadLayout, UnrecognizedAttention
from qkeel.capture.described import Description
from qkeel.capture.visible_pattern import KeyOrigin, LayerType, VisibleType, layer_type
from qkeel.errors import InvalidValueError, ShapeError
from qkeel.functional.bounds import repeat_groups
from qkeel.spec import AttentionSpec

Grid = tuple[int, int, int]
_Part = TypeVar("_Part", "HeadSlice", "NormGain")
# Attribute of a site's module: the remedies that are applied to it, by name.
APPLIED = "_qkeel_applied"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSlice:
    """The part of a weight that belongs to each head.

    `parameter` is the qualified name in the model. `axis` is 0 for rows (nn.Linear) and 1 for columns (Conv1D); a
    parameter with more than two dimensions, such as the weight of a convolution, is treated as `weight.flatten(1)`,
    with its output channels as rows. `index` [n r] holds the indices of the rows or columns of each head, where n is
    the number of query heads or of key heads, or 1 if all heads share the full matrix. `bias` is the name of the bias,
    if there is one. `bias_of()` returns the entries of the bias at the same indices plus `bias_shift`.

    `grid` = (first, step from head to head, step from row to row) if the indices are evenly spaced, as for heads stored
    one after the other, for a fused [q | k | v], or for q, k and v interleaved per head. In this case, the part of a
    head is a view, and no step needs the index again.

    A vector that multiplies features (the gains of a gated attention unit) is treated as a matrix with one column and
    axis 0.

    >>> from qkeel import find_sites
    >>> from qkeel.nn import Attention
    >>> (site,) = find_sites(Attention(16, 4))
    >>> site.query[-1].index.shape  # a row per head, with the rows of the weight that are its own
    torch.Size([4, 4])
    """

    parameter: str
    axis: int
    index: Tensor
    bias: str | None = None
    bias_shift: int = 0
    grid: Grid | None = dataclasses.field(init=False)
    _placed: dict[torch.device, Tensor] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.axis not in (0, 1):
            raise InvalidValueError(
                f"expected axis 0 (rows) or 1 (columns) of {self.parameter}, got {self.axis}"
            )
        if self.index.ndim != 2 or not self.index.numel():
            raise ShapeError(
                f"expected the rows of each head, [heads rows], got shape {tuple(self.index.shape)}"
            )
        if self.index.unique().numel() != self.index.numel() or self.index.min() < 0:
            raise InvalidValueError(
                f"expected each row of {self.parameter} in at most one head, and no negative row index"
            )
        object.__setattr__(self, "grid", _grid(self.index))
        object.__setattr__(self, "_placed", {})

    @property
    def n(self) -> int:
        """The number of heads that have separate parts."""
        return self.index.shape[0]

    def bias_of(self) -> HeadSlice | None:
        """The entries of the bias that belong to each head."""
        if self.bias is None:
            return None
        return HeadSlice(
            parameter=self.bias, axis=0, index=self.index + self.bias_shift
        )

    def renamed(self, inside: Callable[[str], str]) -> HeadSlice:
        """The same rows of a weight with another name."""
        # Everything that would be checked is already known to be valid.
        other = copy.copy(self)
        object.__setattr__(other, "parameter", inside(self.parameter))
        object.__setattr__(other, "bias", self.bias and inside(self.bias))
        return other

    def same(self, other: HeadSlice) -> bool:
        """True if both slices assign the same rows or columns to the same heads (their weights may differ)."""
        return self.axis == other.axis and torch.equal(self.index, other.index)

    def heads(self, weight: Shaped[Tensor, ...]) -> Shaped[Tensor, "n r m"]:
        """The weight as [n r m], with m = 1 for a vector. This is a view if the heads are evenly spaced, otherwise a
        copy."""
        rows = self.rows_of(weight)
        return (
            self._view(rows)
            if self.grid is not None
            else rows[self._index(weight.device)]
        )

    def rows_of(self, weight: Tensor) -> Tensor:
        """A view of the weight whose rows are the ones that the index selects. A vector becomes a single column."""
        if weight.ndim < 2:
            return weight.view(-1, 1)
        if weight.ndim > 2:
            # The elements of a row are kept in memory order, so that this is a view in any memory format.
            order = sorted(
                range(1, weight.ndim),
                key=lambda i: 0 if self.axis else -weight.stride(i),
            )
            weight = weight.permute(0, *order).view(len(weight), -1)
        return weight if self.axis == 0 else weight.mT

    def lines(
        self, per_head: Shaped[Tensor, " n"], rows: int, nobody: float = 1.0
    ) -> Shaped[Tensor, " rows"]:
        """Expands one value per head to one value per row, with the value `nobody` for rows that belong to no head."""
        n, r = self.index.shape
        lines = per_head.new_full((rows,), nobody)
        if self.grid is None:
            return lines.index_put_((self._index(lines.device),), per_head[:, None])
        self._view(lines).copy_(per_head[:, None].expand(n, r))
        return lines

    def expand(self, per_head: Tensor, weight: Tensor) -> Tensor:
        """Expands one value per head [n] to a tensor that broadcasts against the weight, with 1 where a row belongs to
        no head."""
        return across(
            self.lines(per_head, len(self.rows_of(weight))), self.axis, weight
        )

    def _view(self, rows: Tensor) -> Tensor:
        """Returns [rows …] as [n r …] if the heads are evenly spaced."""
        assert self.grid is not None
        first, head, row = self.grid
        n, r = self.index.shape
        if first + (n - 1) * head + (r - 1) * row >= rows.shape[0]:
            raise ShapeError(
                f"{self.parameter} has {rows.shape[0]} rows, too few for {n} heads of {r}"
            )
        step = rows.stride(0)
        return rows.as_strided(
            (n, r, *rows.shape[1:]),
            (head * step, row * step, *rows.stride()[1:]),
            rows.storage_offset() + first * step,
        )

    def _index(self, device: torch.device) -> Tensor:
        """The index on the given device, to which it is copied only once."""
        if device not in self._placed:
            self._placed[device] = self.index.to(device)
        return self._placed[device]


def across(lines: Tensor, axis: int, weight: Tensor) -> Tensor:
    """Reshapes one value per row (axis 0) or column (axis 1) to broadcast against the weight."""
    return (
        lines.view(-1, *[1] * (weight.ndim - 1))
        if axis == 0
        else lines.view(1, *weight.shape[1:])
    )


def _grid(index: Tensor) -> Grid | None:
    """(first, step per head, step per row) if index[i, j] = first + i·head + j·row with positive steps."""
    n, r = index.shape
    first = int(index[0, 0])
    row = int(index[0, 1]) - first if r > 1 else 1
    head = int(index[1, 0]) - first if n > 1 else r
    even = first + head * torch.arange(n)[:, None] + row * torch.arange(r)
    return (
        (first, head, row)
        if row > 0 and head > 0 and torch.equal(even, index.cpu().to(even.dtype))
        else None
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QKProduct:
    """One of the products whose sum is the logit, given by the matrices on the query's and on the key's logit path,
    input first.

    Ordinary attention has one term, (W_q) and (W_k). MLA has two terms: (W_dq, W_uq)·(W_dkv, W_uk) and the rotated
    (W_dq, W_qr)·(W_kr). A norm ends the path, because the weights before it do not scale the logit; they are left out.

    With low-rank adapters, there is one path for the base weight, (W_base), and one for each active adapter, (A, B),
    even while B is still zero. B has rows for each head, whereas all heads share A. If both projections have an
    adapter, there are four terms. A merged adapter is part of W_base and not a separate path. DoRA divides by a norm of
    the weights that it keeps out of the graph, so `normed` does not include it.
    """

    query: tuple[HeadSlice, ...]  #: weights of q, input first
    key: tuple[HeadSlice, ...]  #: weights of k, input first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormGain:
    """The gain of a norm on q or k: what the norm makes of the heads is multiplied by offset + g, and b is added.

    Args:
        heads: the heads on which it acts.
        parameter: the name of the gain g in the model.
        offset: 1 if the gain is 1 + w, otherwise 0.
        index: the indices [n r] of each head's entries in the flattened gain, with n = 1 if all heads share them.
        bias, bias_index: the same for the bias b.
    """

    heads: tuple[int, ...]
    parameter: str
    offset: float = 0.0
    index: Int64[Tensor, "n r"]
    bias: str | None = None
    bias_index: Int64[Tensor, "n r"] | None = None

    def renamed(self, inside: Callable[[str], str]) -> NormGain:
        """The same norm with other names of its gain and bias."""
        return dataclasses.replace(
            self,
            parameter=inside(self.parameter),
            bias=self.bias and inside(self.bias),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSite:
    """One attention layer of a model.

    `terms` is empty if the weights of the logit or of a part of it are unknown; `why` then gives the reason.
    `unverified` says why an experiment did not confirm that these weights, and no others, determine the logits of these
    heads. `normed` is True if a norm that belongs to the model, and not to the spec, lies between the weights and the
    logit. `unscaled` says how an experiment showed that, unlike a dot product, the logits do not scale with the rows of
    q (or of k). `description` is set for a site that is described by hand.

    `key_heads` [n_heads] holds the index of the key head that each query head uses, or is None if consecutive query
    heads share a key head. `layout` gives the dimensions of the scores of hand-written attention; `layout.guess` says
    why the layout was guessed, if it was. `head_dim` is the total size of the query vectors of all products whose sum
    is the logit, with each vector counted once.

    `visible` says which keys the queries were observed to reach, and `origin` what the keys are computed from; see
    `capture.visible_pattern`.

    >>> from qkeel import find_sites
    >>> from qkeel.nn import Attention
    >>> (site,) = find_sites(Attention(16, 4))
    >>> site.n_heads, site.head_dim
    (4, 4)
    """

    name: str  #: the name of the module in the model
    module: nn.Module  #: the attention module
    spec: AttentionSpec
    n_heads: int  #: the number of query heads
    n_kv_heads: int  #: the number of key heads
    head_dim: int
    terms: tuple[QKProduct, ...] = ()
    why: str = ""
    normed: bool = False
    description: Description | None = None
    query_gains: tuple[NormGain, ...] = ()  #: the gains of the norms of q
    key_gains: tuple[NormGain, ...] = ()  #: the gains of the norms of k
    #: what else q and k are computed from, with the rows of which they are: gains, added vectors, tables of positions
    between: tuple[HeadSlice, ...] = ()
    key_heads: tuple[int, ...] | None = None
    layout: HeadLayout | None = None
    unverified: str = ""
    unscaled: str = ""
    visible: VisibleType = "full"
    origin: KeyOrigin = "tokens"
    #: if its module is also called with other weights: the calls of the module with this site's weights
    callers: tuple[tuple[str, str, int], ...] = ()
    #: the last weights on the path to its values, if they are known
    value_weights: tuple[HeadSlice, ...] = ()
    #: of scores that its module multiplies itself: whether they are more than scaled q·k, and why a score does not say
    #: whether it counts
    is_sum: bool = False
    unclear_scores: str = ""
    #: whether its scores choose keys and are not the input of a softmax
    chooses: bool = False

    @property
    def layer_type(self) -> LayerType:
        """The type of the layer, as observed; see `capture.visible_pattern.layer_type`."""
        return "indexer" if self.chooses else layer_type(self.visible, self.origin)

    def __repr__(self) -> str:
        """A short form with the name, the heads, and whether their weights are known."""
        groups = (
            "" if self.n_kv_heads == self.n_heads else f", {self.n_kv_heads} key heads"
        )
        weights = (
            "known"
            if self.verified
            else f"not confirmed: {self.unverified}"
            if self.terms
            else "unknown"
        )
        return f"<AttentionSite {self.name!r}: {self.n_heads} heads of {self.head_dim}{groups}, weights {weights}>"

    @property
    def verified(self) -> bool:
        """True if the weights of each head are known and were confirmed by an experiment. The weights of qkeel's own
        modules and of sites described by hand are considered known without an experiment."""
        return bool(self.terms) and not self.unverified

    def used(self, n: int) -> Int64[Tensor, " h"]:
        """Returns, for each query head, the index of its part in a weight of n parts, which belong to the query heads,
        to the key heads, or (if n is 1) to all heads together.

        >>> site = AttentionSite(
        ...     name="", module=nn.Identity(), spec=AttentionSpec(), n_heads=4, n_kv_heads=2, head_dim=8
        ... )
        >>> site.used(2).tolist(), dataclasses.replace(site, key_heads=(0, 1, 0, 1)).used(2).tolist()
        ([0, 0, 1, 1], [0, 1, 0, 1])
        """
        if self.key_heads is not None and n == self.n_kv_heads:
            return torch.tensor(self.key_heads)
        return torch.arange(self.n_heads) // (self.n_heads // n)

    def users(self, n: int) -> Int64[Tensor, "n r"]:
        """The query heads that use each of n heads, which is the inverse of `used`."""
        return self.used(n).argsort(stable=True).view(n, -1)

    def per_query_head(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "h ..."]:
        """Expands the values for each head of a weight to the query heads that use these heads."""
        n = x.shape[0]
        if self.key_heads is not None and n == self.n_kv_heads:
            return x[self.used(n).to(x.device)]
        return x if n == self.n_heads else repeat_groups(x, self.n_heads)

    @property
    def query(self) -> list[HeadSlice]:
        """Every weight on the query's logit path, without duplicates."""
        return unique_slices(s for term in self.terms for s in term.query)

    @property
    def key(self) -> list[HeadSlice]:
        """Every weight on the key's logit path, without duplicates."""
        return unique_slices(s for term in self.terms for s in term.key)

    @property
    def parameters(self) -> set[str]:
        """The names of all weights on the logit paths, and of the gains and biases of its norms."""
        gains = (*self.query_gains, *self.key_gains)
        names = [x.parameter for x in (*self.query, *self.key, *gains)]
        names += [x.bias for x in gains]
        return {name for name in names if name is not None}

    def without_weights(self, wrapper: str) -> AttentionSite:
        """The site in a model whose weights cannot be read, because a wrapper hides them."""
        return dataclasses.replace(
            self,
            terms=(),
            why=f"{wrapper} holds its weights in flat pieces",
            query_gains=(),
            key_gains=(),
            value_weights=(),
        )

    @property
    def reparametrised(self) -> bool:
        """True if a weight on a logit path is computed from another (spectral or weight norm, pruning, sigma_reparam).

        Parametrizations of torch and its older hooks are recognised by the names of what they store."""
        names = [s.parameter for s in (*self.query, *self.key)]
        return any(
            "parametrizations." in name or name.endswith(("_orig", "_v"))
            for name in names
        )


def is_normed(site: AttentionSite) -> bool:
    """True if there is a norm on q or k between the weights and the logit."""
    return site.normed or site.spec.norm.kind != "none"


def unique_slices(slices: Iterable[HeadSlice]) -> list[HeadSlice]:
    """The slices without repetitions. A fused projection holds q and k in one parameter, so rows are compared too."""
    unique: list[HeadSlice] = []
    for s in slices:
        if not any(s.parameter == u.parameter and s.same(u) for u in unique):
            unique.append(s)
    return unique


def rows(parameter: str, n: int, size: int, bias: str | None = None) -> HeadSlice:
    """The slice for n heads of `size` rows each, stored one after the other, as in nn.Linear."""
    if n < 1 or size < 1:
        raise InvalidValueError(
            f"expected at least one head and row, got {n} heads of {size} rows"
        )
    return HeadSlice(
        parameter=parameter,
        axis=0,
        index=torch.arange(n * size).view(n, size),
        bias=bias,
    )


@final
class Sites(list[AttentionSite]):
    """The attention sites of a model.

    Attributes:
        missed: attention layers that were detected but not recognised.
        indexers: modules whose scores choose keys for one of the sites, through a top-k and not through a softmax. No
            remedy acts on these modules. The name of an indexer is the name of the first site of its layer, followed by
            #index.

    >>> from qkeel import find_sites
    >>> from qkeel.nn import Attention
    >>> find_sites(Attention(16, 2)).missed
    ()
    """

    def __init__(
        self,
        sites: Iterable[AttentionSite] = (),
        missed: Iterable[UnrecognizedAttention] = (),
        indexers: Iterable[AttentionSite] = (),
    ) -> None:
        super().__init__(sites)
        self.missed = tuple(dict.fromkeys(missed))
        self.indexers = tuple(indexers)

    @property
    def share(self) -> str:
        """Says how many of the attention layers that were seen were also understood.

        >>> Sites([], [UnrecognizedAttention(module="attn", operation="relu", reason="…")]).share
        '0 of 1 attention layers'
        """
        return share(len(self), len(self.missed))


def within(model: str, name: str) -> str:
    """The name of a site of a named model among the sites of all models together.

    >>> within("", "layers.0"), within("decoder", "layers.0"), within("decoder", ""), within("decoder", "#1")
    ('layers.0', 'decoder.layers.0', 'decoder', 'decoder#1')
    """
    return f"{model}{'.' if model and name and name[0] != '#' else ''}{name}"


def renamed(site: AttentionSite, inside: Callable[[str], str]) -> AttentionSite:
    """A site with new names for its module and its weights."""

    def named(parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
        return tuple(x.renamed(inside) for x in parts)

    return dataclasses.replace(
        site,
        name=inside(site.name),
        callers=tuple(
            (inside(module), inside(caller), number)
            for module, caller, number in site.callers
        ),
        terms=tuple(
            QKProduct(query=named(term.query), key=named(term.key))
            for term in site.terms
        ),
        value_weights=named(site.value_weights),
        query_gains=named(site.query_gains),
        key_gains=named(site.key_gains),
        between=named(site.between),
    )


def share(known: int, missed: int) -> str:
    """Says how many attention layers of a model were understood.

    >>> share(4, 2), share(4, 0)
    ('4 of 6 attention layers', '4 attention layers')
    """
    plural = "s" if missed or known != 1 else ""
    return (
        f"{known} of {known + missed}" if missed else f"{known}"
    ) + f" attention layer{plural}"
