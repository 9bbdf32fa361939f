"""The attention calls that are captured, with their heads, masks and scale, and the statistics of their logits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import TokenClasses, joined_classes
from qkeel.functional.logits import qk_products
from qkeel.functional.norms import wide
from qkeel.functional.statistics import (
    TENSORS,
    LogitStats,
    merge,
)
from qkeel.kernels.statistics import (
    CallRows,
    logit_stats,
    max_stats,
    reduce_calls,
    row_logsumexp,
)
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.patching.torch_state import in_vmap
from qkeel.spec import AttentionCall, AttentionSpec, Fixed
from qkeel.spec.call import block_of, fields_of, make_call
from qkeel.spec.slot import Params

# Captured attention calls with their layout and hidden pairs, calls whose masks are functions, scores that are written
# out by hand, and the statistics of each.

# An added value this low hides a pair regardless of other values; published masks start
# at -1e4.
HIDES = -9e3
# Added to every pair, a value this low leaves nothing of q·k in float32.
LOST = -1e6
# Minimum gap in nats between the two levels of a mask with values above HIDES;
# published masks: 100.
APART = 60.0


@torch.no_grad()
def hides(added: Shaped[Tensor, ...]) -> Shaped[Tensor, ...]:
    """Returns True where a value that a call adds to its logits hides the pair.

    A value a hides the pair if a <= -9000, or if it lies on the lower of two levels. There are two levels if the values
    above -9000 fall into two groups, separated by a gap of at least 60 nats that is wider than either group, with the
    lower group at -60 or less. At equal q·k, a pair on the lower level then weighs at most e⁻⁶⁰ times as much as a pair
    on the upper level, which is lost to rounding in any float64 sum. A bias that decreases with the distance (ALiBi,
    T5) forms a ramp of values without such a gap, so it hides nothing. If all values of the call are -9000 or less and
    the largest is above -1e6, the -9000 are counted from that one: a constant hides nothing.

    Args:
        added: the added values of all rows and heads of the call, because a single row may contain only one of the
            levels.

    >>> hides(torch.tensor([0.3, -0.2, -99.8, -1e4])).tolist()
    [False, False, True, True]
    >>> hides(-0.5 * torch.arange(400.0)).any().item()
    False
    """
    added = added if added.is_floating_point() else added.double()
    if not added.numel():
        return added <= HIDES
    # A constant on all pairs hides none, however low it is, as long as q·k is not lost in its rounding.
    top = added.amax()
    constant = torch.where((top <= HIDES) & (top > LOST), top, 0.0)
    low = added <= HIDES + constant
    # One number for all pairs of a head is no level: no row has another number above it.
    if added.shape[-2:] == (1, 1):
        return low
    least, most = (
        added.masked_fill(low, torch.inf).amin(),
        added.masked_fill(low, -torch.inf).amax(),
    )
    # A gap that is wider than both groups beside it contains the middle of the full range.
    below = ~low & (added <= (least + most) / 2)
    lower, upper = (
        added.masked_fill(~below, -torch.inf).amax(),
        added.masked_fill(low | below, torch.inf).amin(),
    )
    gap = upper - lower
    # Values that are all equal form a single level, with no level above it.
    levels = (
        upper.isfinite()
        & (gap >= APART)
        & (gap > lower - least)
        & (gap > most - upper)
        & (lower <= -APART)
    )
    return low | (below & levels)


def is_low(value: object) -> bool:
    """True if a constant that replaces logits hides the pair. Nothing of q·k remains in such a logit, so a low value is
    sufficient, and no higher level is needed for comparison."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and float(value.detach()) <= -APART
    return isinstance(value, (int, float)) and value <= -APART


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnrecognizedAttention:
    """Attention that was detected but not recognised. No statistics are computed for it, and no remedy changes it.

    `module` is the name of the module that computes it, `operation` is the operation through which its logits could not
    be traced, and `reason` is a clause that gives the reason.
    """

    module: str
    operation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}: {self.reason}"


