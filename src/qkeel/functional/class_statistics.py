"""Merge rules for statistics of blocks, batches and processes, and statistics split by token class.

Shapes: b batch, t queries, s keys, h query heads, g key heads, c classes, r rows of a block, n keys of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Merging the statistics of two data sets field by field.

MergeRule = Literal["max", "min", "sum", "root", "mean"]


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
    """How to merge a field: by maximum, minimum, sum, root of the sum of squares, or mean weighted by the field
    `count`.

    `neutral` is the field's value when there is no data.
    """

    how: MergeRule
    neutral: float = 0.0
    count: str = ""


def rule(how: MergeRule, neutral: float = 0.0, count: str = "") -> dict[str, object]:
    """Returns dataclass field metadata with a `Merge` rule."""
    return {"merge": Merge(how, neutral, count)}


def merge_rules(kind: type[DataclassInstance]) -> dict[str, Merge]:
    """Returns the merge rules of a dataclass's fields by name. Fields without a rule are left out."""
    return {
        field.name: field.metadata["merge"]
        for field in dataclasses.fields(kind)
        if field.metadata
    }


def merged(
    parts: Sequence[Mapping[str, Tensor]], rules: Mapping[str, Merge]
) -> dict[str, Tensor]:
    """Returns the merged values of the fields that `rules` names."""
    return {name: _merged(parts, name, rule) for name, rule in rules.items()}


def tensors(stats: DataclassInstance) -> dict[str, Tensor]:
    """Returns the tensor fields of a statistics object by name."""
    values = {
        field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)
    }
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _merged(parts: Sequence[Mapping[str, Tensor]], name: str, rule: Merge) -> Tensor:
    values = [stats[name] for stats in parts]
    if rule.how == "mean" and len(parts) == 2:
        first, second = (stats[rule.count] for stats in parts)
        # In the mean's dtype, since dividing integers would give float32.
        share = second.to(values[0].dtype) / (first + second).clamp_min(1)
        return torch.lerp(
            values[0],
            values[1],
            share if share.ndim == values[0].ndim else share[..., None],
        )
    every = {name: torch.stack(values)}
    if rule.count:
        every[rule.count] = torch.stack([stats[rule.count] for stats in parts])
    return merged_rows(every, name, rule)


def merged_rows(every: Mapping[str, Tensor], name: str, rule: Merge) -> Tensor:
    """Returns the merged value of a field of data sets that are stacked along the first dimension."""
    values = every[name]
    if rule.how == "root":
        return functools.reduce(torch.hypot, values.unbind())
    if rule.how == "mean":
        counts = every[rule.count]
        share = counts.to(values.dtype) / counts.sum(0).clamp_min(1)
        # So that the mean of equal values is that value.
        over = values - values[0]
        return values[0] + (
            over * (share if share.ndim == over.ndim else share[..., None])
        ).sum(0)
    return {"max": values.amax, "min": values.amin, "sum": values.sum}[rule.how](0)


# ClassStats: per head, norms, largest logits and attention weights of one site, split by token class.

