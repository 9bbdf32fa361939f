"""Heads of many weights at once: of every layout, by device and dtype, wherever their storage is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.remedies.base import Target
from qkeel.remedies.head_groups import HeadGroups, HeadView, factor_per_row, frobenius_norm, views_by_tensor
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
    ((8, 2), [rows(torch.tensor([[0, 3], [2, 1]])), rows(torch.tensor([[0, 3], [2, 1]]))]),
    ((7, 2), [rows(torch.tensor([[0, 1], [2, 3]])), rows(torch.tensor([[3, 5, 2]]))]),
    ((3, 9), [rows(torch.tensor([[7, 0], [2, 5]]), axis=1)]),
]


class Case:
    """Weights of every layout, with a row of random factors and a 1 behind it."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self.weights = [torch.randn(shape).to(d) for (shape, _), d in zip(LAYOUTS, itertools.cycle(dtypes))]
        self.slices = [s for _, own in LAYOUTS for s in own]
        entries = [w for w, (_, own) in zip(self.weights, LAYOUTS) for _ in own]
        self.pieces = [piece for _, _, found in views_by_tensor(entries, self.slices) for piece in found]
        self.firsts = [0, *itertools.accumulate(s.n for s in self.slices)]
        self.row = torch.cat([(2 * torch.rand(self.firsts[-1])).round(decimals=1), torch.ones(1)]).double()
        self.bundles = HeadGroups(lambda view: view.places([s.n for s in self.slices]))
        self.bundles.update(self.parts())

    def parts(self) -> list[tuple[HeadView, Tensor]]:
        return [(piece, piece.weight) for piece in self.pieces]

    def numbers(self) -> list[Tensor]:
        """What the weights hold now, in float64."""
        return [w.to(torch.float64, copy=True) for w in self.weights]

    def factors(self) -> list[Tensor]:
        """Of each weight, as merged from its slices one by one."""
        each = iter(zip(self.slices, self.row[:-1].split([s.n for s in self.slices])))
        return [factor_per_row([next(each) for _ in own], w) for w, (_, own) in zip(self.weights, LAYOUTS)]


@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float32, torch.float64)], ids=str)
def test_every_layout_is_moved_and_scaled_as_weights_are_one_by_one(dtypes: tuple[torch.dtype, ...]) -> None:
    case = Case(*dtypes)
    assert len(case.bundles.all) == len(dtypes)
    old = case.numbers()
    sizes = torch.cat([x for bundle in case.bundles.all for x in bundle.copy(frobenius_norm)])
    for w in case.weights:
        w.add_(torch.randn_like(w))
    new = case.numbers()
    for bundle in case.bundles.all:
        bundle.interpolate(case.row)
    near = 1e-14 if dtypes == (torch.float64,) else 1e-6
    for w, a, b, f in zip(case.weights, old, new, case.factors()):
        assert (w - torch.lerp(a, b, f.expand_as(a))).abs().max() <= near
        assert torch.equal(w[(f == 1).expand_as(w)].double(), b[(f == 1).expand_as(b)])
    moved = case.numbers()
    for look, bundle in itertools.product((True, False), case.bundles.all):
        bundle.scale(case.row, on_host=look)
    for w, a, f in zip(case.weights, moved, case.factors()):
        assert torch.allclose(w.double(), a * f * f, rtol=near, atol=near)
    for piece, first in zip(case.pieces, case.bundles.firsts):
        if not piece.whole:
            i, s = piece.shares[0]
            before = old[next(j for j, w in enumerate(case.weights) if w is piece.weight)]
            assert torch.allclose(sizes[first : first + s.n].double(), frobenius_norm(s.heads(before)), rtol=1e-6), i


def test_a_weight_that_makes_heads_of_its_rows_and_of_its_columns_is_refused() -> None:
    model = attention()
    (site,) = find_sites(model)
    (query,) = site.query
    columns = HeadSlice(parameter=query.parameter, axis=1, index=query.index)
    terms = tuple(dataclasses.replace(term, key=(columns,)) for term in site.terms)
    for key, refused in ((site.terms, False), (terms, True)):
        target = Target(model=model, optimizer=None, sites=[dataclasses.replace(site, terms=key)])
        if refused:
            with pytest.raises(RefusedError, match="in its rows and in its columns"):
                HeadWeights.of(target)
        else:
            assert len(HeadWeights.of(target).parameters) == 2