# --- Where the heads are in a tensor of scores: in one dimension, in several, or in one merged with the batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The meaning of each dimension of the scores, in letters: b batch, h heads, t queries, s keys, and "bh" for batch
    and heads merged.

    `sizes` are the sizes of the h dimensions, in order; any number of dimensions may be b. `headless` is True if these
    are the scores of a single head out of several. `guess` says why the layout was guessed from the shape of the
    scores, or is "" if it was not guessed.
    """

    groups: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    headless: bool = False
    guess: str = ""

    def __str__(self) -> str:
        return " ".join(g if len(g) == 1 else f"({' '.join(g)})" for g in self.groups)

    @property
    def keys(self) -> int:
        """The dimension of the keys."""
        return next(i for i, group in enumerate(self.groups) if "s" in group)

    def fitted(self, shape: torch.Size) -> HeadLayout | None:
        """The layout of other scores of this shape at the same site, or None if the layout does not fit them.

        Heads that looked like a separate dimension on one sequence may in fact be merged with the batch.
        """
        if len(shape) != len(self.groups):
            return None
        sizes, groups = iter(self.sizes), list(self.groups)
        for place, (n, group) in enumerate(zip(shape, self.groups)):
            # torch.compile takes no generator.
            heads = math.prod([next(sizes) for letter in group if letter == "h"])
            if n % heads or (n != heads and group == "h" and len(shape) > 3):
                return None
            if n != heads and group == "h":
                groups[place] = "bh"
        return (
            self
            if groups == list(self.groups)
            else dataclasses.replace(self, groups=tuple(groups))
        )

    @property
    def rows(self) -> int | None:
        """The dimension of the queries, unless heads are merged with it."""
        return self.groups.index("t") if "t" in self.groups else None

    def apply(
        self, x: Shaped[Tensor, ...], *, vectors: bool = False
    ) -> Shaped[Tensor, "b h t s *d"]:
        """Returns a tensor whose dimensions are those of the scores, rearranged to [b h t s]; with `vectors`, it has
        one vector for each score."""
        if self.groups == ("b", "h", "t", "s"):
            return x
        features = x.shape[-1:] if vectors else ()
        sizes, order = self._single(x.shape[:-1] if vectors else x.shape)
        letters = "".join(self.groups)
        shape = [
            math.prod([n for n, letter in zip(sizes, letters) if letter == role])
            for role in "bhts"
        ]
        last = [len(sizes)] if vectors else []
        x = x.reshape([*sizes, *features]).permute([*order, *last])
        return x.reshape([*shape, *features])

    def undo(
        self, x: Shaped[Tensor, "b h t s"], shape: Sequence[int]
    ) -> Shaped[Tensor, ...]:
        """Returns a tensor [b h t s] rearranged to this shape, the layout of the scores. This is the inverse of
        `apply`."""
        if self.groups == ("b", "h", "t", "s"):
            return x
        sizes, order = self._single(shape)
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([sizes[i] for i in order]).permute(back).reshape(list(shape))

    def _single(self, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """The size of each single letter in a tensor of this shape, and the indices that sort the letters as b, h, t,
        s."""
        heads = iter(self.sizes)
        letters, sizes = "".join(self.groups), list[int]()
        for n, group in zip(shape, self.groups):
            n_heads = next(heads) if "h" in group else 1
            if len(group) == 1:
                sizes.append(n)
            else:
                sizes += [n_heads if y == "h" else n // n_heads for y in group]
        return sizes, [
            i for role in "bhts" for i, letter in enumerate(letters) if letter == role
        ]


def head_counts(module: nn.Module) -> frozenset[int]:
    """The numbers that the module or its configuration names as head counts, which serve as hints where a shape alone
    is ambiguous."""
    holders = [vars(module)]
    config = vars(module).get("config")
    if config is not None and not isinstance(config, (dict, str, int, float)):
        holders.append(vars(config))
    counts: set[int] = set()
    for holder in holders:
        for name, value in holder.items():
            if (
                "head" in name
                and "dim" not in name
                and type(value) is int
                and value > 0
            ):
                counts.add(value)
    return frozenset(counts)


def layout(
    shape: Sequence[int],
    hints: frozenset[int],
    batch: int,
    keys: int | None = None,
    rows: int | None = None,
) -> HeadLayout:
    """The layout of scores of this shape, guessed from the known head counts and the batch size.

    Args:
        shape: the shape of the scores.
        hints: the possible numbers of heads; see `head_counts`.
        batch: the first size of the module's input, or 0 if unknown.
        keys: the dimension that the softmax normalises, by default the last.
        rows: the dimension of the queries, by default the last one other than `keys`.
    """
    n = len(shape)
    keys = n - 1 if keys is None else keys
    if rows is None:
        rows = max((i for i in range(n) if i != keys), default=keys)
    places = [i for i in range(n) if i not in (keys, rows)]
    lead = [shape[i] for i in places]
    letters, sizes, is_certain = _lead(lead, hints, batch)
    groups = ["b"] * n
    groups[keys], groups[rows] = "s", "t"
    for place, letter in zip(places, letters):
        groups[place] = letter
    guess = (
        f"scores of shape {tuple(shape)} do not show which dimension holds the heads"
    )
    return HeadLayout(
        groups=tuple(groups),
        sizes=sizes,
        headless=not sizes and len(lead) < 2,
        guess="" if is_certain else guess,
    )


def _lead(
    lead: Sequence[int], hints: frozenset[int], batch: int
) -> tuple[list[str], tuple[int, ...], bool]:
    """The letters of the dimensions before the query and key dimensions, the sizes of the head dimensions, and whether
    this is certain."""
    n = len(lead)
    if n == 0 or (n == 1 and lead[0] == batch):
        return ["b"] * n, (), True
    if n == 1:
        # Heads and batch in one dimension.
        heads, remainder = divmod(lead[0], batch or lead[0])
        if heads > 1 and not remainder:
            return ["bh"], (heads,), heads in hints
        # Scores have one matrix for each query head, of which there are never fewer than key heads: so the largest.
        stated = [h for h in hints if lead[0] % h == 0]
        return ["bh"], (max(stated, default=lead[0]),), False
    # Grouped queries are often kept as [b g h/g t s]: key heads, and the query heads of each.
    if n > 2 and lead[1] * lead[2] in hints:
        return ["b", "h", "h", *"b" * (n - 3)], (lead[1], lead[2]), True
    # Where several dimensions could be the heads, the second is it far more often than the first: [b h t s].
    order = (1, 0) if n == 2 else (1, 2, 0)
    stated = [i for i in order if lead[i] in hints and (i or lead[0] != batch)]
    if stated:
        place, is_certain = stated[0], lead.count(lead[stated[0]]) == 1
    else:
        place = 0 if lead[1] == batch != lead[0] else 1
        is_certain = n == 2 and batch in lead and lead[0] != lead[1]
    letters = ["h" if i == place else "b" for i in range(n)]
    return letters, (lead[place],), is_certain or (n == 2 and 1 in lead)


def fewest_keys(k: Float[Tensor, "b h s d"]) -> Float[Tensor, "b g s d"]:
    """Returns the distinct keys [b g s d] of keys [b h s d] that are repeated in blocks for grouped queries."""
    h = k.shape[1]
    # Keys that are all zero are equal in every head, which says nothing about repetition.
    if h < 2 or not torch.equal(k[:, 0], k[:, 1]) or not bool(k.any()):
        return k
    for repeats in range(h, 1, -1):
        if h % repeats == 0:
            groups = k.unflatten(1, (h // repeats, repeats))
            if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
                return groups[:, :, 0]
    return k


def known_keys(
    heads: tuple[int, int], k: Float[Tensor, "b h s d"]
) -> Float[Tensor, "b g s d"]:
    """The key heads [b g s d] when the numbers of query and key heads are known, so that no keys need to be
    compared."""
    n, groups = heads
    return (
        k.unflatten(1, (groups, n // groups))[:, :, 0]
        if k.shape[1] == n != groups
        else k
    )


def key_heads(k: Float[Tensor, "b h s d"]) -> tuple[int, ...] | None:
    """The key head of each query head if keys are repeated in an order other than blocks, otherwise None.

    Key heads are numbered in the order in which the query heads use them; each must serve the same number of query
    heads.
    """
    h = k.shape[1]
    if h < 3 or not bool(k.any()):
        return None
    _, numbers = (
        k.detach().transpose(0, 1).flatten(1).unique(dim=0, return_inverse=True)
    )
    order = list(dict.fromkeys(numbers.tolist()))
    heads = tuple(order.index(i) for i in numbers.tolist())
    counts = {heads.count(head) for head in range(len(order))}
    is_even = 1 < len(order) < h and len(counts) == 1
    return heads if is_even and list(heads) != sorted(heads) else None


# --- Attention calls whose masks are functions of positions, evaluated block by block without ever forming T×T

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexCall(AttentionCall):
    """A call of flex_attention, with score_mod and block_mask as they were passed.

    The logit is the output of score_mod. A tanh cap inside score_mod is one of many operations in a function and cannot
    be separated from the others, so it counts as part of the logit. A pair is hidden by the block mask, by a score of
    -inf, or by a negative score that score_mod lowered by 9000 or more, as additive masks do.
    """

    score_mod: ScoreMod | None
    block_mask: BlockMask | None

    def scores(self, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
        z = AttentionCall.scores(self, q, k, rows, keys)
        return z if self.score_mod is None else _modified(self.score_mod, z, rows, keys)

    def unbiased(self, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
        z = AttentionCall.scores(self, q, k, rows, keys)
        if self.score_mod is None:
            return z
        # What is added is what remains of a product of 0; a cap and a factor are still in what is left.
        added = _modified(self.score_mod, torch.zeros_like(z), rows, keys)
        return _modified(self.score_mod, z, rows, keys) - added

    def visible(self, rows: slice, keys: slice) -> Tensor | None:
        visible = (
            None
            if self.block_mask is None
            else _block_visible(self.block_mask, rows, keys)
        )
        if self.score_mod is None:
            return visible
        q, k = self.spec.encode(
            self.q[:, :, rows], self.k, self.pos_q[:, rows], self.pos_k, self.params
        )
        z = AttentionCall.scores(self, q, k[:, :, keys], rows, keys)
        modified = _modified(self.score_mod, z, rows, keys)
        # Nothing but the difference shows what score_mod has lowered: it is one function, of which no part is a mask.
        kept = ~((modified < 0) & (modified - z <= HIDES))
        return kept if visible is None else visible & kept


def _modified(score_mod: ScoreMod, z: Tensor, rows: slice, keys: slice) -> Tensor:
    """Passes z [b h rows keys] through score_mod as torch does, element by element and with the indices of the full
    call."""

    def at(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score_mod(z[b, h, i, j], b, h, i + rows.start, j + keys.start)

    return create_mask(at, *z.shape, device=z.device).to(z.dtype).contiguous()  # type: ignore[arg-type]


def _block_visible(mask: BlockMask, rows: slice, keys: slice) -> Tensor:
    """Returns a mask [b|1 h|1 rows keys] of the keys that the mask function allows, within the blocks that the mask
    contains."""

    def at(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask.mask_mod(b, h, i + rows.start, j + keys.start)

    device = mask.kv_num_blocks.device
    b, h = mask.kv_num_blocks.shape[:2]
    visible = create_mask(
        at, b, h, rows.stop - rows.start, keys.stop - keys.start, device=device
    )
    tall, wide = mask.BLOCK_SIZE
    row = torch.arange(rows.start, rows.stop, device=device) // tall
    column = torch.arange(keys.start, keys.stop, device=device) // wide
    return visible & mask.to_dense().bool()[..., row[:, None], column]


def flex_call(
    spec: AttentionSpec,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
) -> FlexCall:
    """The call of flex_attention on q [b h t d] and k [b g s d]."""
    # The mask of this spec hides and adds nothing. It only declares that there is a mask, so that visibility is asked
    # for, and that, if something is added, the logit is not the product alone.
    mask = (
        q.new_ones((1, 1, 1, 1), dtype=torch.bool)
        if score_mod is None
        else q.new_zeros(1, 1, 1, 1)
    )
    call = make_call(spec, q, k, k, causal=False, mask=mask)
    return FlexCall(**fields_of(call), score_mod=score_mod, block_mask=block_mask)


# --- ScoresCall: a captured call of hand-written attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoresCall:
    """The logits [b h t s] before the cap, the `capped` logits that the softmax received, and which pairs are visible.

    Its methods are those that statistics call of an AttentionCall, whose logits have to be computed first.

    Without a cap, both are the same tensor. `mask` [b|1 h|1 t|1 s] is True where a query may see a key; None if it sees
    all. q [b h t d] and k [b g s d] are the factors that were multiplied, or None if unknown; norms, angles and weights
    are computed from them, but the logits never are. Both are None for a logit that is a sum of products. `layout` is
    the layout of the scores in the module. In a probe, `products` holds q and k of every product in the sum.
    `query_mask` [b t] is False for query rows that are left out of the statistics; `classes` splits the statistics. If
    `gathered` is True, the keys were picked for each query, so a column does not belong to a single key and the first
    key of a row is unknown; sink_share is then NaN. `sink` is the logsumexp of the attached columns that are not keys,
    if there are any. `params` are the parameters of the spec's normalizer where qkeel computes the weights, which gives
    hidden pairs none; None where the model computes its own softmax. `bias` is what was added to the products before the
    cap, as far as it hides nothing.
    """

    spec: AttentionSpec
    logits: Float[Tensor, "b h t s"]
    capped: Float[Tensor, "b h t s"]
    mask: Bool[Tensor, "#b #h #t #s"] | None
    q: Float[Tensor, "b h t d"] | None
    k: Float[Tensor, "b g s d"] | None
    products: tuple[tuple[Tensor | None, Tensor | None], ...] = ()
    layout: HeadLayout | None = None
    query_mask: Bool[Tensor, "b t"] | None = None
    classes: TokenClasses | None = None
    gathered: bool = False
    sink: Float[Tensor, "b h t"] | None = None
    params: Params | None = None
    bias: Float[Tensor, "#b #h #t #s"] | None = None

    # Never there. An AttentionCall may have them, and what takes either kind reads them without asking which it is.
    causal: ClassVar[bool] = False
    window: ClassVar[None] = None
    unit: ClassVar[None] = None

    @property
    def headless(self) -> bool:
        """True if these are the scores of a single head out of several."""
        return self.layout is not None and self.layout.headless

    @property
    def query_shape(self) -> tuple[int, int]:
        """Batch size b and number of queries t."""
        return self.logits.shape[0], self.logits.shape[2]

    @property
    def query_device(self) -> torch.device:
        """The device of the logits."""
        return self.logits.device

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """The sizes b, h, t and s of the logits."""
        b, h, t, s = self.logits.shape
        return b, h, t, s

    @property
    def is_biased(self) -> bool:
        """True if something besides q·k was added to the logits."""
        return self.bias is not None

    def encoded(self) -> tuple[Tensor, Tensor]:
        """Returns q and k in float32 or wider, without any features where they are unknown."""
        dtype, (b, h, t, s) = wide(self.logits.dtype), self.scores_shape
        q = self.logits.new_empty(b, h, t, 0) if self.q is None else self.q
        k = self.logits.new_empty(b, h, s, 0) if self.k is None else self.k
        return q.to(dtype), k.to(dtype)

    def scores(self, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
        """A copy of a block of the logits before the cap, in float32 or wider; q and k are not used."""
        return self.logits[:, :, rows, keys].to(wide(self.logits.dtype), copy=True)

    def unbiased(self, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
        """Like `scores`, without what was added to q·k."""
        z, bias = self.scores(q, k, rows, keys), block_of(self.bias, rows, keys)
        return z if bias is None else z - bias

    def capped_scores(self, z: Tensor, rows: slice, keys: slice) -> Tensor:
        """A copy of a block of the logits that the softmax received."""
        return self.capped[:, :, rows, keys].to(z.dtype, copy=True)

    def visible(self, rows: slice, keys: slice) -> Bool[Tensor, "#b #h #r #n"] | None:
        """Which keys of a block are visible; None if all are."""
        return block_of(self.mask, rows, keys)

    def span(self, rows: slice) -> slice:
        """The range of all keys."""
        return slice(0, self.logits.shape[3])


# A logit may differ from its product by this fraction of the largest, as in half precision.
_ROUNDING = 1 / 64


@torch.no_grad()
def dense_rows(call: Seen, rows: slice) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the logits that some rows of a call would have if no pairs were hidden, for use with sparse attention.

    Returns:
        The logits of all pairs after the cap [b h r s], in float32 or wider; which keys the rows reach [b h r s]; and
        which rows count [b h r], where a row does not count if its logits contain anything besides the product of q and
        k. The result is None if keys were gathered for each query, if q and k are unknown, if their scale depends on
        positions or is learned, or if the numbers of queries and keys differ.
    """
    (_, _, t, s), keys = call.scores_shape, slice(0, call.scores_shape[3])
    is_gathered = isinstance(call, ScoresCall) and call.gathered
    scale = call.spec.scale
    if call.q is None or call.k is None or t != s or is_gathered:
        return None
    if not isinstance(scale, Fixed):
        return None
    with torch.autocast(call.query_device.type, enabled=False):
        q, k = call.encoded()
        # Scores that were captured have lost the logits of hidden pairs.
        z = qk_products(q[:, :, rows], k) * scale.factor(k, q.shape[-1], {})
        visible = call.visible(rows, keys)
        chosen = torch.ones_like(z, dtype=torch.bool)
        chosen = chosen if visible is None else visible.expand(z.shape)
        error = (z - call.scores(q[:, :, rows], k, rows, keys)).masked_fill(~chosen, 0)
        largest = z.masked_fill(~chosen, 0.0).abs().amax(-1).clamp_min(1)
        counted = error.abs().amax(-1) <= _ROUNDING * largest
    if call.query_mask is not None:
        counted = counted & call.query_mask[:, None, rows]
    return call.spec.cap.apply(z), chosen, counted & z.isfinite().all(-1)


