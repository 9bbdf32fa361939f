"""Heads of many weights at once: of every layout, by device and dtype, wherever their storage is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.remedies.base import Target
from qkeel.remedies.head_rows import HeadRows, factor_per_row, views_by_tensor
from qkeel.remedies.head_weights import HeadWeights
from qkeel.sites import HeadSlice, find_sites

from .models import attention


def rows(index: Tensor, axis: int = 0) -> HeadSlice:
    return HeadSlice(parameter="w", axis=axis, index=index)


# Rows, interleaved rows, columns, a vector; slices that overlap, so that the whole weight is one piece; no pattern.
LAYOUTS: list[tuple[tuple[int, ...], list[HeadSlice]]] = [
    ((12, 5), [rows(torch.arange(12).view(4, 3))]),
    ((5, 8), [rows(torch.arange(6).view(2, 3) + 1, axis=1)]),
    ((12, 5), [rows(torch.arange(12).view(3, 4).T)]),
    ((12, 5), [rows(torch.arange(12).view(4, 3))]),
    ((6,), [rows(torch.arange(6).view(2, 3))]),
    ((7,), [rows(torch.arange(6).view(2, 3) + 1, axis=1)]),
    ((5, 2), [rows(torch.arange(4).view(2, 2)), rows(torch.tensor([[2, 3, 4]]))]),
    ((6, 3, 2), [rows(torch.arange(6).view(2, 3))]),
    (
        (8, 2),
        [rows(torch.tensor([[0, 3], [2, 1]])), rows(torch.tensor([[0, 3], [2, 1]]))],
    ),
    ((7, 2), [rows(torch.tensor([[0, 1], [2, 3]])), rows(torch.tensor([[3, 5, 2]]))]),
    ((3, 9), [rows(torch.tensor([[7, 0], [2, 5]]), axis=1)]),
]


class Case:
    """Weights of every layout, with a row of random factors and a 1 behind it."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self.weights = [
            torch.randn(shape).to(d)
            for (shape, _), d in zip(LAYOUTS, itertools.cycle(dtypes))
        ]
        slices = [s for _, own in LAYOUTS for s in own]
        entries = [w for w, (_, own) in zip(self.weights, LAYOUTS) for _ in own]
        views = [
            view for _, _, found in views_by_tensor(entries, slices) for view in found
        ]
        counts = [s.n for s in slices]
        self.row = torch.cat(
            [(2 * torch.rand(sum(counts))).round(decimals=1), torch.ones(1)]
        ).double()
        self.row[::3] = 0
        self.rows = HeadRows(
            [(view, view.weight) for view in views],
            [view.places(counts) for view in views],
        )
        each = iter(zip(slices, self.row[:-1].split(counts)))
        # The factors of each weight, as merged from its slices one by one.
        self.factors = [
            factor_per_row([next(each) for _ in own], w)
            for w, (_, own) in zip(self.weights, LAYOUTS)
        ]

    def numbers(self) -> list[Tensor]:
        """What the weights hold now, in float64."""
        return [w.to(torch.float64, copy=True) for w in self.weights]


@pytest.mark.parametrize(
    "dtypes", [(torch.float64,), (torch.float32, torch.float64)], ids=str
)
def test_every_layout_is_moved_restored_and_scaled_as_weights_are_one_by_one(
    dtypes: tuple[torch.dtype, ...],
) -> None:
    case = Case(*dtypes)
    near = 1e-14 if dtypes == (torch.float64,) else 1e-6
    for freezes in (False, True):
        old, copies = case.numbers(), case.rows.copies()
        for w in case.weights:
            w.add_(torch.randn_like(w))
        new = case.numbers()
        (case.rows.restore if freezes else case.rows.interpolate)(copies, case.row)
        for w, a, b, f in zip(case.weights, old, new, case.factors):
            expected = (
                torch.where(f == 0, a, b)
                if freezes
                else torch.lerp(a, b, f.expand_as(a))
            )
            assert (w - expected).abs().max() <= near
            kept = (f != 0 if freezes else f == 1).expand_as(w)
            assert torch.equal(w[kept].double(), b[kept])
    moved = case.numbers()
    for on_host in (True, False):
        case.rows.scale(case.row, on_host=on_host)
    for w, a, f in zip(case.weights, moved, case.factors):
        assert torch.allclose(w.double(), a * f * f, rtol=near, atol=near)


def test_a_weight_that_makes_heads_of_its_rows_and_of_its_columns_is_refused() -> None:
    model = attention()
    (site,) = find_sites(model)
    (query,) = site.query
    columns = HeadSlice(parameter=query.parameter, axis=1, index=query.index)
    terms = tuple(dataclasses.replace(term, key=(columns,)) for term in site.terms)
    for key, refused in ((site.terms, False), (terms, True)):
        target = Target(
            model=model, optimizer=None, sites=[dataclasses.replace(site, terms=key)]
        )
        if refused:
            with pytest.raises(RefusedError, match="in its rows and in its columns"):
                HeadWeights.of(target)
        else:
            assert len(HeadWeights.of(target).parameters) == 2
