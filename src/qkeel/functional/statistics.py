"""Per-head statistics of attention logits, computed block by block over query rows.

Shapes: b batch, t queries, s keys, h query heads, g key heads, c classes, r rows of a block, n keys of a block.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import (
    ClassStats,
    KeyClasses,
    Merge,
    TokenClasses,
    class_norms,
    class_stats,
    merge_classes,
    merge_rules,
    merged,
    merged_rows,
    one_hot,
    row_formulas,
    rule,
    tensors,
)
from qkeel.functional.norms import widest

# LogitStats: per-head statistics of one site's attention logits. They merge associatively.

PerHead = Float[Tensor, " h"]
POSITION_BINS = 24  # by position: bin 0 is offset 0, bin i >= 1 offsets 2^(i-1) .. 2^i - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitStats:
    """Statistics over the visible (query, key) pairs of one site; [h] per query head, [g] per key head.

    Logits are signed, after scale and bias and before the cap. The entropy, in nats, is that of the weights before
    dropout, over query rows that see at least one key. Norms are those of q and k as they enter the dot product, after
    norm and rotation. Tensors are detached, in float32 or wider. `merge` combines key blocks, micro-batches and ranks.

    Attributes:
        normalized_entropy: mean of H_i / ln n_i, in [0, 1], over the `n_free` rows that see n_i >= 2 keys; with a sink
            column, the mean of H_i / ln (n_i + 1).
        sink_share: over the same rows, the mean weight on the first key that the row sees, after the cap and before
            dropout. As for the entropy, the weights sum to one over the keys and the sink column, if there is one.
        share_above: share of pairs whose logit (signed, before the cap) exceeds the requested threshold.
        qk_frobenius: √Σ (q·k)² over the pairs, for q and k as they enter the product, without scale, bias or cap. A
            scale that the model folds into q is included. Divide by √d for logits with the scale 1/√d.
        cos_max: largest cosine of the angle between q and k; the cosine is 0 if either is zero.
        cos_mean: mean of these cosines.
        n_products: number of pairs over which qk_frobenius, cos_max and cos_mean are computed. It is 0 if only the
            logits were observed, not q and k; these three are then not measured and are 0, -inf and 0.
        key_norm_by_position: mean key norm by distance from the first visible key of its sequence (batch row). Bin 0
            holds that key, and bin i >= 1 holds the offsets 2^(i-1) .. 2^i - 1. `n_keys_by_position` is the number of
            keys in each bin.
        classes: the statistics split by token class, if the classes of the call are known.
        entropy_error: half the width of a 95 % interval for `entropy` if rows were sampled, otherwise None.
    """

    max_logit: PerHead = field(metadata=rule("max", -torch.inf))  #: largest, in nats; -inf where no pair is visible
    min_logit: PerHead = field(metadata=rule("min", torch.inf))  #: smallest, in nats; +inf where no pair is visible
    mean_logit: PerHead = field(metadata=rule("mean", count="n_pairs"))  #: mean over the `n_pairs` pairs, in nats
    capped_max_logit: PerHead = field(metadata=rule("max", -torch.inf))  #: largest after the cap, in nats
    entropy: PerHead = field(metadata=rule("mean", count="n_queries"))  #: mean over `n_queries` rows, in nats, >= 0
    entropy_min: PerHead = field(metadata=rule("min", torch.inf))  #: smallest entropy of any row, in nats
    query_norm: PerHead = field(metadata=rule("mean", count="n_queries"))  #: mean L2 norm of q over `n_queries` rows
    query_norm_max: PerHead = field(metadata=rule("max"))  #: largest L2 norm of q
    key_norm: Float[Tensor, " g"] = field(metadata=rule("mean", count="n_keys"))  #: mean L2 norm of `n_keys` keys
    key_norm_max: Float[Tensor, " g"] = field(metadata=rule("max"))  #: largest L2 norm of k
    n_queries: Int[Tensor, " h"] = field(metadata=rule("sum"))  #: rows that see at least one key
    n_pairs: Int[Tensor, " h"] = field(metadata=rule("sum"))  #: visible pairs
    n_keys: Int[Tensor, " g"] = field(metadata=rule("sum"))  #: keys that were counted
    normalized_entropy: PerHead = field(metadata=rule("mean", count="n_free"))
    sink_share: PerHead = field(metadata=rule("mean", count="n_free"))
    share_above: PerHead = field(metadata=rule("mean", count="n_pairs"))
    qk_frobenius: PerHead = field(metadata=rule("root"))
    cos_max: PerHead = field(metadata=rule("max", -torch.inf))
    cos_mean: PerHead = field(metadata=rule("mean", count="n_products"))
    logit_gap: PerHead = field(  #: mean over `n_free` rows of the row's largest logit minus its mean, in nats
        metadata=rule("mean", count="n_free", of=lambda rows: rows.max_logit - rows.total / rows.n_keys)
    )
    n_free: Int[Tensor, " h"] = field(metadata=rule("sum"))
    n_products: Int[Tensor, " h"] = field(metadata=rule("sum"))
    key_norm_by_position: Float[Tensor, "g bins"] = field(metadata=rule("mean", count="n_keys_by_position"))
    n_keys_by_position: Int[Tensor, "g bins"] = field(metadata=rule("sum"))
    classes: ClassStats | None = None
    entropy_error: PerHead | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Returns every measured statistic and count by name, except those split by class."""
        found = dict(zip(TENSORS, _ALL_TENSORS(self)))  # one call, as it runs several times per step
        if self.entropy_error is not None:
            found["entropy_error"] = self.entropy_error
        return found

    def value(self, name: str) -> Tensor | None:
        """Returns a statistic by its recorded name (records.HEAD_FIELDS); None if unknown or not measured.

        >>> LogitStats.empty(2, 1, torch.zeros(0)).value("entropy")
        tensor([0., 0.])
        """
        return getattr(self, name) if name in RECORDED else None

    @property
    def non_finite(self) -> PerHead:
        """1 for each head whose logits or entropy are NaN or infinite, otherwise 0."""
        return is_not_finite(self.max_logit, self.min_logit, self.entropy, self.n_pairs).to(self.max_logit.dtype)

    @property
    def max_abs_logit(self) -> PerHead:
        """The largest magnitude of any logit; 0 if there is no data."""
        return torch.maximum(self.max_logit, -self.min_logit).clamp_min(0)

    @classmethod
    def empty(cls, n_heads: int, n_kv_heads: int, like: Tensor) -> LogitStats:
        """Returns the neutral element: maxima -inf, minima +inf, means 0, counts 0. Equal fields share a scalar."""
        heads = n_heads, n_kv_heads
        kinds = {
            (value, count): torch.full((), value, dtype=torch.int64 if count else like.dtype, device=like.device)
            for value, count in {form[0] for form in _FORMS.values()}
        }
        return cls(**{name: kinds[kind].expand((heads[of], *more)) for name, (kind, of, more) in _FORMS.items()})  # type: ignore[arg-type]


