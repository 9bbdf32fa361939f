"""Caches of what attention needs of earlier tokens, one per attention module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import InvalidValueError, ShapeError, check
from qkeel.spec.position.rotary import counted
from qkeel.spec.shapes import GivenMask, GivenPosQ, Heads, Keys, PosK, PosQ, Values

Latent = Float[Tensor, "b one t l"]
Inverse = Float[Tensor, "b #h t"]


class Cache:
    """Tensors of the tokens so far, tokens in the third place; `max_length` of them at once, or grown by doubling.

    Under a position that needs the pair (ReRope, a bias) or the length (DynamicNTK) keys and values are raw ones.

    `pos` [b|1 length] are the keys' positions where the caller gave some (left padding), else None: 0, 1, 2 …
    For inference: appending writes in place, so no gradient flows through earlier tokens.
    """

    def __init__(self, max_length: int | None = None) -> None:
        check(max_length is None or max_length >= 1, "max_length of at least 1 or None", max_length)
        self.max_length = max_length
        self.length = 0
        self._held: list[Tensor] = []
        self.pos: Tensor | None = None

    @property
    def bytes_per_token(self) -> int:
        """The bytes that one more token of one sequence takes; 0 before the first."""
        return sum(x[0, :, :1].numel() * x.element_size() for x in self._held)

    def next_positions(self, like: Heads, pos: GivenPosQ | None = None) -> PosQ:
        """Positions [b|1 t] of the next tokens, like [b h t d]: `pos` checked, or those after the last ones."""
        b, t = like.shape[0], like.shape[2]
        if pos is None:
            if self.pos is None:
                return counted(self.length, self.length + t, like.device)
            return counted(0, t, like.device) + self.pos[:, -1:] + 1
        rows = pos[None] if pos.ndim == 1 else pos
        if rows.ndim != 2 or rows.shape[0] not in (1, b) or rows.shape[1] != t:
            raise ShapeError(f"expected pos of shape [{b} {t}] or [{t}], got {tuple(pos.shape)}")
        return rows

    def check_positions(self, pos: GivenPosQ | None, mask: GivenMask | None) -> None:
        """Raise where own positions come without the mask that they need."""
        if mask is None and (pos is not None or self.pos is not None):
            raise InvalidValueError("own positions with a cache need a mask that hides the padding, [b 1 1 keys]")

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.length, self.pos = 0, None

    def _append(self, new: Sequence[Tensor], pos: Tensor | None) -> list[Tensor]:
        """Add tensors [b g t …] and return all of each so far."""
        length = self.length + new[0].shape[2]
        if self.max_length is not None and length > self.max_length:
            raise InvalidValueError(
                f"the cache holds {self.max_length} tokens and {length} would be needed; "
                f"make a longer {type(self).__name__}"
            )
        if self._held and len(self._held) != len(new):
            raise ShapeError(
                f"this cache holds {len(self._held)} tensors and cannot take {len(new)}: the module's norm was changed "
                "since; start a new cache"
            )
        self._held = [self._grown(old, x, length) for old, x in zip(self._held or [None] * len(new), new)]
        for held, x in zip(self._held, new):
            held[:, :, self.length : length] = x.detach()
        if pos is not None or self.pos is not None:
            self._place(self.next_positions(new[0], pos), new[0])
        self.length = length
        return [held[:, :, :length] for held in self._held]

    def _place(self, new: Tensor, like: Tensor) -> None:
        old = counted(0, self.length, like.device) if self.pos is None else self.pos
        b = max(old.shape[0], new.shape[0])
        self.pos = torch.cat([old.expand(b, -1), new.expand(b, -1)], dim=1)

    def _grown(self, old: Tensor | None, like: Tensor, needed: int) -> Tensor:
        if old is not None and (old.shape[:2], old.shape[3:]) != (like.shape[:2], like.shape[3:]):
            raise ShapeError(
                f"this cache holds {tuple(old.shape)} and cannot take {tuple(like.shape)}; "
                f"use one {type(self).__name__} per layer and batch"
            )
        if old is not None and old.shape[2] >= needed:
            return old
        room = self.max_length or max(needed, 2 * (old.shape[2] if old is not None else 0))
        grown = torch.empty(*like.shape[:2], room, *like.shape[3:], dtype=like.dtype, device=like.device)
        if old is not None:
            grown[:, :, : self.length] = old[:, :, : self.length]
        return grown


@final
class KVCache(Cache):
    """Keys as they enter the dot product (normed, rotated) and values: g · (d + d') numbers a token.

    `max_length`: see `Cache`.
    """

    def append(self, k: Keys, v: Values, *, pos: PosK | None = None) -> tuple[Keys, Values]:
        """Add k [b g t d] and v [b g t d'], at positions pos [b|1 t], and return all keys and values so far."""
        k, v = self._append([k, v], pos)
        return k, v


@final
class LatentCache(Cache):
    """Of multi-head latent attention: one kv latent and one rotated key for all heads, and what a key norm needs.

    A token takes l + r numbers (latent, rotated key) in the module's dtype and, under a norm on the keys, one inverse
    size per head in float32 or wider: the norm divides key k_h by its size, and 1/size is all of it that is kept.
    `max_length`: see `Cache`.
    """

    def append(
        self, latent: Latent, rotated: Latent, inverse: Inverse | None = None, *, pos: PosK | None = None
    ) -> tuple[Latent, Inverse | None]:
        """Add latent [b 1 t l], rotated [b 1 t r] and inverse [b h|1 t]; all [b 1 s l+r] and [b h|1 s] so far."""
        token = torch.cat([latent, rotated], dim=-1)
        held = self._append([token] if inverse is None else [token, inverse], pos)
        return held[0], held[1] if inverse is not None else None
