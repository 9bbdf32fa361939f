"""Attention calls whose masks are functions of positions, evaluated block by block and never T×T."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from qkeel.functional.statistics.class_stats import TokenClasses
from qkeel.sites.calls.hidden_pairs import HIDES
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import make_call

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexCall(AttentionCall):
    """A call of flex_attention: score_mod and block_mask as they were given.

    The logit is what comes out of score_mod. A tanh cap in there is one operation of many in a function and can't be
    separated from the rest, so the cap counts as part of the logit. A pair is hidden by the block mask, by a score of
    -inf, or by one that score_mod lowered by 9000 or more to a negative number, as additive masks do.
    """

    score_mod: ScoreMod | None
    block_mask: BlockMask | None

    def scores(self, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
        z = AttentionCall.scores(self, q, k, rows, keys)
        return z if self.score_mod is None else _modified(self.score_mod, z, rows, keys)

    def visible(self, rows: slice, keys: slice) -> Tensor | None:
        seen = None if self.block_mask is None else _block_visible(self.block_mask, rows, keys)
        if self.score_mod is None:
            return seen
        q, k = self.spec.encode(self.q[:, :, rows], self.k, self.pos_q[:, rows], self.pos_k, self.params)
        z = AttentionCall.scores(self, q, k[:, :, keys], rows, keys)
        modified = _modified(self.score_mod, z, rows, keys)
        kept = ~((modified < 0) & (modified - z <= HIDES))
        return kept if seen is None else seen & kept


def _modified(score_mod: ScoreMod, z: Tensor, rows: slice, keys: slice) -> Tensor:
    """Passes z [b h rows keys] through score_mod as torch does: element by element, at the whole call's indices."""

    def at(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score_mod(z[b, h, i, j], b, h, i + rows.start, j + keys.start)

    return create_mask(at, *z.shape, device=z.device).to(z.dtype).contiguous()  # type: ignore[arg-type]


def _block_visible(mask: BlockMask, rows: slice, keys: slice) -> Tensor:
    """[b|1 h|1 rows keys]: the keys that the mask's function lets be seen, within the blocks that the mask has."""

    def at(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask.mask_mod(b, h, i + rows.start, j + keys.start)

    device = mask.kv_num_blocks.device
    b, h = mask.kv_num_blocks.shape[:2]
    seen = create_mask(at, b, h, rows.stop - rows.start, keys.stop - keys.start, device=device)
    tall, wide = mask.BLOCK_SIZE
    row = torch.arange(rows.start, rows.stop, device=device) // tall
    column = torch.arange(keys.start, keys.stop, device=device) // wide
    return seen & mask.to_dense().bool()[..., row[:, None], column]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BandCall(AttentionCall):
    """A call in which query i sees the keys from i - left to i + right, -1 for no bound, with ALiBi slopes if given.
    The bias is -slope · |i - j|, slopes [h] or [b h]; i counts from the end of the keys, as flash-attn has it."""

    left: int
    right: int
    slopes: Tensor | None

    def bias(self, rows: slice, keys: slice) -> Tensor | None:
        if self.slopes is None:
            return None
        slopes = self.slopes if self.slopes.ndim == 2 else self.slopes[None]
        return -slopes[..., None, None] * self._gap(rows, keys).abs()

    def visible(self, rows: slice, keys: slice) -> Tensor | None:
        seen = AttentionCall.visible(self, rows, keys)
        gap = self._gap(rows, keys)
        for side in ([gap <= self.left] if self.left >= 0 else []) + ([gap >= -self.right] if self.right >= 0 else []):
            seen = side if seen is None else seen & side
        return seen

    def _gap(self, rows: slice, keys: slice) -> Tensor:
        return (self.pos_q[:, rows, None] - self.pos_k[:, None, keys])[:, None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedCall:
    """Sequences of unequal lengths in one call, each attending to itself: q [1 h total d], k [1 g total d].

    `calls` are theirs, beginning at the rows `starts` of q; sequences without a query or a key are left out.
    `query_mask` [1 total] and `classes`, for sequences of as many keys as queries, are those of AttentionCall.
    """

    spec: AttentionSpec
    q: Float[Tensor, "1 h total d"]
    k: Float[Tensor, "1 g total_keys d"]
    calls: tuple[AttentionCall, ...]
    starts: tuple[int, ...]
    query_mask: Bool[Tensor, "1 total"] | None = None
    classes: TokenClasses | None = None

    def parts(self) -> Iterator[AttentionCall]:
        """The call of each sequence."""
        for start, call in zip(self.starts, self.calls):
            own = slice(start, start + call.q.shape[2])
            mask = None if self.query_mask is None else self.query_mask[:, own]
            classes = self.classes
            if classes is not None:
                classes = dataclasses.replace(classes, query=classes.query[:, own], key=classes.key[:, own])
            yield dataclasses.replace(call, query_mask=mask, classes=classes)


def flex_call(
    spec: AttentionSpec,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
) -> FlexCall:
    """The call of flex_attention on q [b h t d] and k [b g s d]."""
    fields = _checked(spec, q, k, causal=False, added=score_mod is not None)
    return FlexCall(**fields, score_mod=score_mod, block_mask=block_mask)


def band_call(
    spec: AttentionSpec,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    *,
    causal: bool,
    window: tuple[int, int],
    slopes: Float[Tensor, ...] | None,
) -> AttentionCall:
    """The call with a window; one without where it bounds nothing and no slopes are given."""
    if window[0] < 0 and window[1] < 0 and slopes is None:
        return make_call(spec, q, k, k, causal=causal)
    fields = _checked(spec, q, k, causal=causal, added=slopes is not None)
    return BandCall(**fields, left=window[0], right=window[1], slopes=slopes)


def _checked(spec: AttentionSpec, q: Tensor, k: Tensor, *, causal: bool, added: bool) -> dict[str, Any]:
    """Fields of a checked call. Its mask neither hides nor adds anything, but says that there is one: visibility
    has to be asked, and, where something is added, the logit is not the product alone."""
    mask = q.new_zeros(1, 1, 1, 1) if added else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    call = make_call(spec, q, k, k, causal=causal, mask=mask)
    return {f.name: getattr(call, f.name) for f in dataclasses.fields(AttentionCall)}


def packed_call(
    calls: Iterable[tuple[int, AttentionCall]], q: Float[Tensor, "total h d"], k: Float[Tensor, "total_keys g d"]
) -> PackedCall:
    """Calls of one sequence each, with the first of their rows in q [total h d]; k [total g d]."""
    starts, parts = zip(*calls)
    whole = (x.transpose(0, 1)[None] for x in (q, k))
    return PackedCall(spec=parts[0].spec, q=next(whole), k=next(whole), calls=parts, starts=starts)