def is_not_finite(max_logit: Any, min_logit: Any, entropy: Any, n_pairs: Any) -> Any:
    """Returns True for heads whose logits or entropy are NaN or infinite; accepts tensors or NumPy arrays."""
    low = (abs(min_logit) < math.inf) | (n_pairs == 0)  # without pairs the minimum was not measured
    return ~((abs(max_logit) < math.inf) & low & (abs(entropy) < math.inf))


def of_key_heads(name: str) -> bool:
    """True for fields of `LogitStats` with one value per key head, False for those with one per query head."""
    return name.startswith(("key_", "n_keys"))


MERGES = merge_rules(LogitStats)
FORMULAS = row_formulas(LogitStats)  # of RowStats; `reduce_rows` reduces them to values per head
# For each field: its neutral value and whether it is a count, whether it is per key head, and its other dimensions.
_FORMS: Mapping[str, tuple[tuple[float, bool], bool, tuple[int, ...]]] = {
    name: (
        (float(merge.neutral), merge.how == "sum"),
        of_key_heads(name),
        (POSITION_BINS,) if name.endswith("_by_position") else (),
    )
    for name, merge in MERGES.items()
}
TENSORS = tuple(MERGES)
_ALL_TENSORS = operator.attrgetter(*TENSORS)
DERIVED = ("max_abs_logit", "non_finite")  # properties that are recorded
RECORDED = {*TENSORS, *DERIVED, "entropy_error"}


def merge(a: LogitStats, *others: LogitStats) -> LogitStats:
    """Merges the statistics of two or more data sets: extrema, and means weighted by their counts.

    The merge is associative and commutative up to rounding. Source: derived.

    Raises:
        InvalidValueError: the numbers of heads differ.
    """
    for b in others:
        if a.max_logit.shape != b.max_logit.shape or a.key_norm.shape != b.key_norm.shape:
            raise InvalidValueError(
                f"cannot merge statistics of {len(a.max_logit)} heads ({len(a.key_norm)} key heads) with those of "
                f"{len(b.max_logit)} ({len(b.key_norm)}); merge only statistics of the same site"
            )
    if not others:
        return a
    parts = [tensors(a), *map(tensors, others)]
    sampled = [part for part in parts if "entropy_error" in part]
    error = sampled[0]["entropy_error"] if sampled else None
    if len(sampled) > 1:
        error = merged(sampled, {"entropy_error": _ERROR})["entropy_error"]
    classes = functools.reduce(merge_classes, [one.classes for one in others], a.classes)
    return LogitStats(**merged(parts, MERGES), classes=classes, entropy_error=error)


def merge_stacked(every: Mapping[str, Tensor]) -> LogitStats:
    """Merges data sets whose fields are stacked: [n h] instead of [h] for n data sets, by name.

    The statistics by token class are left out. Source: derived, as `merge`.
    """
    error = merged_rows(every, "entropy_error", _ERROR) if "entropy_error" in every else None
    fields: dict[str, Any] = {name: merged_rows(every, name, rule) for name, rule in MERGES.items()}
    return LogitStats(**fields, entropy_error=error)


