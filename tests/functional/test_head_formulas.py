"""The law of statistics that are a formula of queries and keys: every row of HEAD_FORMULAS, and some that break it."""

from __future__ import annotations

import torch
from tests.each_row import each_row
from torch import Tensor

from qkeel.functional.statistics.head_formulas import HEAD_FORMULAS, Formula


def largest(q: Tensor, k: Tensor, counted: Tensor | None) -> Tensor:
    norms = q.norm(dim=-1)
    return (norms if counted is None else norms.masked_fill(~counted[:, None], 0.0)).amax((0, 2))


def of_all_rows(q: Tensor, k: Tensor, counted: Tensor | None) -> Tensor:
    return q.norm(dim=-1).amax((0, 2))


def of_all_heads(q: Tensor, k: Tensor, counted: Tensor | None) -> Tensor:
    return largest(q, k, counted) / largest(q, k, counted).sum()


def of_each_sequence(q: Tensor, k: Tensor, counted: Tensor | None) -> Tensor:
    return q.norm(dim=-1).amax(2)


BREAKS = {
    largest: "",
    of_all_rows: "rows that do not count",
    of_all_heads: "other heads",
    of_each_sequence: "its shape",
}
FORMULAS: dict[Formula, str] = {**{row.of: "" for row in HEAD_FORMULAS.values() if row.of is not None}, **BREAKS}


def broken(of: Formula) -> str:
    """What of the law a formula breaks; empty for none."""
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 6, 8, generator=rng) for heads in (4, 2))
    counted = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    for rows in (None, counted):
        found = of(q, k, rows)
        if found.shape != (4,) or not found.isfinite().all():
            return "its shape"
        if not torch.allclose(of(q[:, 2:], k[:, 1:], rows), found[2:]):
            return "other heads"
    left_out = q + 100 * ~counted[:, None, :, None]
    return "" if torch.equal(of(left_out, k, counted), of(q, k, counted)) else "rows that do not count"


@each_row("of, what", FORMULAS.items(), ids=[of.__name__ for of in FORMULAS])
def test_a_formula_is_one_number_of_each_head_alone_without_rows_left_out(of: Formula, what: str) -> None:
    assert broken(of) == what
