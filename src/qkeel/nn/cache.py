"""A cache of keys and values, one per attention module."""

from __future__ import annotations

import torch
from torch import Tensor

from qkeel.errors import InvalidValueError, ShapeError


class KVCache:
    """Keys as they enter the dot product (normed, rotated) and values, grown by doubling.

    Under a position that needs the pair (ReRope, a bias) or the length (DynamicNTK) keys and values are raw ones.

    `pos` [b|1 length] are the keys' positions where the caller gave some (left padding), else None: 0, 1, 2 …
    For inference: appending writes in place, so no gradient flows through earlier tokens.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise InvalidValueError(f"expected max_length of at least 1 or None, got {max_length}")
        self.max_length = max_length
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.pos: Tensor | None = None

    def next_positions(self, like: Tensor, pos: Tensor | None = None) -> Tensor:
        """Positions [b|1 t] of the next tokens, like [b h t d]: `pos` checked, or those after the last ones."""
        b, t = like.shape[0], like.shape[2]
        if pos is None:
            after = torch.arange(t, device=like.device)[None]
            return after + (self.length if self.pos is None else self.pos[:, -1:] + 1)
        rows = pos[None] if pos.ndim == 1 else pos
        if rows.ndim != 2 or rows.shape[0] not in (1, b) or rows.shape[1] != t:
            raise ShapeError(f"expected pos of shape [{b} {t}] or [{t}], got {tuple(pos.shape)}")
        return rows

    def append(self, k: Tensor, v: Tensor, *, pos: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add k [b g t d] and v [b g t d'], at positions pos [b|1 t], and return all keys and values so far."""
        new = self.length + k.shape[2]
        if self.max_length is not None and new > self.max_length:
            raise InvalidValueError(
                f"the cache holds {self.max_length} tokens and {new} would be needed; make a longer KVCache"
            )
        self._k = self._grown(self._k, k, new)
        self._v = self._grown(self._v, v, new)
        self._k[:, :, self.length : new] = k.detach()
        self._v[:, :, self.length : new] = v.detach()
        if pos is not None or self.pos is not None:
            self._place(self.next_positions(k, pos), k)
        self.length = new
        return self._k[:, :, :new], self._v[:, :, :new]

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.length, self.pos = 0, None

    def _place(self, new: Tensor, like: Tensor) -> None:
        old = torch.arange(self.length, device=like.device)[None] if self.pos is None else self.pos
        b = max(old.shape[0], new.shape[0])
        self.pos = torch.cat([old.expand(b, -1), new.expand(b, -1)], dim=1)

    def _grown(self, old: Tensor | None, like: Tensor, needed: int) -> Tensor:
        if old is not None and (old.shape[0], old.shape[1], old.shape[3]) != (*like.shape[:2], like.shape[3]):
            raise ShapeError(
                f"this cache holds {tuple(old.shape)} and cannot take {tuple(like.shape)}; "
                "use one KVCache per layer and batch"
            )
        if old is not None and old.shape[2] >= needed:
            return old
        room = self.max_length or max(needed, 2 * (old.shape[2] if old is not None else 0))
        grown = torch.empty(*like.shape[:2], room, like.shape[3], dtype=like.dtype, device=like.device)
        if old is not None:
            grown[:, :, : self.length] = old[:, :, : self.length]
        return grown