_ERROR = Merge("mean", count="n_queries")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitBracket:
    """Bounds on the largest logit per head, from the row logsumexps that an attention kernel returns anyway.

    `lower <= max_logit <= upper`. `entropy`, if requested, tightens the lower bound from lse - ln n to lse - H, so the
    bounds meet exactly when attention collapses. `entropy_error` is half the width of a 95 % interval if the entropy
    comes from a sample of rows, otherwise None. `certified` marks heads whose `lower` is the exact maximum; a head with
    a NaN or infinite logit is never certified. `max_logit` is the maximum where it is certified. `note` says what was
    computed and why, if the bounds needed a separate pass.
    """

    lower: PerHead
    upper: PerHead
    entropy: PerHead | None = None
    entropy_error: PerHead | None = None
    certified: Tensor | None = None
    note: str = ""

    @property
    def max_logit(self) -> PerHead:
        """The largest logit of each head where it is certified, or NaN where only the two bounds are known."""
        known = torch.zeros_like(self.lower, dtype=torch.bool) if self.certified is None else self.certified
        return self.lower.masked_fill(~known, torch.nan)

    @classmethod
    def exact(
        cls, top: PerHead, entropy: PerHead | None, note: str = "", entropy_error: PerHead | None = None
    ) -> LogitBracket:
        """Returns bounds that both equal an exact maximum."""
        return cls(
            lower=top, upper=top, entropy=entropy, entropy_error=entropy_error, certified=top.isfinite(), note=note
        )


# Row logsumexps, and the gate of a learned sink.

PerRow = Float[Tensor, "b h t"]


def sink_gate(lse: Float[Tensor, "b h t"], sink: Tensor) -> Float[Tensor, "b h t"]:
    """Returns σ(ℓ - β), the share of its weight that a query row gives to its keys; the sink takes the rest.

    ℓ is the row's logsumexp of capped logits and β is the sink's logit [h 1], both in nats. The output of a head with a
    sink is this gate times its output without the sink, so a head with a gate near 0 contributes nothing. Source:
    derived from exp(ℓ) / (exp(β) + exp(ℓ)).

    Example:
        >>> sink_gate(torch.zeros(1, 1, 1), torch.tensor([[0.0]])).item()
        0.5
    """
    return torch.sigmoid(lse - sink)


def with_sink(entropy: PerRow, first: PerRow, lse: PerRow, sink: Tensor) -> tuple[PerRow, PerRow]:
    """Returns the entropy of each row, and the weight on its first key, over the keys and the sink.

    If the weights p over the keys alone have entropy H and logsumexp ℓ, a sink with logit β leaves the share g = σ(ℓ -
    β) to the keys. The entropy is then g·H - g ln g - (1-g) ln(1-g), and the weight is g·p. Source: derived from the
    chain rule of entropy.

    Args:
        entropy, first: the entropy, in nats, and the weight on the first key, over the keys alone [b h t].
        lse: logsumexp over the keys, after the cap, in nats.
        sink: the sink's logit, which broadcasts to [b h t]; -inf if there is no sink.

    Example:
        >>> two = torch.full((1, 1, 1), 2.0)
        >>> h, p = with_sink(two.log(), 1 / two, two.log(), torch.tensor(0.0))  # three equal weights
        >>> round(h.exp().item(), 5), round(p.item(), 5)
        (3.0, 0.33333)
    """
    gap = (lse - sink).clamp(-1e4, 1e4)  # beyond this, one share is 0, and 0 · inf is NaN
    kept, taken = torch.sigmoid(gap), torch.sigmoid(-gap)
    logs = torch.nn.functional.logsigmoid
    return kept * entropy - kept * logs(gap) - taken * logs(-gap), kept * first


def row_moments(x: Float[Tensor, "b h t"], over: Bool[Tensor, "#b #h t"]) -> Float[Tensor, "3 h"]:
    """Returns the number of rows in `over` and the sums of x and x² over them, per head. The results of several calls
    can be added.

    They are in float64 if the device supports it, because the mean square minus the squared mean loses half of the
    digits.
    """
    wide = x.to(widest(x.device)).masked_fill(~over, 0.0)
    return torch.stack([over.expand_as(x).to(wide.dtype).sum((0, 2)), wide.sum((0, 2)), wide.square().sum((0, 2))])


# Statistics of each query row, block by block, and their reduction to LogitStats.

