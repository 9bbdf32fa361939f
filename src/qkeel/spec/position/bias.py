"""Positions that add a number to the logit, by the distance of query and key."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

from torch import Tensor

from qkeel.errors import check_known
from qkeel.functional.distances import alibi_slopes, kerple_log, kerple_power
from qkeel.spec.position.rotary import Position
from qkeel.spec.shapes import Keys, Logits, PosK, PosQ, Queries
from qkeel.spec.slot import Geometry, Parameter, Params


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ALiBi(Position):
    """Logits z - m_h |i - j|, m_h = 2^(-8h/H) fixed per head. Source: Press et al. 2022, arXiv 2108.12409."""

    kind = "alibi"
    folds = False

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        slopes = alibi_slopes(q.shape[1]).to(q)[:, None, None]
        return Position.scores(self, q, k, pos_q, pos_k, params) - slopes * _apart(pos_q, pos_k).to(q.dtype)

    def formula(self) -> str:
        return "ALiBi (- 2^(-8h/H)·|i - j|)"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kerple(Position):
    """Logits z plus a learned kernel of the distance, per head: -p ln(1 + a|i - j|) (kind log) or -a|i - j|^p (power).

    a starts in (0, 1), p in (0, 2), spread evenly over the heads where the source draws them at random.
    Source: Chi et al. 2022, arXiv 2205.09921.
    """

    kind: Literal["log", "power"] = "log"  # type: ignore[assignment]
    folds = False

    def __post_init__(self) -> None:
        check_known("kind of Kerple", self.kind, ("log", "power"))

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        n = geometry.n_heads
        even = tuple((h + 0.5) / n for h in range(n))
        return {"kerple_a": Parameter((n,), even), "kerple_p": Parameter((n,), tuple(2 * x for x in reversed(even)))}

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        a, p = (params[name].to(q.dtype)[:, None, None] for name in ("kerple_a", "kerple_p"))
        kernel = kerple_log if self.kind == "log" else kerple_power
        return Position.scores(self, q, k, pos_q, pos_k, params) + kernel(_apart(pos_q, pos_k).to(q.dtype), a, p)

    def formula(self) -> str:
        return f"KERPLE ({'- p_h ln(1 + a_h|i - j|)' if self.kind == 'log' else '- a_h|i - j|^p_h'})"


def _apart(pos_q: Tensor, pos_k: Tensor) -> Tensor:
    """|i - j| as [b|1 1 t s]."""
    return (pos_q[:, :, None] - pos_k[:, None, :]).abs()[:, None]
