"""Per-head statistics from the logits of a block of rows, and how those of blocks merge: the formulas. `kernels.statistics`
makes the logits from q and k, block by block.

Shapes: b batch, t queries, s keys, h query heads, g key heads, c classes, r rows of a block, n keys of a block.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from dataclasses import field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import (
    ClassStats,
    Members,
    TokenClasses,
    class_maxima,
    class_norms,
    class_stats,
    merge_classes,
    merge_rules,
    merged,
    one_hot,
    rule,
    tensors,
)

# LogitStats: per-head statistics of one site's attention logits. They merge associatively.

PerHead = Float[Tensor, " h"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitStats:
    """Statistics over the visible (query, key) pairs of one site; [h] per query head, [g] per key head.

    Logits are signed, after scale and bias and before the cap, but for `logit_spread`. The entropy, in nats, is that of
    the weights before dropout, over query rows that see at least one key. Norms are those of q and k as they enter the
    dot product, after norm and rotation. Tensors are detached, in float32 or wider. `merge` combines key blocks,
    micro-batches and ranks.

    Attributes:
        normalized_entropy: mean of H_i / ln n_i, in [0, 1], over the `n_free` rows that see n_i >= 2 keys; with a sink
            column, the mean of H_i / ln (n_i + 1).
        softmax_gradient: mean over the `n_free` rows of Σ p (1 - p) over 1 - 1 / n_i, in [0, 1]: the share that the
            softmax passes back of what uniform attention on the same n_i keys would. The weights p sum to one over the
            keys alone, without the sink column.
        sink_share: over the same rows, the mean weight on the first key that the row sees, after the cap and before
            dropout. As for the entropy, the weights sum to one over the keys and the sink column, if there is one.
        share_above: share of pairs whose logit (signed, before the cap) exceeds the requested threshold.
        qk_frobenius: √Σ (q·k)² over the pairs, for q and k as they enter the product, without scale, bias or cap. A
            scale that the model folds into q is included. Divide by √d for logits with the scale 1/√d.
        cos_max: largest cosine of the angle between q and k; the cosine is 0 if either is zero.
        cos_mean: mean of these cosines.
        n_products: number of pairs over which qk_frobenius, cos_max and cos_mean are computed. It is 0 if only the
            logits were observed, not q and k; these three are then not measured and are 0, -inf and 0.
        classes: the statistics split by token class, if the classes of the call are known.
    """

    #: largest, in nats; -inf where no pair is visible
    max_logit: PerHead = field(metadata=rule("max", -torch.inf))
    #: smallest, in nats; +inf where no pair is visible
    min_logit: PerHead = field(metadata=rule("min", torch.inf))
    #: mean over the `n_pairs` pairs, in nats
    mean_logit: PerHead = field(metadata=rule("mean", count="n_pairs"))
    #: largest after the cap, in nats
    capped_max_logit: PerHead = field(metadata=rule("max", -torch.inf))
    #: mean over `n_queries` rows, in nats, >= 0
    entropy: PerHead = field(metadata=rule("mean", count="n_queries"))
    #: smallest entropy of any row, in nats
    entropy_min: PerHead = field(metadata=rule("min", torch.inf))
    #: mean L2 norm of q over `n_queries` rows
    query_norm: PerHead = field(metadata=rule("mean", count="n_queries"))
    query_norm_max: PerHead = field(metadata=rule("max"))  #: largest L2 norm of q
    #: mean L2 norm of `n_keys` keys
    key_norm: Float[Tensor, " g"] = field(metadata=rule("mean", count="n_keys"))
    #: largest L2 norm of k
    key_norm_max: Float[Tensor, " g"] = field(metadata=rule("max"))
    #: rows that see at least one key
    n_queries: Int[Tensor, " h"] = field(metadata=rule("sum"))
    n_pairs: Int[Tensor, " h"] = field(metadata=rule("sum"))  #: visible pairs
    n_keys: Int[Tensor, " g"] = field(metadata=rule("sum"))  #: keys that were counted
    normalized_entropy: PerHead = field(metadata=rule("mean", count="n_free"))
    softmax_gradient: PerHead = field(metadata=rule("mean", count="n_free"))
    sink_share: PerHead = field(metadata=rule("mean", count="n_free"))
    share_above: PerHead = field(metadata=rule("mean", count="n_pairs"))
    qk_frobenius: PerHead = field(metadata=rule("root"))
    cos_max: PerHead = field(metadata=rule("max", -torch.inf))
    cos_mean: PerHead = field(metadata=rule("mean", count="n_products"))
    #: mean over `n_free` rows of the row's largest logit minus its mean, in nats
    logit_gap: PerHead = field(metadata=rule("mean", count="n_free"))
    #: largest, over rows, of a row's largest logit less the row's mean, in nats, >= 0; of scale · q·k as it enters the
    #: softmax, after the cap and without biases. It is what verdicts judge: no constant on the logits changes it
    logit_spread: PerHead = field(metadata=rule("max", -torch.inf))
    n_free: Int[Tensor, " h"] = field(metadata=rule("sum"))
    n_products: Int[Tensor, " h"] = field(metadata=rule("sum"))
    classes: ClassStats | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Returns every measured statistic and count by name, except those split by class."""
        # One call, as it runs several times per step.
        return dict(zip(TENSORS, _ALL_TENSORS(self)))

    def value(self, name: str) -> Tensor | None:
        """Returns a statistic by its recorded name (records.HEAD_FIELDS); None if unknown or not measured.

        >>> LogitStats.empty(2, 1, torch.zeros(0)).value("entropy")
        tensor([0., 0.])
        """
        return getattr(self, name) if name in RECORDED else None

    @property
    def non_finite(self) -> PerHead:
        """1 for each head whose logits or entropy are NaN or infinite, otherwise 0."""
        # Without pairs, the minimum was not measured; a head whose rows see no key has no maximum.
        low = self.min_logit.isfinite() | (self.n_pairs == 0)
        is_empty = (self.n_queries == 0) & (self.max_logit == -torch.inf)
        high = self.max_logit.isfinite() | is_empty
        return (~(high & low & self.entropy.isfinite())).to(self.max_logit.dtype)

    @property
    def max_abs_logit(self) -> PerHead:
        """The largest magnitude of any logit; 0 if there is no data."""
        return torch.maximum(self.max_logit, -self.min_logit).clamp_min(0)

    @classmethod
    def empty(cls, n_heads: int, n_kv_heads: int, like: Tensor) -> LogitStats:
        """Returns the neutral element: maxima -inf, minima +inf, means 0, counts 0."""
        fields = {}
        for name, merge in MERGES.items():
            heads = n_kv_heads if of_key_heads(name) else n_heads
            dtype = torch.int64 if merge.how == "sum" else like.dtype
            fields[name] = torch.full(
                (heads,), merge.neutral, dtype=dtype, device=like.device
            )
        return cls(**fields)  # type: ignore[arg-type]