PerRowAndClass = Float[Tensor, "b h t c"]
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Which of a block's `n` keys its rows see: all keys before `start`, and from there on the keys marked in
    `visible`.

    visible: True where a row sees a key; broadcasts to [b h rows n-start]. None if `start` is n.
    """

    visible: Tensor | None
    start: int
    n: int

    def blank_(self, x: Tensor) -> Tensor:
        """Sets x [b h rows n] to 0 at hidden pairs, in place, even where x is NaN."""
        if self.visible is not None:
            # An integer AND clears all bits, also of NaN. On a CPU it is ten times as fast as masked_fill_.
            kind = _BITS[x.dtype]
            x[..., self.start :].view(kind).bitwise_and_(-self.visible.to(kind))
        return x

    def lower_(self, x: Tensor) -> Tensor:
        """Adds a huge negative number to blanked x at hidden pairs, in place; it is finite, so that 0 times it is 0."""
        if self.visible is not None:
            x[..., self.start :].add_(self._penalty(x))
        return x

    def least(self, x: Tensor) -> Tensor:
        """Returns row minima [b h rows] of blanked x over visible keys."""
        if self.visible is None:
            return x.amin(-1)
        low = (x[..., self.start :] - self._penalty(x)).amin(-1)
        return torch.minimum(low, x[..., : self.start].amin(-1)) if self.start else low

    def counts(self, rows: int, device: torch.device) -> Tensor:
        """Returns the number of keys that each row sees, [b|1 h|1 rows]."""
        if self.visible is None:
            return torch.full((1, 1, rows), self.n, device=device)
        some = self.visible.expand(*self.visible.shape[:2], rows, self.n - self.start)
        return some.sum(-1) + self.start

    def counts_of(self, members: Tensor) -> Tensor:
        """Returns how many keys of each class each row sees, [b h|1 rows|1 c], given the members [b|1 n c]."""
        before = members[:, : self.start].sum(1)[:, None, None]
        if self.visible is None:
            return before
        return before + self.visible.to(members.dtype) @ members[:, None, self.start :]

    def first(self, x: Tensor) -> Tensor:
        """Returns x [b h rows] at the first key that each row sees."""
        if self.visible is None or self.start:
            return x[..., 0]
        index = self.visible.to(torch.uint8).argmax(-1, keepdim=True)
        return x.gather(-1, index.expand(*x.shape[:-1], 1))[..., 0]

    def whole(self, x: Tensor) -> Tensor | None:
        """Returns `visible` over all columns of x, as a normaliser expects it; None if all keys are visible."""
        if self.visible is None or not self.start:
            return self.visible
        full = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).expand(x.shape).clone()
        full[..., self.start :] = self.visible
        return full

    def _penalty(self, x: Tensor) -> Tensor:
        assert self.visible is not None
        return torch.where(self.visible, x.new_zeros(()), x.new_full((), torch.finfo(x.dtype).min / 4))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStats:
    """Statistics of each query row. Where `n_keys` is 0, the other fields are meaningless."""

    n_keys: Int[Tensor, "b h t"]  #: visible keys
    max_logit: PerRow  #: largest logit before the cap, in nats
    min_logit: PerRow  #: smallest logit before the cap, in nats
    capped_max: PerRow  #: largest after the cap, in nats
    total: PerRow  #: sum of logits
    above: PerRow  #: number of logits above the threshold
    entropy: PerRow  #: of the weights, in nats
    first_weight: PerRow  #: weight on the first visible key
    product_norm: PerRow  #: square root of Σ(q·k)² over the row's pairs
    cos_max: PerRow  #: largest cosine of q and k, in [-1, 1]
    cos_total: PerRow  #: sum of cosines over the pairs
    n_products: Int[Tensor, "b h t"]  #: pairs with known q and k
    class_max: PerRowAndClass | None = None  #: largest logit over the keys of each class
    class_mass: PerRowAndClass | None = None  #: weight on the keys of each class, in [0, 1]
    class_keys: PerRowAndClass | None = None  #: visible keys of each class

    @classmethod
    def nothing(cls, like: PerRow, keys: KeyClasses | None = None) -> RowStats:
        """Returns the statistics of rows that see no key, one row for each entry of `like`."""
        zeros, none = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.int64)
        split = None if keys is None else like.new_zeros(*like.shape, keys.members.shape[-1])
        fields = {f.name: split if f.name.startswith("class") else zeros for f in dataclasses.fields(cls)}
        return cls(**{**fields, "n_keys": none, "n_products": none})  # type: ignore[arg-type]

    @classmethod
    def cat(cls, parts: list[RowStats], dim: int = 2) -> RowStats:
        """Concatenates rows or, with dim=1, the heads of several calls."""
        each = [tensors(part) for part in parts]
        return cls(**{name: torch.cat([part[name] for part in each], dim=dim) for name in each[0]})


def extreme_logits(z: Tensor, seen: VisibleKeys, counted: Bool[Tensor, "b r"] | None) -> tuple[Tensor, Tensor]:
    """Returns the largest and smallest logit [h] of blanked z [b h r n] over counted rows; leaves z lowered."""
    over = seen.counts(z.shape[2], z.device) > 0
    if counted is not None:
        over = over & counted[:, None]
    low = seen.least(z).masked_fill(~over, torch.inf).amin((0, 2))
    return seen.lower_(z).amax(-1).masked_fill(~over, -torch.inf).amax((0, 2)), low


def logit_rows(z: Tensor, seen: VisibleKeys, threshold: float, keys: KeyClasses | None = None) -> dict[str, Tensor]:
    """Returns extrema, totals and counts of blanked logits z [b h rows n] before the cap; leaves z lowered."""
    b, h, r, _ = z.shape
    found = {"total": z.sum(-1), "min_logit": seen.least(z)}
    top = seen.lower_(z).amax(-1)
    # Comparing every logit costs as much as the exponential and finds nothing if no row maximum is above. Only on a CPU
    # can that be checked without waiting for the device.
    over = z.device.type != "cpu" or bool((top > threshold).any())
    above = (z > threshold).sum(-1).to(z.dtype) if over else torch.zeros_like(top)
    if keys is not None:
        members = keys.upto(z.shape[-1])
        found["class_keys"] = seen.counts_of(members).expand(b, h, r, -1)
        found["class_max"] = keys.maxima(z, found["class_keys"])
    return {**found, "max_logit": top, "above": above, "n_keys": seen.counts(r, z.device).expand(b, h, r)}


def softmax_rows(
    z: Tensor, seen: VisibleKeys, keys: KeyClasses | None = None, sink: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the largest capped logit, entropy, first weight and class weights of softmax(z); overwrites lowered z.

    If the logit of a sink is given, the entropy and first weight include the sink; class weights are over the keys
    alone.

    With the row maximum m subtracted, H = ln Σe^(z-m) - Σ(z-m)e^(z-m) / Σe^(z-m) has no cancellation even at logits in
    the thousands.
    """
    top = z.amax(-1, keepdim=True)
    # Below this floor the exponential is 0 next to the maximum's 1, but takes a CPU seven times as long.
    z.sub_(top).clamp_(min=math.log(torch.finfo(z.dtype).tiny) + 1)
    p = z.exp()
    mass = p.sum(-1)
    split = {} if keys is None else {"class_mass": by_class(p, keys) / mass[..., None]}
    first = seen.first(p) / mass
    entropy = (mass.log() - p.mul_(z).sum(-1) / mass).clamp_min_(0)
    if sink is not None:
        entropy, first = with_sink(entropy, first, top[..., 0] + mass.log(), sink.to(z.dtype))
    return {"capped_max": top[..., 0], "entropy": entropy, "first_weight": first, **split}