PerPair = Float[Tensor, "h c c"]
# Of keys in classes.
Members = Float[Tensor, "#b s c"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenClasses:
    """The class of each query and key of a call, as an index into `names`, or -1 for tokens without a class."""

    names: tuple[str, ...]  #: names of the c classes
    query: Int[Tensor, "#b t"]  #: index of each query's class; -1 for no class
    key: Int[Tensor, "#b s"]  #: index of each key's class; -1 for no class

    def members(self, dtype: torch.dtype) -> Members:
        """Returns the membership of the keys in the classes, 1 where a key has the class."""
        return one_hot(self.key, len(self.names)).to(dtype)


def class_maxima(
    z: Float[Tensor, "b h r n"], members: Members, n_of: Float[Tensor, "b h r c"]
) -> Float[Tensor, "b h r c"]:
    """Returns the row maxima of lowered logits over the keys of each class, or -inf where `n_of`, the number of such
    keys that a row sees, is 0."""
    # A quarter of the lowest number: hidden pairs are lowered already, and twice as much must stay finite.
    lowest = torch.finfo(z.dtype).min / 4
    tops = []
    for members_of_class in members.unbind(-1):
        hidden = ((1 - members_of_class) * lowest)[:, None, None]
        tops.append((z + hidden).amax(-1))
    return torch.stack(tops, -1).masked_fill(n_of == 0, -torch.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassStats:
    """The LogitStats of one site, split by the classes of query and key, per query head [h] or key head [g].

    Logits, norms and weights are defined as in LogitStats. Tokens without a class are not counted. The class of the
    query comes first, so max_logit[h, a, b] covers queries of class a and keys of class b.

    Attributes:
        max_logit: largest signed logit before the cap over the `n_pairs` visible pairs; -inf if there are no pairs.
        mass: weight from a query of class a to all keys of class b, averaged over the `n_queries` queries of class a
            that see a key. Weights are taken after the cap and before dropout and sum to one over the keys, so rows of
            `mass` also sum to one, minus the weight on keys without a class.
        uniform_mass: the value that `mass` would have if every query spread its weight evenly over the keys it sees.
        query_norm: mean L2 norm over `n_normed` queries. `n_normed` is 0 if only the logits were observed, not q and k.
        key_norm: mean L2 norm over `n_keys` keys. `n_keys` is 0 in the same case.
    """

    names: tuple[str, ...]  #: names of the c classes
    max_logit: PerPair = field(metadata=rule("max"))
    mass: PerPair = field(metadata=rule("mean", count="n_queries"))
    uniform_mass: PerPair = field(metadata=rule("mean", count="n_queries"))
    query_norm: Float[Tensor, "h c"] = field(metadata=rule("mean", count="n_normed"))
    #: largest L2 norm of the queries
    query_norm_max: Float[Tensor, "h c"] = field(metadata=rule("max"))
    key_norm: Float[Tensor, "g c"] = field(metadata=rule("mean", count="n_keys"))
    #: largest L2 norm of the keys
    key_norm_max: Float[Tensor, "g c"] = field(metadata=rule("max"))
    n_queries: Int[Tensor, "h c"] = field(metadata=rule("sum"))
    n_pairs: Int[Tensor, "h c c"] = field(metadata=rule("sum"))
    n_normed: Int[Tensor, "h c"] = field(metadata=rule("sum"))
    n_keys: Int[Tensor, "g c"] = field(metadata=rule("sum"))

    def tensors(self) -> dict[str, Tensor]:
        """Returns every statistic and count by name."""
        return tensors(self)

    def pair(self, name: str, query: str, key: str) -> Float[Tensor, " h"]:
        """Returns one entry of a pairwise field for each head, as in `stats.pair("mass", "image", "text")`."""
        return tensors(self)[name][:, self.index(query), self.index(key)]

    def index(self, name: str) -> int:
        """Returns the index of a class, or raises InvalidValueError."""
        if name not in self.names:
            raise InvalidValueError(
                f"expected one of the classes {', '.join(self.names)}, got {name!r}"
            )
        return self.names.index(name)

    @property
    def query_competition(self) -> Float[Tensor, " h"]:
        """The ratio of the largest to the smallest mean query norm of any class; NaN if fewer than two classes were
        seen."""
        return norm_ratio(self.query_norm, self.n_normed)

    @property
    def key_competition(self) -> Float[Tensor, " g"]:
        """The ratio of the largest to the smallest mean key norm of any class; NaN if fewer than two classes were
        seen."""
        return norm_ratio(self.key_norm, self.n_keys)


MERGES = merge_rules(ClassStats)
TENSORS = tuple(MERGES)


def merge_classes(a: ClassStats | None, b: ClassStats | None) -> ClassStats | None:
    """Merges the statistics of two data sets; None is the neutral element.

    Raises:
        InvalidValueError: the classes or the numbers of heads differ.
    """
    if a is None or b is None:
        return b if a is None else a
    if (
        a.names != b.names
        or a.mass.shape != b.mass.shape
        or a.key_norm.shape != b.key_norm.shape
    ):
        raise InvalidValueError(
            f"cannot merge statistics of the classes {', '.join(a.names)} of {len(a.mass)} heads with those of "
            f"{', '.join(b.names)} of {len(b.mass)} heads; merge only statistics of the same site and classes"
        )
    return ClassStats(names=a.names, **merged([tensors(a), tensors(b)], MERGES))


def joined_classes(parts: Sequence[ClassStats | None]) -> ClassStats | None:
    """Concatenates the statistics of one-head calls into the statistics of one site; None if any part is None."""
    classes = [stats for stats in parts if stats is not None]
    if len(classes) < len(parts):
        return None
    by_call = [tensors(stats) for stats in classes]
    fields = {name: torch.cat([stats[name] for stats in by_call]) for name in TENSORS}
    return ClassStats(names=classes[0].names, **fields)


def norm_ratio(
    norms: Float[Tensor, "*h c"], counts: Int[Tensor, "*h c"]
) -> Float[Tensor, "*h"]:
    """Returns the competition index, the ratio of the largest to the smallest mean norm of any class; 1 if all are
    equal.

    Classes without tokens are ignored; the result is NaN if fewer than two classes remain.

    Example:
        >>> norm_ratio(torch.tensor([[2.0, 6.0, 0.0]]), torch.tensor([[5, 1, 0]]))
        tensor([3.])
    """
    is_counted = counts > 0
    ratio = norms.masked_fill(~is_counted, -torch.inf).amax(-1) / norms.masked_fill(
        ~is_counted, torch.inf
    ).amin(-1)
    return ratio.masked_fill(is_counted.sum(-1) < 2, torch.nan)


def one_hot(classes: Int[Tensor, "*n"], n: int) -> Bool[Tensor, "*n c"]:
    """Returns a boolean one-hot encoding of the class of each token, which is all False for -1."""
    return classes[..., None] == torch.arange(n, device=classes.device)


def check_classes(classes: Tensor, n: int) -> None:
    """Raises InvalidTypeError or InvalidValueError unless classes are integers from -1 to n - 1."""
    if classes.is_floating_point() or classes.is_complex():
        raise InvalidTypeError(
            f"expected the classes of tokens as whole numbers, got {classes.dtype}"
        )
    if classes.numel() and not (int(classes.min()) >= -1 and int(classes.max()) < n):
        raise InvalidValueError(
            f"expected classes from 0 to {n - 1}, or -1 for a token without a class, got {int(classes.min())} to "
            f"{int(classes.max())}"
        )


def class_stats(
    query: Bool[Tensor, "#b t c"],
    rows: tuple[Tensor, Tensor, Tensor],
    over: Bool[Tensor, "b h t"],
    n_keys: Int[Tensor, "b h t"],
) -> dict[str, Tensor]:
    """Returns all fields of ClassStats except those about norms.

    Args:
        query: True at the class of each query.
        rows: each row's largest logit, weight and number of visible keys for each key class, [b h t c] each.
        over: the query rows to count.
        n_keys: the number of keys that each row sees.
    """
    top, mass, n_of = rows
    # [b h t a].
    of = query[:, None] & over[..., None]
    count = of.sum((0, 2))
    share = n_of / n_keys.clamp_min(1)[..., None]
    weigh = of.to(mass.dtype)

    def total(x: Tensor) -> Tensor:
        return torch.einsum(
            "bhta,bhtc->hac", weigh, x.masked_fill(~over[..., None], 0.0)
        )

    tops = []
    pairs = []
    for rows_of_class in of.unbind(-1):
        outside = ~rows_of_class[..., None]
        tops.append(top.masked_fill(outside, -torch.inf).amax((0, 2)))
        pairs.append(n_of.long().masked_fill(outside, 0).sum((0, 2)))
    return {
        "max_logit": torch.stack(tops, 1),
        "mass": total(mass.masked_fill(n_of == 0, 0.0)) / count.clamp_min(1)[..., None],
        "uniform_mass": total(share.to(mass.dtype)) / count.clamp_min(1)[..., None],
        "n_queries": count,
        "n_pairs": torch.stack(pairs, 1),
    }


def class_norms(
    of: Bool[Tensor, "#b n c"],
    norm: Float[Tensor, "b h n"] | None,
    over: Bool[Tensor, "b h n"],
    template: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean norm, largest norm and number [h c] of the counted tokens of each class; 0 if the norms are
    unknown."""
    picked = of[:, None] & over[..., None]
    if norm is None:
        none = picked.sum((0, 2)) * 0
        return none.to(template.dtype), none.to(template.dtype), none
    by_class = norm[..., None].masked_fill(~picked, 0.0)
    count = picked.sum((0, 2))
    return by_class.sum((0, 2)) / count.clamp_min(1), by_class.amax((0, 2)), count