def of_key_heads(name: str) -> bool:
    """True for fields of `LogitStats` with one value per key head, False for those with one per query head."""
    return name.startswith(("key_", "n_keys"))


MERGES = merge_rules(LogitStats)
TENSORS = tuple(MERGES)
_ALL_TENSORS = operator.attrgetter(*TENSORS)
# Properties that are recorded.
DERIVED = ("max_abs_logit", "non_finite")
RECORDED = {*TENSORS, *DERIVED}


def merge(a: LogitStats, *others: LogitStats) -> LogitStats:
    """Merges the statistics of two or more data sets: extrema, and means weighted by their counts.

    The merge is associative and commutative up to rounding. Source: derived.

    Raises:
        InvalidValueError: the numbers of heads differ.

    >>> import qkeel
    >>> q, spec = torch.eye(4)[None, None], qkeel.AttentionSpec()
    >>> _, a = qkeel.attention(q, q, q, spec=spec, stats=True)
    >>> _, b = qkeel.attention(2 * q, q, q, spec=spec, stats=True)
    >>> both = merge(a, b)
    >>> [round(x.max_logit.item(), 4) for x in (a, b, both)], both.n_queries.item()
    ([0.5, 1.0, 1.0], 8)
    """
    for b in others:
        if (
            a.max_logit.shape != b.max_logit.shape
            or a.key_norm.shape != b.key_norm.shape
        ):
            raise InvalidValueError(
                f"cannot merge statistics of {len(a.max_logit)} heads ({len(a.key_norm)} key heads) with those of "
                f"{len(b.max_logit)} ({len(b.key_norm)}); merge only statistics of the same site"
            )
    if not others:
        return a
    parts = [tensors(a), *map(tensors, others)]
    classes = functools.reduce(
        merge_classes, [stats.classes for stats in others], a.classes
    )
    return LogitStats(**merged(parts, MERGES), classes=classes)


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