def by_class(weights: Tensor, keys: KeyClasses) -> PerRowAndClass:
    """Returns sums of weights [b h rows n] over the keys of each class, computed as attention to one-hot values."""
    members = keys.upto(weights.shape[-1]).expand(len(weights), -1, -1)
    return (weights.flatten(1, 2) @ members).view(*weights.shape[:3], -1)


def product_rows(products: Tensor, unit: float, q_norm: PerRow, k_norm: Tensor, seen: VisibleKeys) -> dict[str, Tensor]:
    """Returns statistics of the products q·k and their cosines, from blanked `products` = unit · q·k [b h rows n] and
    the norms [b h rows] and [b g n]."""
    g, h = k_norm.shape[1], products.shape[1]
    cosines = products * _inverse(k_norm).repeat_interleave(h // g, dim=1)[:, :, None]
    along = _inverse(q_norm) / unit
    n = seen.counts(products.shape[2], products.device).expand(q_norm.shape)
    total = cosines.sum(-1) * along
    return {
        "product_norm": torch.linalg.vector_norm(products, dim=-1) / unit,
        "cos_total": total.clamp(-n, n),  # rounding may give a cosine of 1 + 1e-7
        "cos_max": (seen.lower_(cosines).amax(-1) * along).clamp_(-1, 1),
        "n_products": n,
    }


def no_product_rows(like: Tensor) -> dict[str, Tensor]:
    """Returns the fields of `product_rows` if q and k are unknown; `like` is [b h rows]."""
    zeros, none = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.int64)
    return {"product_norm": zeros, "cos_total": zeros, "cos_max": zeros, "n_products": none}


def _inverse(norm: Tensor) -> Tensor:
    """Returns 1 / norm, or 0 where the norm is 0 or NaN, because hidden keys may hold any value."""
    return torch.where(norm > 0, norm, torch.inf).reciprocal()


class KernelRows(NamedTuple):
    """Statistics of each query row [b h t] from a kernel, in float32; -inf, -inf and 0 for rows that see no key."""

    largest: Tensor
    lse: Tensor
    entropy: Tensor


def reduce_kernel_rows(rows: KernelRows, counted: Bool[Tensor, "b t"] | None, n_kv_heads: int) -> LogitStats:
    """Returns max_logit, entropy, entropy_min and n_queries over counted rows that see a key.

    Other fields are neutral, including capped_max_logit, because the cap is unknown here.
    """
    over = rows.lse != -torch.inf  # keeps NaN, which must not be lost
    if counted is not None:
        over = over & counted[:, None]
    n = over.sum((0, 2))
    return dataclasses.replace(
        LogitStats.empty(rows.lse.shape[1], n_kv_heads, rows.largest),
        max_logit=rows.largest.masked_fill(~over, -torch.inf).amax((0, 2)),
        entropy=rows.entropy.masked_fill(~over, 0.0).sum((0, 2)) / n.clamp_min(1),
        entropy_min=rows.entropy.masked_fill(~over, torch.inf).amin((0, 2)),
        n_queries=n,
    )


ROW_FIELDS = (
    *("max_logit", "min_logit", "capped_max", "total", "above", "entropy", "first_weight"),
    *("product_norm", "cos_max", "cos_total", "query_norm"),
)  # statistics of rows in the order in which `reduce_fields` gets them; the last is the L2 norm of the query
_AT = {name: i for i, name in enumerate(ROW_FIELDS)}


