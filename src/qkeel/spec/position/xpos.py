"""A RoPE whose pairs also fade with the distance."""

from __future__ import annotations

import dataclasses
from typing import final

from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.distances import xpos_decay
from qkeel.functional.rope import check_pairs, rope_frequencies, rope_table, rotate
from qkeel.spec.position.rotary import Position
from qkeel.spec.shapes import Keys, PosK, PosQ, Queries


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XPos(Position):
    """Interleaved RoPE, pair n of q times ζ_n^(i/scale), of k times ζ_n^(-j/scale): scores fade as ζ_n^((i - j)/scale).

    Causal attention only: forward in time they would grow. The released code centres positions, which changes no score;
    here they are not, so that cached keys stay what they are. In float32 that holds to about 35,000 tokens.

    Source: Sun et al. 2022, arXiv 2212.10554 (LeX), torchscale.
    """

    base: float = 10_000.0
    scale: float = 512.0
    kind = "xpos"

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise InvalidValueError(f"expected a RoPE base above 1, got {self.base}")
        if not self.scale > 0:
            raise InvalidValueError(f"expected a scale above 0 tokens, got {self.scale}")

    def check(self, head_dim: int) -> None:
        check_pairs(head_dim)

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        return self._turned(q, pos_q, 1.0), self._turned(k, pos_k, -1.0)

    def _turned(self, x: Tensor, pos: Tensor, sign: float) -> Tensor:
        d = x.shape[-1]
        cos, sin = rope_table(pos[:, None], rope_frequencies(d, self.base), x.dtype)
        power = sign * pos[:, None, :, None].to(x.dtype) / self.scale
        faded = xpos_decay(d).to(x) ** power
        return rotate(x, cos * faded, sin * faded, "interleaved")

    def formula(self) -> str:
        return f"xPos(base {self.base:g}, scale {self.scale:g})"
