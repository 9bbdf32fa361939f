"""Attention calls whose masks are functions of positions, evaluated block by block and never T×T."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from qkeel.sites.calls.hidden_pairs import HIDES
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.band_call import fields_of
from qkeel.spec.call import make_call
from qkeel.spec.shapes import PerRow

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexCall(AttentionCall):
    """A call of flex_attention: score_mod and block_mask as they were given.

    The logit is what comes out of score_mod. A tanh cap in there is one operation of many in a function and can't be
    separated from the rest, so the cap counts as part of the logit. A pair is hidden by the block mask, by a score of
    -inf, or by one that score_mod lowered by 9000 or more to a negative number, as additive masks do.

    largest: each row's largest logit, where flex_attention's own kernel returned it; -inf of rows that see no key.
    """

    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    largest: PerRow | None = None

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


def flex_call(
    spec: AttentionSpec,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
) -> FlexCall:
    """The call of flex_attention on q [b h t d] and k [b g s d]."""
    # Its mask neither hides nor adds anything, but says that there is one: visibility has to be asked for, and, where
    # something is added, the logit is not the product alone.
    mask = q.new_ones((1, 1, 1, 1), dtype=torch.bool) if score_mod is None else q.new_zeros(1, 1, 1, 1)
    call = make_call(spec, q, k, k, causal=False, mask=mask)
    return FlexCall(**fields_of(call), score_mod=score_mod, block_mask=block_mask)