class CountedRows(NamedTuple):
    """Which of the rows [b t] of a call are counted, per head, and how many values each mean is taken over.

    The n rows of all sequences form one dimension; h is 1 if the rows are the same for all heads.

    Attributes:
        n_keys: the number of keys that each row sees, or 0 for rows that are not counted.
        blank: True for rows that are not counted; None if all rows are counted.
        bound: True for rows that are not counted or see only one key; None if there are no such rows.
        single: True for rows that have neither a second key nor a sink, so that their entropy is 0; None if there are
            no such rows.
        scales: the logarithm of the number of keys and sinks of each row, at least ln 2, and a tensor of ones.
        counts: the number of values over which the mean of each of ROW_FIELDS is taken, at least 1.
        free: n_free, but at least 1.
        n_queries: the number of counted rows.
        n_free: the number of counted rows that see two keys or more.
        n_pairs: the number of visible pairs of counted rows.
    """

    n_keys: Int[Tensor, "h n"]
    blank: Bool[Tensor, "h n"] | None
    bound: Bool[Tensor, "h n"] | None
    single: Bool[Tensor, "h n"] | None
    scales: Float[Tensor, "2 h n"]
    counts: Int[Tensor, "fields h"]
    free: Int[Tensor, " h"]
    n_queries: Int[Tensor, " h"]
    n_free: Int[Tensor, " h"]
    n_pairs: Int[Tensor, " h"]

    @classmethod
    def of(
        cls, n_keys: Int[Tensor, "b h t"], counted: Bool[Tensor, "b t"] | None, sinks: int, kind: torch.dtype
    ) -> CountedRows:
        """Returns the rows that see a key and are in `counted`, for statistics of the dtype `kind`."""
        n = n_keys if counted is None else n_keys.masked_fill(~counted[:, None], 0)
        n = n.transpose(0, 1).flatten(1)
        blank, bound = n < 1, n < 2
        logs = (n + sinks).clamp_min(2).to(kind).log()
        n_queries, n_free, n_pairs = (~blank).sum(1), (~bound).sum(1), n.sum(1)
        of_rows, of_pairs, one = n_queries.clamp_min(1), n_pairs.clamp_min(1), torch.ones_like(n_pairs)
        means = {"total": of_pairs, "above": of_pairs, "cos_total": of_pairs, "entropy": of_rows, "query_norm": of_rows}
        return cls(
            n_keys=n,
            blank=blank,
            bound=bound,
            single=n + sinks < 2,
            scales=torch.stack([logs, torch.ones_like(logs)]),
            counts=torch.stack([means.get(name, one) for name in ROW_FIELDS]),
            free=n_free.clamp_min(1),
            n_queries=n_queries,
            n_free=n_free,
            n_pairs=n_pairs,
        )


@functools.lru_cache(maxsize=8)
def whole_rows(
    batch: int, queries: int, keys: int, causal: bool, kind: torch.dtype, device: torch.device
) -> CountedRows:
    """Returns the rows of a call without a mask or sink, where each row sees all keys or, with `causal`, those up to
    its own.

    They depend only on these arguments, so a training run computes them once."""
    seen = torch.arange(1, queries + 1, device=device) if causal else torch.full((queries,), keys, device=device)
    rows = CountedRows.of(seen.expand(batch, 1, -1), None, 0, kind)
    some_see_one = causal or keys < 2
    return rows._replace(
        blank=None, bound=rows.bound if some_see_one else None, single=rows.single if some_see_one else None
    )


def reduce_rows(
    rows: RowStats,
    counted: Bool[Tensor, "b t"] | None,
    q_norm: PerRow | None,
    k_norm: Float[Tensor, "b g s"] | None,
    keys_seen: Bool[Tensor, "b g s"] | None,
    classes: TokenClasses | None = None,
    of_key: Int[Tensor, " s"] | None = None,
    sinks: int = 0,
) -> LogitStats:
    """Returns LogitStats over counted rows that see a key.

    Args:
        rows: statistics of each row.
        counted: which rows count; None for all.
        q_norm, k_norm: norms of queries and keys; None where they are unknown.
        keys_seen: which keys are seen by a counted row. None means all keys and requires that k_norm is known and that
            there are no classes.
        classes: the token classes by which the statistics are also split.
        of_key: see BandCall.
        sinks: the number of columns without a key that the entropies include, 0 or 1.
    """
    split = None
    if classes is not None:
        assert keys_seen is not None
        split = _split(classes, rows, counted, q_norm, (k_norm, keys_seen))
    known = {**tensors(rows), "query_norm": torch.zeros_like(rows.total) if q_norm is None else q_norm}
    fields = torch.stack([known[name] for name in ROW_FIELDS])
    which = CountedRows.of(rows.n_keys, counted, sinks, fields.dtype)
    products = q_norm is not None and k_norm is not None
    return reduce_fields(fields, which, k_norm, keys_seen, of_key, products=products, classes=split)


