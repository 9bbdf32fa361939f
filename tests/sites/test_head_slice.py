"""HeadSlice: rows and columns of heads in any layout, as views where that is possible."""

import pytest
import torch

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.sites import HeadSlice

H, R, M = 4, 3, 5
ROWS = torch.arange(3 * H * R)
# Where the key rows of each head are, in a weight that holds q, k and v.
LAYOUTS = {
    "alone": (torch.arange(H * R).view(H, R), True),
    "after the queries": (ROWS.view(3, H, R)[1], True),
    "interleaved per head": (ROWS.view(H, 3, R)[:, 1], True),
    "heads innermost": (ROWS.view(3, R, H)[1].mT, True),
    "every other row": (2 * torch.arange(H * R).view(H, R) + 1, True),
    "one head": (ROWS[7:10][None], True),
    "one row a head": (ROWS[5:29:6][:, None], True),
    "scattered": (
        torch.randperm(36, generator=torch.Generator().manual_seed(0))[:12].view(H, R),
        False,
    ),
    "backwards": (torch.arange(H * R).flip(0).view(H, R), False),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_and_factors_follow_the_index(name, axis):
    index, view = LAYOUTS[name]
    n, r = index.shape
    size = 12 if name == "alone" else 36
    weight = torch.randn(*((size, M) if axis == 0 else (M, size)))
    part = HeadSlice(parameter="w", axis=axis, index=index)
    by_row = weight if axis == 0 else weight.mT
    expected = torch.stack(
        [torch.stack([by_row[i] for i in head]) for head in index.tolist()]
    )
    assert torch.equal(part.heads(weight), expected)
    assert (part.grid is not None) is view
    inside = (
        part.heads(weight).untyped_storage().data_ptr()
        == weight.untyped_storage().data_ptr()
    )
    assert inside is view

    factor = torch.rand(n) + 1
    lines = torch.ones(size)
    for h, head in enumerate(index.tolist()):
        lines[head] = factor[h]
    assert torch.equal(part.lines(factor, size), lines)
    assert torch.equal(
        part.expand(factor, weight) * weight,
        (lines[:, None] * by_row) if axis == 0 else lines * weight,
    )
    unowned = part.lines(factor, size, nobody=7.0) == 7
    assert unowned.sum() == size - n * r


def test_a_weight_with_too_few_rows_is_an_error_and_not_a_read_beyond_it():
    whole = torch.randn(36, M)
    part = HeadSlice(parameter="w", axis=0, index=LAYOUTS["after the queries"][0])
    with pytest.raises(ShapeError, match="w has 20 rows, too few for 4 heads of 3"):
        part.heads(whole[:20])


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (torch.tensor([[0, 1], [1, 2]]), "each row of w in at most one head"),
        (torch.tensor([[-1, 0]]), "no negative row"),
        (torch.arange(4), r"\[heads rows\], got shape \(4,\)"),
        (torch.empty(0, 2, dtype=torch.int64), "got shape"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(index, error):
    with pytest.raises(InvalidValueError, match=error):
        HeadSlice(parameter="w", axis=0, index=index)