def with_sink(
    entropy: PerRow, first: PerRow, lse: PerRow, sink: Tensor
) -> tuple[PerRow, PerRow]:
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
    # Beyond this, one share is 0, and 0 · inf is NaN.
    gap = (lse - sink).clamp(-1e4, 1e4)
    kept, taken = torch.sigmoid(gap), torch.sigmoid(-gap)
    logs = torch.nn.functional.logsigmoid
    return kept * entropy - kept * logs(gap) - taken * logs(-gap), kept * first


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
        partly_visible = self.visible.expand(
            *self.visible.shape[:2], rows, self.n - self.start
        )
        return partly_visible.sum(-1) + self.start

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
        full = (
            torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
            .expand(x.shape)
            .clone()
        )
        full[..., self.start :] = self.visible
        return full

    def _penalty(self, x: Tensor) -> Tensor:
        assert self.visible is not None
        return torch.where(
            self.visible, x.new_zeros(()), x.new_full((), torch.finfo(x.dtype).min / 4)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStats:
    """Statistics of each query row. Where `n_keys` is 0, the other fields are meaningless."""

    n_keys: Int[Tensor, "b h t"]  #: visible keys
    max_logit: PerRow  #: largest logit before the cap, in nats
    min_logit: PerRow  #: smallest logit before the cap, in nats
    spread: PerRow  #: largest less mean of the logits after the cap and without biases, in nats
    capped_max: PerRow  #: largest after the cap, in nats
    total: PerRow  #: sum of logits
    above: PerRow  #: number of logits above the threshold
    entropy: PerRow  #: of the weights, in nats
    first_weight: PerRow  #: weight on the first visible key
    #: what the softmax passes back, see `softmax_gradient`; meaningless where `n_keys` is 1
    softmax_gradient: PerRow
    product_norm: PerRow  #: square root of Σ(q·k)² over the row's pairs
    cos_max: PerRow  #: largest cosine of q and k, in [-1, 1]
    cos_total: PerRow  #: sum of cosines over the pairs
    #: largest logit over the keys of each class
    class_max: PerRowAndClass | None = None
    #: weight on the keys of each class, in [0, 1]
    class_mass: PerRowAndClass | None = None
    class_keys: PerRowAndClass | None = None  #: visible keys of each class

    @classmethod
    def cat(cls, parts: list[RowStats], dim: int = 2) -> RowStats:
        """Concatenates rows or, with dim=1, the heads of several calls."""
        tensors_of_blocks = [tensors(block) for block in parts]
        return cls(
            **{
                name: torch.cat([block[name] for block in tensors_of_blocks], dim=dim)
                for name in tensors_of_blocks[0]
            }
        )


def spread_rows(x: Tensor, visible_keys: VisibleKeys) -> PerRow:
    """Returns the largest of each row of blanked x [b h r n] less the row's mean; leaves x lowered."""
    n = visible_keys.counts(x.shape[2], x.device).clamp_min(1)
    mean = x.sum(-1) / n
    return visible_keys.lower_(x).amax(-1) - mean


def extreme_rows(
    z: Tensor, visible_keys: VisibleKeys, entering: Tensor
) -> tuple[PerRow, PerRow, PerRow]:
    """Returns the largest and smallest logit of each row of blanked z [b h r n], and its spread, -inf, inf and -inf
    where the row sees no key; leaves z lowered.

    entering: blanked logits after the cap and without biases, or z itself.
    """
    none = visible_keys.counts(z.shape[2], z.device) == 0
    low = visible_keys.least(z)
    spread = spread_rows(entering, visible_keys)
    top = (z if entering is z else visible_keys.lower_(z)).amax(-1)
    return (
        top.masked_fill(none, -torch.inf),
        low.masked_fill(none, torch.inf),
        spread.masked_fill(none, -torch.inf),
    )


def row_means(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    ends: tuple[Int[Tensor, "#b t"], Int[Tensor, "#b t"]] | None,
    visible: Bool[Tensor, "#b s"] | None,
) -> PerRow:
    """Returns the mean of q·k over the keys of each row from cumulative sums of keys, in O(T d) and without a T×T
    matrix.

    Source: derived from Σ_j q·k_j = q·Σ_j k_j.

    Args:
        q, k: queries and keys as they enter the product.
        ends: the first key that each row may see and the key after the last; None for all keys.
        visible: which of these keys are seen by any row; None for all.

    Example:
        >>> q, k = torch.ones(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])
        >>> row_means(q, k, (torch.tensor([[0, 0]]), torch.tensor([[1, 2]])), None).tolist()
        [[[1.0, 2.0]]]
    """
    b, g, s, _ = k.shape
    if visible is None:
        visible = torch.ones(1, s, dtype=torch.bool, device=k.device)
    visible = visible.expand(b, s)
    is_hidden = ~visible[:, None, :, None]
    # Sums of what differs between keys keep their digits, however large what all keys have in common is.
    common = k.masked_fill(is_hidden, 0.0).mean(2, keepdim=True)
    sums = torch.nn.functional.pad(
        (k - common).masked_fill(is_hidden, 0.0).cumsum(2), (0, 0, 1, 0)
    )
    counts = torch.nn.functional.pad(visible.cumsum(1), (1, 0))
    if ends is None:
        total, n = sums[:, :, -1:], counts[:, -1:]
    else:
        low, high = (end.expand(b, -1) for end in ends)
        n = counts.gather(1, high) - counts.gather(1, low)
        low, high = (
            end[:, None, :, None].expand(-1, g, -1, k.shape[3]) for end in (low, high)
        )
        total = sums.gather(2, high) - sums.gather(2, low)
    mean = common + total / n.clamp_min(1)[:, None, :, None]
    # The queries that share a key head have the same mean key.
    return (q.unflatten(1, (g, -1)) * mean[:, :, None]).sum(-1).flatten(1, 2)


def logit_rows(
    z: Tensor,
    visible_keys: VisibleKeys,
    threshold: float,
    members: Members | None = None,
) -> dict[str, Tensor]:
    """Returns extrema, totals, spreads and counts of blanked logits z [b h rows n] before the cap; leaves z lowered.

    With `members`, the classes of all keys, z begins at the first key.
    """
    b, h, r, _ = z.shape
    n_keys = visible_keys.counts(r, z.device).expand(b, h, r)
    fields = {"total": z.sum(-1), "min_logit": visible_keys.least(z)}
    top = visible_keys.lower_(z).amax(-1)
    # Comparing every logit costs as much as the exponential and finds nothing if no row maximum is above. Only on a CPU
    # can that be checked without waiting for the device.
    over = z.device.type != "cpu" or bool((top > threshold).any())
    above = (z > threshold).sum(-1).to(z.dtype) if over else torch.zeros_like(top)
    if members is not None:
        block_members = members[:, : z.shape[-1]]
        fields["class_keys"] = visible_keys.counts_of(block_members).expand(b, h, r, -1)
        fields["class_max"] = class_maxima(z, block_members, fields["class_keys"])
    return {
        **fields,
        "max_logit": top,
        "spread": top - fields["total"] / n_keys.clamp_min(1),
        "above": above,
        "n_keys": n_keys,
    }


def softmax_rows(
    z: Tensor,
    visible_keys: VisibleKeys,
    members: Members | None = None,
    sink: Tensor | None = None,
) -> dict[str, Tensor]:
    """Returns the largest capped logit, entropy, first weight, gradient and class weights of softmax(z); overwrites
    lowered z.

    If the logit of a sink is given, the entropy and first weight include the sink; the gradient and class weights are
    over the keys alone.

    With the row maximum m subtracted, H = ln Σe^(z-m) - Σ(z-m)e^(z-m) / Σe^(z-m) has no cancellation even at logits in
    the thousands.
    """
    top = z.amax(-1, keepdim=True)
    # Below this floor the exponential is 0 next to the maximum's 1, but takes a CPU seven times as long.
    z.sub_(top).clamp_(min=math.log(torch.finfo(z.dtype).tiny) + 1)
    p = z.exp()
    mass = p.sum(-1)
    split = (
        {}
        if members is None
        else {"class_mass": by_class(p, members) / mass[..., None]}
    )
    first = visible_keys.first(p) / mass
    squares = torch.linalg.vector_norm(p, dim=-1).div_(mass).square_()
    n_keys = visible_keys.counts(z.shape[2], z.device)
    gradient = softmax_gradient((1 - squares).clamp_min_(0), n_keys)
    entropy = (mass.log() - p.mul_(z).sum(-1) / mass).clamp_min_(0)
    if sink is not None:
        entropy, first = with_sink(
            entropy, first, top[..., 0] + mass.log(), sink.to(z.dtype)
        )
    return {
        "capped_max": top[..., 0],
        "entropy": entropy,
        "first_weight": first,
        "softmax_gradient": gradient,
        **split,
    }


def softmax_gradient(passed: PerRow, n_keys: Int[Tensor, "#b #h r"]) -> PerRow:
    """Returns Σ p (1 - p) / (1 - 1 / n) of rows with weights p on n keys, in [0, 1].

    Σ p (1 - p) is the trace of the softmax's Jacobian diag(p) - p pᵀ, and 1 - 1 / n that of uniform attention: at 0 one
    key takes all, and no gradient passes. Source: derived. Rows with one key have no such number.

    Args:
        passed: Σ p (1 - p) of each row.
        n_keys: the number of keys that each row sees.

    Example:
        >>> p = torch.tensor([[[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]])
        >>> softmax_gradient((p * (1 - p)).sum(-1), torch.tensor([[[3, 3]]])).tolist()
        [[[0.75, 0.0]]]
    """
    n = n_keys.to(passed.dtype)
    return passed * n / (n - 1).clamp_min(1)


def by_class(weights: Tensor, members: Members) -> PerRowAndClass:
    """Returns sums of weights [b h rows n] over the keys of each class, computed as attention to one-hot values."""
    values = members[:, : weights.shape[-1]].expand(len(weights), -1, -1)
    return (weights.flatten(1, 2) @ values).view(*weights.shape[:3], -1)


def product_rows(
    products: Tensor,
    unit: float,
    q_norm: PerRow,
    k_norm: Tensor,
    visible_keys: VisibleKeys,
) -> dict[str, Tensor]:
    """Returns statistics of the products q·k and their cosines, from blanked `products` = unit · q·k [b h rows n] and
    the norms [b h rows] and [b g n]."""
    g, h = k_norm.shape[1], products.shape[1]
    cosines = products * _inverse(k_norm).repeat_interleave(h // g, dim=1)[:, :, None]
    along = _inverse(q_norm) / unit
    n = visible_keys.counts(products.shape[2], products.device).expand(q_norm.shape)
    total = cosines.sum(-1) * along
    return {
        "product_norm": torch.linalg.vector_norm(products, dim=-1) / unit,
        # Rounding may give a cosine of 1 + 1e-7.
        "cos_total": total.clamp(-n, n),
        "cos_max": (visible_keys.lower_(cosines).amax(-1) * along).clamp_(-1, 1),
    }


def no_product_rows(template: Tensor) -> dict[str, Tensor]:
    """Returns the fields of `product_rows` if q and k are unknown; `template` is [b h rows]."""
    return dict.fromkeys(
        ("product_norm", "cos_total", "cos_max"), torch.zeros_like(template)
    )


def _inverse(norm: Tensor) -> Tensor:
    """Returns 1 / norm, or 0 where the norm is 0 or NaN, because hidden keys may hold any value."""
    return torch.where(norm > 0, norm, torch.inf).reciprocal()


class KernelRows(NamedTuple):
    """Statistics of each query row [b h t] from a kernel, in float32; -inf, -inf and 0 for rows that see no key."""

    largest: Tensor
    lse: Tensor
    entropy: Tensor


def reduce_kernel_rows(
    rows: KernelRows, counted: Bool[Tensor, "b t"] | None, n_kv_heads: int
) -> LogitStats:
    """Returns max_logit, entropy, entropy_min and n_queries over counted rows that see a key.

    Other fields are neutral, including capped_max_logit, because the cap is unknown here.
    """
    # Keeps NaN, which must not be lost.
    over = rows.lse != -torch.inf
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


# Statistics of rows in the order in which `reduce_fields` gets them; the last is the L2 norm of the query.
ROW_FIELDS = (
    *(
        "max_logit",
        "min_logit",
        "spread",
        "capped_max",
        "total",
        "above",
        "entropy",
        "first_weight",
        "softmax_gradient",
    ),
    *("product_norm", "cos_max", "cos_total", "query_norm"),
)
_AT = {name: i for i, name in enumerate(ROW_FIELDS)}


def reduce_rows(
    rows: RowStats,
    counted: Bool[Tensor, "b t"] | None,
    q_norm: PerRow | None,
    k_norm: Float[Tensor, "b g s"] | None,
    keys_seen: Bool[Tensor, "b g s"],
    classes: TokenClasses | None = None,
    sinks: int = 0,
) -> LogitStats:
    """Returns LogitStats over counted rows that see a key.

    Args:
        rows: statistics of each row.
        counted: which rows count; None for all.
        q_norm, k_norm: norms of queries and keys; None where they are unknown.
        keys_seen: which keys are seen by a counted row.
        classes: the token classes by which the statistics are also split.
        sinks: the number of columns without a key that the entropies include, 0 or 1.
    """
    split = (
        None
        if classes is None
        else _split(classes, rows, counted, q_norm, (k_norm, keys_seen))
    )
    values = {
        **tensors(rows),
        "query_norm": torch.zeros_like(rows.total) if q_norm is None else q_norm,
    }
    fields = torch.stack([values[name] for name in ROW_FIELDS])
    products = q_norm is not None and k_norm is not None
    return reduce_fields(
        fields,
        rows.n_keys,
        counted,
        k_norm,
        keys_seen,
        sinks=sinks,
        products=products,
        classes=split,
    )


def reduce_fields(
    fields: Float[Tensor, "fields b h t"],
    n_keys: Int[Tensor, "b h t"],
    counted: Bool[Tensor, "b t"] | None,
    k_norm: Float[Tensor, "b g s"] | None,
    keys_seen: Bool[Tensor, "b g s"] | None,
    *,
    sinks: int = 0,
    products: bool = True,
    classes: ClassStats | None = None,
) -> LogitStats:
    """Returns LogitStats from the statistics of rows, given as one tensor in the order of ROW_FIELDS.

    All fields are reduced at once, because every operation costs some microseconds, regardless of its size.

    Args:
        fields: statistics of each row.
        n_keys: the number of keys that each row sees.
        keys_seen: which keys are seen by a counted row. None means all keys and requires that k_norm is known.
        products: whether q and k are known.
        classes: the statistics split by class.
        counted, k_norm, sinks: see `reduce_rows`.
    """
    n = n_keys if counted is None else n_keys.masked_fill(~counted[:, None], 0)
    # [h n], over the rows of all sequences.
    n = n.transpose(0, 1).flatten(1)
    blank, bound = n < 1, n < 2
    n_queries, n_free, n_pairs = (~blank).sum(1), (~bound).sum(1), n.sum(1)
    x = fields.transpose(1, 2).flatten(2).clone()
    # A row with a single column has no entropy: exactly 0, whatever rounding has left.
    x[_AT["entropy"]].masked_fill_(n + sinks < 2, 0.0)
    only_counted = x.masked_fill(blank, 0.0)
    sums, lows, tops = (
        dict(zip(ROW_FIELDS, reduced.unbind()))
        for reduced in (
            only_counted.sum(-1),
            x.masked_fill(blank, torch.inf).amin(-1),
            x.masked_fill(blank, -torch.inf).amax(-1),
        )
    )
    of_queries, of_free, of_pairs = (
        count.clamp_min(1) for count in (n_queries, n_free, n_pairs)
    )
    # From two keys on: ln 1 = 0 would be divided by, and such rows are left out below.
    largest_entropy = (n + sinks).clamp_min(2).to(x.dtype).log()
    # Rounding may bring a share a little above 1.
    shares = torch.stack(
        [
            x[_AT["entropy"]] / largest_entropy,
            x[_AT["first_weight"]],
            x[_AT["softmax_gradient"]],
        ]
    ).clamp_max_(1)
    normalized_entropy, sink_share, gradient = (
        shares.masked_fill_(bound, 0.0).sum(-1) / of_free
    )
    gap = x[_AT["max_logit"]] - x[_AT["total"]] / n
    return LogitStats(
        max_logit=tops["max_logit"],
        min_logit=lows["min_logit"],
        mean_logit=sums["total"] / of_pairs,
        capped_max_logit=tops["capped_max"],
        entropy=sums["entropy"] / of_queries,
        entropy_min=lows["entropy"],
        query_norm=sums["query_norm"] / of_queries,
        query_norm_max=tops["query_norm"].clamp_min(0),
        n_queries=n_queries,
        n_pairs=n_pairs,
        normalized_entropy=normalized_entropy,
        softmax_gradient=gradient,
        sink_share=sink_share,
        share_above=sums["above"] / of_pairs,
        qk_frobenius=torch.linalg.vector_norm(
            only_counted[_AT["product_norm"]], dim=-1
        ),
        cos_max=tops["cos_max"]
        if products
        else torch.full_like(sink_share, -torch.inf),
        cos_mean=sums["cos_total"] / of_pairs,
        logit_gap=gap.masked_fill(bound, 0.0).sum(1) / of_free,
        logit_spread=tops["spread"],
        n_free=n_free,
        n_products=n_pairs if products else torch.zeros_like(n_pairs),
        classes=classes,
        **_keys(k_norm, keys_seen, fields),  # type: ignore[arg-type]
    )


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
    query, key = (
        one_hot(c, len(classes.names)).to(over.device)
        for c in (classes.query, classes.key)
    )
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
        **class_stats(
            query, (rows.class_max, rows.class_mass, rows.class_keys), over, rows.n_keys
        ),
    )


def _keys(
    norm: Tensor | None, visible_keys: Tensor | None, template: Tensor
) -> dict[str, Tensor]:
    """Returns the mean and largest norm of the seen keys, and their number. `seen` is None if every key is seen; the
    norms are then known."""
    if norm is None:
        assert visible_keys is not None
        norm, visible_keys = (
            template.new_zeros(visible_keys.shape),
            torch.zeros_like(visible_keys),
        )
    visible_keys = (
        torch.ones_like(norm, dtype=torch.bool)
        if visible_keys is None
        else visible_keys
    )
    # Amax needs a key, so pad with one that nobody sees.
    if not norm.shape[2]:
        norm, visible_keys = (
            torch.nn.functional.pad(x, (0, 1)) for x in (norm, visible_keys)
        )
    norm = norm.masked_fill(~visible_keys, 0.0)
    count = visible_keys.sum((0, 2))
    total = norm.sum(0).sum(-1)
    return {
        "key_norm": total / count.clamp_min(1),
        "key_norm_max": norm.amax((0, 2)),
        "n_keys": count,
    }