def reduce_fields(
    fields: Float[Tensor, "fields b h t"],
    rows: CountedRows,
    k_norm: Float[Tensor, "b g s"] | None,
    keys_seen: Bool[Tensor, "b g s"] | None,
    of_key: Int[Tensor, " s"] | None = None,
    *,
    products: bool = True,
    classes: ClassStats | None = None,
) -> LogitStats:
    """Returns LogitStats from the statistics of rows, given as one tensor in the order of ROW_FIELDS.

    All fields are reduced at once, because every operation costs some microseconds, regardless of its size.

    Args:
        fields: statistics of each row.
        rows: which of these rows are counted.
        k_norm, keys_seen, of_key: see `reduce_rows`.
        products: whether q and k are known.
        classes: the statistics split by class.
    """
    h = fields.shape[2]
    x = fields.transpose(1, 2).flatten(2)
    if rows.single is not None:
        copied = fields.is_contiguous() and min(fields.shape[1:3]) > 1  # flatten moves numbers only then
        x = x if copied else x.clone()
        x[_AT["entropy"]].masked_fill_(rows.single, 0.0)
    if rows.blank is None:
        least, most = torch.aminmax(x, dim=-1)
        counted = x
    else:
        least = x.masked_fill(rows.blank, torch.inf).amin(-1)
        most = x.masked_fill(rows.blank, -torch.inf).amax(-1)
        counted = x.masked_fill(rows.blank, 0.0)
    means = (counted.sum(-1) / rows.counts).unbind()
    of_free = (x[_AT["entropy"] : _AT["first_weight"] + 1] / rows.scales).clamp_max_(1)  # neighbours
    if rows.bound is not None:
        of_free.masked_fill_(rows.bound, 0.0)
    normalized, sink_share = (of_free.sum(-1) / rows.free).unbind()
    lows, tops = least.unbind(), most.unbind()
    most_norm = tops[_AT["query_norm"]]
    if rows.blank is not None:
        most_norm = most_norm.clamp_min(0)
    by_head = RowsByHead(x, rows.n_keys)
    over_rows = {"n_free": (rows.bound, rows.n_free), "n_queries": (rows.blank, rows.n_queries)}
    own = {
        name: _reduced(formula(by_head), *over_rows[MERGES[name].count or "n_queries"], MERGES[name])
        for name, formula in FORMULAS.items()
    }
    n_queries, n_free, n_pairs = (n.expand(h) for n in (rows.n_queries, rows.n_free, rows.n_pairs))
    return LogitStats(
        **own,
        max_logit=tops[_AT["max_logit"]],
        min_logit=lows[_AT["min_logit"]],
        mean_logit=means[_AT["total"]],
        capped_max_logit=tops[_AT["capped_max"]],
        entropy=means[_AT["entropy"]],
        entropy_min=lows[_AT["entropy"]],
        query_norm=means[_AT["query_norm"]],
        query_norm_max=most_norm,
        n_queries=n_queries,
        n_pairs=n_pairs,
        normalized_entropy=normalized,
        sink_share=sink_share,
        share_above=means[_AT["above"]],
        qk_frobenius=torch.linalg.vector_norm(counted[_AT["product_norm"]], dim=-1),
        cos_max=tops[_AT["cos_max"]] if products else torch.full_like(normalized, -torch.inf),
        cos_mean=means[_AT["cos_total"]],
        n_free=n_free,
        n_products=n_pairs if products else torch.zeros_like(n_pairs),
        classes=classes,
        **_keys(k_norm, keys_seen, of_key, fields),  # type: ignore[arg-type]
    )


class RowsByHead:
    """The statistics [h n] of rows, accessed by name, as the formulas of LogitStats read them."""

    def __init__(self, fields: Float[Tensor, "fields h n"], n_keys: Int[Tensor, "#h n"]) -> None:
        self.n_keys, self._fields = n_keys, fields

    def __getattr__(self, name: str) -> Float[Tensor, "h n"]:
        if name not in _AT:
            raise AttributeError(f"expected one of {', '.join(ROW_FIELDS)} or n_keys, got {name}")
        return self._fields[_AT[name]]


def _reduced(x: Float[Tensor, "h n"], left_out: Tensor | None, n: Tensor, merge: Merge) -> PerHead:
    """Returns each head's mean, largest or smallest value over its n rows, by the rule that also merges data sets."""
    if merge.how == "mean":
        x = x if left_out is None else x.masked_fill(left_out, 0.0)
        return x.sum(1) / n.clamp_min(1)
    assert merge.how in ("max", "min")
    x = x if left_out is None else x.masked_fill(left_out, merge.neutral)
    return x.amax(1) if merge.how == "max" else x.amin(1)


def _split(
    classes: TokenClasses,
    rows: RowStats,
    counted: Tensor | None,
    q_norm: Tensor | None,
    keys: tuple[Tensor | None, Tensor],
) -> ClassStats:
    """Returns the statistics split by class. `keys` holds the key norms (None if unknown) and which keys are seen."""
    over = rows.n_keys > 0 if counted is None else (rows.n_keys > 0) & counted[:, None]
    assert rows.class_max is not None
    assert rows.class_mass is not None
    assert rows.class_keys is not None
    query, key = (one_hot(c, len(classes.names)).to(over.device) for c in (classes.query, classes.key))
    q_mean, q_most, n_normed = class_norms(query, q_norm, over, rows.total)
    k_mean, k_most, n_keys = class_norms(key, keys[0], keys[1], rows.total)
    return ClassStats(
        names=classes.names,
        query_norm=q_mean,
        query_norm_max=q_most,
        n_normed=n_normed,
        key_norm=k_mean,
        key_norm_max=k_most,
        n_keys=n_keys,
        **class_stats(query, (rows.class_max, rows.class_mass, rows.class_keys), over, rows.n_keys),
    )


