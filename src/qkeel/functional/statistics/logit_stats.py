"""LogitStats: what attention logits of one site look like, per head; a monoid."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.statistics.class_stats import ClassStats, merge_classes
from qkeel.functional.statistics.merging import Merge, merge_rules, merged, rule, tensors

PerHead = Float[Tensor, " h"]
POSITION_BINS = 24  # by position: bin 0 is offset 0, bin i >= 1 offsets 2^(i-1) .. 2^i - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitStats:
    """Statistics over the visible (query, key) pairs of one site; [h] per query head, [g] per key head.

    Logits are signed, after the scale and bias, before the cap. Entropy is in nats, of the weights before dropout,
    over query rows that see at least one key. Norms are those of q and k as they enter the dot product, after norm
    and rotation. Detached; float32 or wider. `merge` adds data: key blocks, micro-batches, ranks.

    Attributes:
        normalized_entropy: mean of H_i / ln n_i, in [0, 1], over the `n_free` rows that see n_i >= 2 keys.
        sink_share: over the same rows, the mean weight on the first key that the row sees, before dropout, after the
            cap, of weights that sum to one over the keys: like the entropy it leaves a sink column out.
        share_above: share of pairs whose logit (signed, before the cap) is above the threshold that was asked for.
        qk_frobenius: root of the sum over pairs of (q·k)², without scale, bias or cap, of q and k as they enter the
            product; a model that folds its scale into q has it in there. Divide by √d for logits under 1/√d.
        cos_max: the largest cosine of the angle between those q and k; 0 where one of them is zero.
        cos_mean: the mean of these cosines.
        n_products: the pairs behind these three; 0 where q and k were not seen, only their logits: the three are then
            not measured and read 0, -inf, 0.
        key_norm_by_position: mean key norm by distance from the first visible key of its sequence (batch row): bin 0
            is that key, bin i >= 1 holds offsets 2^(i-1) .. 2^i - 1; `n_keys_by_position` keys each.
        classes: the same split by token classes, where those of the call are known.
        entropy_error: half the width of a 95 % interval of `entropy`, where that is of a sample of rows; else None.
    """

    max_logit: PerHead = field(metadata=rule("max", -torch.inf))  #: largest, in nats; -inf where no pair is visible
    min_logit: PerHead = field(metadata=rule("min", torch.inf))  #: smallest, in nats; +inf where no pair is visible
    mean_logit: PerHead = field(metadata=rule("mean", count="n_pairs"))  #: mean over the `n_pairs` pairs, in nats
    capped_max_logit: PerHead = field(metadata=rule("max", -torch.inf))  #: largest after the cap, in nats
    entropy: PerHead = field(metadata=rule("mean", count="n_queries"))  #: mean over `n_queries` rows, in nats, >= 0
    entropy_min: PerHead = field(metadata=rule("min", torch.inf))  #: smallest of a row, in nats
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
    n_free: Int[Tensor, " h"] = field(metadata=rule("sum"))
    n_products: Int[Tensor, " h"] = field(metadata=rule("sum"))
    key_norm_by_position: Float[Tensor, "g bins"] = field(metadata=rule("mean", count="n_keys_by_position"))
    n_keys_by_position: Int[Tensor, "g bins"] = field(metadata=rule("sum"))
    classes: ClassStats | None = None
    entropy_error: PerHead | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every statistic and count that was measured, by name; those by class are left out."""
        return tensors(self)

    def value(self, name: str) -> Tensor | None:
        """A statistic by its recorded name (records.HEAD_FIELDS); None if it has no such name or was not measured.

        >>> LogitStats.empty(2, 1, torch.zeros(0)).value("entropy")
        tensor([0., 0.])
        """
        return getattr(self, name) if name in RECORDED else None

    @property
    def non_finite(self) -> PerHead:
        """1 for a head whose logits or entropy are NaN or infinite, else 0."""
        low = self.min_logit.isfinite() | (self.n_pairs == 0)  # not measured
        return (~(self.max_logit.isfinite() & low & self.entropy.isfinite())).to(self.max_logit.dtype)

    @property
    def max_abs_logit(self) -> PerHead:
        """Largest magnitude; 0 where nothing was seen."""
        return torch.maximum(self.max_logit, -self.min_logit).clamp_min(0)

    @classmethod
    def empty(cls, n_heads: int, n_kv_heads: int, like: Tensor) -> LogitStats:
        """The neutral element: maxima -inf, minima +inf, means 0, counts 0."""

        @functools.cache
        def number(value: float, count: bool) -> Tensor:
            return torch.full((), value, dtype=torch.int64 if count else like.dtype, device=like.device)

        return cls.of_numbers(n_heads, n_kv_heads, number)

    @classmethod
    def of_numbers(cls, n_heads: int, n_kv_heads: int, number: Callable[[float, bool], Tensor]) -> LogitStats:
        """The neutral element made of single numbers, each for all fields that are it; `number(value, count)`."""

        def full(name: str, merge: Merge) -> Tensor:
            heads = n_kv_heads if name.startswith(("key_", "n_keys")) else n_heads
            shape = (heads, POSITION_BINS) if name.endswith("_by_position") else (heads,)
            return number(float(merge.neutral), merge.how == "sum").expand(shape)

        return cls(**{name: full(name, merge) for name, merge in MERGES.items()})  # type: ignore[arg-type]


