"""Which keys the rows of a tile see, and the sizes of tiles: what the Triton kernels over logits share."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Bool, Float
from torch import Tensor
from triton.language import constexpr  # pyright: ignore[reportMissingImports]

# Rows, keys and warps of a tile by head size: what fits in the registers of Ampere and Hopper in 16 bits.
_TILES = {
    16: (128, 64, 4),
    32: (128, 64, 4),
    64: (128, 64, 4),
    128: (128, 64, 8),
    256: (64, 64, 8),
}
_TILES_FLOAT32 = {
    16: (64, 32, 4),
    32: (64, 32, 4),
    64: (64, 32, 4),
    128: (32, 32, 4),
    256: (16, 16, 4),
}


@triton.jit
def reach(
    first,
    last,
    length,
    window,
    KEYS: constexpr,
    CAUSAL: constexpr,
    WINDOW: constexpr,
    MASK: constexpr,
):
    """Returns, for rows at positions `first` to `last`, where their keys begin, the end of the complete tiles that all
    rows see, and where their keys end.
    """
    stop = tl.minimum(length, tl.maximum(last + 1, 0)) if CAUSAL else length
    begin = 0
    if WINDOW:
        # From the start of a tile on; `visible` hides what lies before the window.
        begin = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        stop = tl.minimum(stop, tl.maximum(last + window, 0))
    shared_end = begin
    # Else no tile is known to be seen whole.
    if not (WINDOW or MASK):
        shared_end = (
            (tl.minimum(length, tl.maximum(first + 1, 0)) if CAUSAL else length)
            // KEYS
            * KEYS
        )
    return begin, shared_end, stop


@triton.jit
def visible(
    keys,
    key,
    at,
    ok,
    length,
    window,
    keys_s,
    CAUSAL: constexpr,
    WINDOW: constexpr,
    MASK: constexpr,
):
    """Returns which keys of a tile the rows at positions `at` see; `keys` is their sequence's key mask."""
    inside, away = key < length, at[:, None] - key[None, :]
    is_visible = inside[None, :] & ok[:, None]
    if CAUSAL:
        is_visible = is_visible & (away >= 0)
    if WINDOW:
        is_visible = is_visible & (away < window) & (away > -window)
    if MASK:
        is_visible = (
            is_visible
            & (tl.load(keys + key * keys_s, mask=inside, other=0) != 0)[None, :]
        )
    return is_visible


def tile_sizes(q: Float[Tensor, "b h t d"]) -> tuple[int, tuple[int, int, int]]:
    """Returns the width of q as a power of two, and rows, keys and warps of a tile."""
    # Triton's products take no dimension under 16.
    wide = max(16, triton.next_power_of_2(q.shape[-1]))
    return wide, (_TILES_FLOAT32 if q.dtype == torch.float32 else _TILES)[wide]


def key_mask(
    q: Tensor, keys: Bool[Tensor, "_ s"] | None
) -> tuple[Tensor, tuple[int, int]]:
    """Returns the key mask for the kernels (a placeholder if there is none) and its strides."""
    # A stride of 0 lets all sequences read one mask.
    mask = q if keys is None else keys.to(torch.uint8)
    return mask, (0, 0) if keys is None else (
        mask.stride(0) if mask.shape[0] > 1 else 0,
        mask.stride(1),
    )


def dense(x: Tensor) -> Tensor:
    """Returns the tensor with contiguous rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