def _keys(norm: Tensor | None, seen: Tensor | None, of_key: Tensor | None, like: Tensor) -> dict[str, Tensor]:
    """Returns the mean and largest norm of the seen keys, overall and by distance from the first seen key of their
    sequence. `seen` is None if every key is seen; the norms are then known."""
    if norm is None:
        assert seen is not None
        norm, seen = like.new_zeros(seen.shape), torch.zeros_like(seen)
    if seen is None and not norm.shape[2]:
        seen = torch.ones_like(norm, dtype=torch.bool)
    if seen is None and of_key is None:
        known = _all_keys(norm.shape[0], norm.shape[2], norm.device)
        count, counts = (n.expand(norm.shape[1], *n.shape[1:]) for n in known)
        by_key = norm.sum(0)
        sums = _binned(by_key)
    else:
        given = torch.ones((), dtype=torch.bool, device=norm.device).expand(norm.shape) if seen is None else seen
        if not norm.shape[2]:  # amax needs a key, so pad with one that nobody sees
            norm, given = (torch.nn.functional.pad(x, (0, 1)) for x in (norm, given))
        norm = norm if seen is None else norm.masked_fill(~given, 0.0)
        count, by_key = given.sum((0, 2)), norm.sum(0)
        sums, counts = _by_position(norm, given, of_key)
    return {
        "key_norm": by_key.sum(-1) / count.clamp_min(1),
        "key_norm_max": norm.amax((0, 2)),
        "n_keys": count,
        "key_norm_by_position": sums / counts.clamp_min(1),
        "n_keys_by_position": counts,
    }


def _by_position(norm: Tensor, given: Tensor, of_key: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the sum of the norms of the keys in `given` and the number of these keys, by distance from the first key
    of each sequence."""
    if of_key is None or not of_key.numel():
        s = norm.shape[2]
        place = torch.arange(s, device=norm.device) + given.to(torch.uint8).argmax(-1, keepdim=True)
        within, place = place < s, place.clamp_max(s - 1)
        norms, there = norm.gather(2, place) * within, given.gather(2, place) & within
        return _binned(norms.sum(0)), _binned(there.sum(0))
    offset = _offsets(given, of_key)
    inside = [given & (offset >= a) & (offset < b) for a, b in _bins(offset.shape[2])]
    sums = [norm.where(one, 0.0).sum((0, 2)) for one in inside]
    return _padded(sums), _padded([one.sum((0, 2)) for one in inside])


def _padded(bins: Sequence[Shaped[Tensor, " g"]]) -> Shaped[Tensor, "g bins"]:
    """Returns the values of the first bins, and 0 for the remaining bins."""
    return torch.nn.functional.pad(torch.stack([*bins], dim=1), (0, POSITION_BINS - len(bins)))


@functools.lru_cache(maxsize=64)
def _all_keys(batch: int, keys: int, device: torch.device) -> tuple[Int[Tensor, " 1"], Int[Tensor, "1 bins"]]:
    """Returns the number of keys in all sequences of this length, in total and in each bin."""
    counts = [batch * (b - a) for a, b in _bins(keys)]
    counts += [0] * (POSITION_BINS - len(counts))
    return torch.full((1,), batch * keys, device=device), torch.tensor([counts], device=device)


def _binned(keys: Shaped[Tensor, "g s"]) -> Shaped[Tensor, "g bins"]:
    """Returns the sums over the keys of each bin; on a CPU, with one operation instead of one per bin."""
    if not keys.is_cpu:
        return _padded([keys[:, a:b].sum(1) for a, b in _bins(keys.shape[1])])
    ends = _ends(keys.shape[1]).expand(keys.shape[0], -1)
    if keys.is_floating_point():
        return torch.segment_reduce(keys, "sum", offsets=ends, axis=1, unsafe=True)
    return torch.segment_reduce(keys.double(), "sum", offsets=ends, axis=1, unsafe=True).long()  # exact for counts


@functools.lru_cache(maxsize=64)
def _ends(n_keys: int) -> Int[Tensor, "1 edges"]:
    firsts = [a for a, _ in _bins(n_keys)]
    return torch.tensor([[*firsts, *[n_keys] * (POSITION_BINS + 1 - len(firsts))]], device="cpu")


@functools.lru_cache(maxsize=64)
def _bins(n_keys: int) -> tuple[tuple[int, int], ...]:
    """Returns the start and stop of each of the POSITION_BINS bins; the last bin stops after the last key. Bins that
    begin after the last key are empty and are left out."""
    edges = [0, *(1 << i for i in range(POSITION_BINS - 1))]
    edges = edges[: 1 + sum(edge < n_keys for edge in edges[1:])]
    return tuple(zip(edges, [*edges[1:], n_keys]))


def _offsets(seen: Tensor, of_key: Tensor) -> Tensor:
    """Returns the distance [b g s] of each seen key from the first seen key of its sequence; sequences are packed."""
    index = torch.arange(seen.shape[2], device=seen.device)
    before = torch.where(seen, index, -1).cummax(-1).values.roll(1, -1)
    before[..., 0] = -1
    first = seen & ((before < 0) | (of_key[before.clamp_min(0)] != of_key))
    return index - torch.where(first, index, 0).cummax(-1).values