MERGES = merge_rules(LogitStats)
TENSORS = tuple(MERGES)
DERIVED = ("max_abs_logit", "non_finite")  # properties that are recorded
RECORDED = {*TENSORS, *DERIVED, "entropy_error"}


def merge(a: LogitStats, b: LogitStats) -> LogitStats:
    """The statistics of both data sets as one: extrema, and means weighted by their counts. Associative and commutative
    up to rounding. Source: derived.

    Raises:
        InvalidValueError: the two have other numbers of heads.
    """
    if a.max_logit.shape != b.max_logit.shape or a.key_norm.shape != b.key_norm.shape:
        raise InvalidValueError(
            f"cannot merge statistics of {len(a.max_logit)} heads ({len(a.key_norm)} key heads) with those of "
            f"{len(b.max_logit)} ({len(b.key_norm)}); merge only statistics of the same site"
        )
    fields = merged(tensors(a), tensors(b), MERGES)
    error = b.entropy_error if a.entropy_error is None else a.entropy_error
    if a.entropy_error is not None and b.entropy_error is not None:
        error = merged(tensors(a), tensors(b), {"entropy_error": Merge("mean", count="n_queries")})["entropy_error"]
    return LogitStats(**fields, classes=merge_classes(a.classes, b.classes), entropy_error=error)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitBracket:
    """Bounds on the largest logit per head, from row logsumexps that a kernel gave for free.

    `lower <= max_logit <= upper`. `entropy` is there when it was asked for; it tightens the lower bound
    from lse - ln n to lse - H, so the bracket closes exactly when attention collapses. `entropy_error` is half the
    width of a 95 % interval of an entropy from a sample of rows; None where it is of all rows. `certified` marks
    heads whose `lower` is the exact maximum; never a head with a logit that is NaN or infinite. `note` says what was
    computed, and why, where the bounds did not come from a kernel that attended: then they cost a pass of their own.
    """

    lower: PerHead
    upper: PerHead
    entropy: PerHead | None = None
    entropy_error: PerHead | None = None
    certified: Tensor | None = None
    note: str = ""

    @classmethod
    def exact(
        cls, top: PerHead, entropy: PerHead | None, note: str = "", entropy_error: PerHead | None = None
    ) -> LogitBracket:
        """The bracket that an exact maximum closes."""
        return cls(
            lower=top, upper=top, entropy=entropy, entropy_error=entropy_error, certified=top.isfinite(), note=note
        )
