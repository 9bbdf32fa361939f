"""LogitStats: what attention logits of one site look like, per head; a monoid."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.classes import ClassStats, merge_classes

PerHead = Float[Tensor, " h"]
POSITION_BINS = 24  # by position: bin 0 is offset 0, bin i >= 1 offsets 2^(i-1) .. 2^i - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitStats:
    """Statistics over the visible (query, key) pairs of one site; [h] per query head, [g] per key head.

    Logits are signed, after the scale and bias, before the cap. Entropy is in nats, of the weights before
    dropout, over query rows that see at least one key. Norms are those of q and k as they enter the dot
    product, after norm and rotation. Detached; float32 or wider. `merge` adds data: key blocks,
    micro-batches, ranks.

    normalized_entropy: mean of H_i / ln n_i, in [0, 1], over the `n_free` rows that see n_i >= 2 keys.
    sink_share: over the same rows, the mean weight on the first key that the row sees, before dropout, after the
        cap, of weights that sum to one over the keys: like the entropy it leaves a sink column out.
    share_above: share of pairs whose logit (signed, before the cap) is above the threshold that was asked for.
    qk_frobenius: root of the sum over pairs of (q·k)², without scale, bias or cap, of q and k as they enter the
        product; a model that folds its scale into q has it in there. Divide by √d for logits under 1/√d.
    cos_max, cos_mean: of the angle between those q and k; 0 where one of them is zero.
    n_products: the pairs behind these three; 0 where q and k were not seen, only their logits: the three are then
        not measured and read 0, -inf, 0.
    key_norm_by_position: mean key norm by distance from the first visible key of its sequence (batch row): bin 0
        is that key, bin i >= 1 holds offsets 2^(i-1) .. 2^i - 1; `n_keys_by_position` keys each.
    classes: the same split by token classes, where those of the call are known.
    """

    max_logit: PerHead
    min_logit: PerHead
    mean_logit: PerHead
    capped_max_logit: PerHead
    entropy: PerHead
    entropy_min: PerHead
    query_norm: PerHead
    query_norm_max: PerHead
    key_norm: Float[Tensor, " g"]
    key_norm_max: Float[Tensor, " g"]
    n_queries: Int[Tensor, " h"]
    n_pairs: Int[Tensor, " h"]
    n_keys: Int[Tensor, " g"]
    normalized_entropy: PerHead
    sink_share: PerHead
    share_above: PerHead
    qk_frobenius: PerHead
    cos_max: PerHead
    cos_mean: PerHead
    n_free: Int[Tensor, " h"]
    n_products: Int[Tensor, " h"]
    key_norm_by_position: Float[Tensor, "g bins"]
    n_keys_by_position: Int[Tensor, "g bins"]
    classes: ClassStats | None = None

    @property
    def max_abs_logit(self) -> PerHead:
        """Largest magnitude; 0 where nothing was seen."""
        return torch.maximum(self.max_logit, -self.min_logit).clamp_min(0)

    @classmethod
    def empty(cls, n_heads: int, n_kv_heads: int, like: Tensor) -> LogitStats:
        """The neutral element: maxima -inf, minima +inf, means 0, counts 0."""

        def full(n: int, value: float) -> Tensor:
            return torch.full((n,), value, dtype=like.dtype, device=like.device)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=like.device)

        h, g, inf = n_heads, n_kv_heads, torch.inf
        return cls(
            max_logit=full(h, -inf),
            min_logit=full(h, inf),
            mean_logit=full(h, 0),
            capped_max_logit=full(h, -inf),
            entropy=full(h, 0),
            entropy_min=full(h, inf),
            query_norm=full(h, 0),
            query_norm_max=full(h, 0),
            key_norm=full(g, 0),
            key_norm_max=full(g, 0),
            n_queries=zeros(h),
            n_pairs=zeros(h),
            n_keys=zeros(g),
            normalized_entropy=full(h, 0),
            sink_share=full(h, 0),
            share_above=full(h, 0),
            qk_frobenius=full(h, 0),
            cos_max=full(h, -inf),
            cos_mean=full(h, 0),
            n_free=zeros(h),
            n_products=zeros(h),
            key_norm_by_position=full(g, 0)[:, None].repeat(1, POSITION_BINS),
            n_keys_by_position=zeros(g, POSITION_BINS),
        )


TENSORS = tuple(f.name for f in dataclasses.fields(LogitStats) if f.name != "classes")
# How each field merges: the larger, the smaller, the sum, the root of the sum of squares, or the mean weighted by a
# count.
_MAX = ("max_logit", "capped_max_logit", "query_norm_max", "key_norm_max", "cos_max")
_MIN = ("min_logit", "entropy_min")
_SUM = ("n_queries", "n_pairs", "n_keys", "n_free", "n_products", "n_keys_by_position")
_ROOT = ("qk_frobenius",)
_MEAN = {
    "mean_logit": "n_pairs",
    "share_above": "n_pairs",
    "entropy": "n_queries",
    "query_norm": "n_queries",
    "normalized_entropy": "n_free",
    "sink_share": "n_free",
    "cos_mean": "n_products",
    "key_norm": "n_keys",
    "key_norm_by_position": "n_keys_by_position",
}


def merge(a: LogitStats, b: LogitStats) -> LogitStats:
    """The statistics of both data sets together. Associative and commutative up to rounding."""
    if a.max_logit.shape != b.max_logit.shape or a.key_norm.shape != b.key_norm.shape:
        raise InvalidValueError(
            f"cannot merge statistics of {len(a.max_logit)} heads ({len(a.key_norm)} key heads) with those of "
            f"{len(b.max_logit)} ({len(b.key_norm)}); merge only statistics of the same site"
        )
    fields: dict[str, Tensor] = {}
    for name in _MAX:
        fields[name] = torch.maximum(getattr(a, name), getattr(b, name))
    for name in _MIN:
        fields[name] = torch.minimum(getattr(a, name), getattr(b, name))
    for name in _SUM:
        fields[name] = getattr(a, name) + getattr(b, name)
    for name in _ROOT:
        fields[name] = torch.hypot(getattr(a, name), getattr(b, name))
    for name, count in _MEAN.items():
        mean = getattr(a, name)
        # In the means' dtype: a quotient of integers would be float32.
        share = getattr(b, count).to(mean.dtype) / fields[count].clamp_min(1)
        fields[name] = torch.lerp(mean, getattr(b, name), share)
    return LogitStats(**fields, classes=merge_classes(a.classes, b.classes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitBracket:
    """Bounds on the largest logit per head, from row logsumexps that a kernel gave for free.

    `lower <= max_logit <= upper`. `entropy` is there when it was asked for; it tightens the lower bound
    from lse - ln n to lse - H, so the bracket closes exactly when attention collapses. `certified` marks
    heads whose `lower` is the exact maximum.
    """

    lower: PerHead
    upper: PerHead
    entropy: PerHead | None = None
    certified: Tensor | None = None