def cat_heads(heads: list[LogitStats]) -> LogitStats:
    """Joins the statistics of single-head calls into the statistics of one site."""
    fields = {
        name: torch.cat([getattr(stats, name) for stats in heads]) for name in TENSORS
    }
    return LogitStats(
        **fields, classes=joined_classes([stats.classes for stats in heads])
    )


# The per-head statistics of captured attention calls, for one call or for a pass.

Seen = AttentionCall | ScoresCall


@torch.no_grad()
def statistics(call: Seen, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """The exact statistics of a captured call, computed in the call's precision even under autocast.

    Statistics that need q or k (norms, angles, qk_frobenius) are not measured if these are unknown; n_keys or
    n_products is then 0.
    """
    with torch.autocast(call.query_device.type, enabled=False):
        stats = logit_stats(call, threshold)
    if isinstance(call, ScoresCall) and call.gathered:
        # The first column is the key that was picked first, not the first one of the sequence.
        no_share = stats.sink_share.masked_fill(stats.n_free > 0, torch.nan)
        stats = dataclasses.replace(stats, sink_share=no_share)
    return stats


@torch.no_grad()
def maxima(call: Seen) -> LogitStats:
    """Like `statistics`, but with max_logit, min_logit and logit_spread only and neutral values in the other fields, at
    less than half the cost."""
    with torch.autocast(call.query_device.type, enabled=False):
        return max_stats(call)


@torch.no_grad()
def call_logsumexp(call: Seen) -> Float[Tensor, "b h t"]:
    """The logsumexp of each row of a captured call over its keys; see `kernels.statistics.row_logsumexp`."""
    with torch.autocast(call.query_device.type, enabled=False):
        return row_logsumexp(call)


# Numbers of rows that wait to be reduced together: 4 MB in float32.
WAITING = 1 << 20


@final
class SiteStatistics(Mapping[str, LogitStats]):
    """Collects the statistics of calls by site, and records which names are single heads of one site.

    Sites of one form lie in one LogitStats, the heads of one site behind those of the site before, and are told apart
    only when a single site is read: a step's numbers are merged and sent together.
    """

    def __init__(self, parts: Iterable[Mapping[str, LogitStats]] = ()) -> None:
        self.heads: dict[str, list[str]] = {}
        self._joint: dict[tuple[str, ...], LogitStats] = {}
        self._waiting: dict[str, CallRows | Tensor] = {}
        self._n_waiting = 0
        for part in parts:
            self.update(part)

    @property
    def joint(self) -> dict[tuple[str, ...], LogitStats]:
        """The statistics by the names of the sites that they cover, those that wait to be reduced among them."""
        if self._waiting:
            self._reduce()
        return self._joint

    def __getitem__(self, name: str) -> LogitStats:
        for sites, stats in self.joint.items():
            if name in sites:
                return _of_site(stats, sites.index(name), len(sites))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self.joint)

    def __len__(self) -> int:
        return sum(map(len, self.joint))

    def __bool__(self) -> bool:
        # Whether there are some is asked more often than how many.
        return bool(self._waiting or self._joint)

    def _reduce(self) -> None:
        waiting, self._waiting, self._n_waiting = self._waiting, {}, 0
        names = [*waiting]
        reduced = reduce_calls([*waiting.values()])
        order = [*itertools.chain(*reduced)]
        if order == sorted(order):
            for indices, stats in reduced.items():
                self._add(tuple([names[i] for i in indices]), stats)
            return
        # Layers of two forms in turns are kept one by one: the order is that of the calls.
        calls = {
            i: _of_site(stats, at, len(indices))
            for indices, stats in reduced.items()
            for at, i in enumerate(indices)
        }
        for i in sorted(calls):
            self._add((names[i],), calls[i])

    def _add(self, sites: tuple[str, ...], stats: LogitStats) -> None:
        joint = self._joint
        if sites in joint:
            joint[sites] = merge(joint[sites], stats)
        elif {*itertools.chain(*joint)}.isdisjoint(sites):
            joint[sites] = stats
        else:
            # Another pass has joined other sites.
            self._joint = {(site,): of_site for site, of_site in self.items()}
            for at, site in enumerate(sites):
                self._add((site,), _of_site(stats, at, len(sites)))

    def add(
        self, name: str, stats: LogitStats | CallRows | Tensor, part_of: str | None
    ) -> None:
        """Adds the statistics of a call, of which a tensor holds the heads' largest logits alone; `part_of` names the
        site if the call is one of that site's heads."""
        is_reduced = isinstance(stats, LogitStats)
        if self._waiting and (is_reduced or name in self._waiting):
            self._reduce()
        if isinstance(stats, LogitStats):
            self._add((name,), stats)
        else:
            self._waiting[name] = stats
            numbers = stats.fields if isinstance(stats, CallRows) else stats
            self._n_waiting += numbers.numel()
            if self._n_waiting > WAITING:
                self._reduce()
        if part_of is not None and name not in self.heads.setdefault(part_of, []):
            self.heads[part_of].append(name)

    def update(self, other: Mapping[str, LogitStats]) -> None:
        """Adds the statistics of another pass."""
        if other and in_vmap():
            raise InvalidValueError(
                "attention inside torch.func.vmap cannot be measured: tensors created there are invalid outside; "
                "watch a pass without vmap"
            )
        for sites, stats in joint_statistics(other).items():
            self._add(sites, stats)
        heads_of = other.heads if isinstance(other, SiteStatistics) else {}
        for site, heads in heads_of.items():
            known_heads = self.heads.setdefault(site, [])
            known_heads += [head for head in heads if head not in known_heads]

    def joined(self) -> Mapping[str, LogitStats]:
        """The statistics of each site, with heads that were computed one by one joined into a single site."""
        if not self.heads:
            return self
        sites = dict(self)
        for name, heads in self.heads.items():
            site = cat_heads([sites.pop(head) for head in heads])
            # An ordinary call of the same module already has its name; the joined heads keep that of the first.
            sites[name if name not in sites else heads[0]] = site
        return sites


def joint_statistics(
    stats: Mapping[str, LogitStats],
) -> Mapping[tuple[str, ...], LogitStats]:
    """The statistics by the names of the sites whose heads lie in them, one site behind the other."""
    if isinstance(stats, SiteStatistics):
        return stats.joint
    return {(site,): of_site for site, of_site in stats.items()}


def _of_site(stats: LogitStats, index: int, n_sites: int) -> LogitStats:
    """The heads of one of the sites that lie in joint statistics."""
    if n_sites == 1:
        return stats
    fields = {}
    for name, x in stats.tensors().items():
        n = len(x) // n_sites
        fields[name] = x[index * n : (index + 1) * n]
    return LogitStats(**fields)  # type: ignore[arg-type]
