"""Properties of the rotation."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each_row import each_row

from qkeel.errors import ShapeError
from qkeel.functional.rope import Pairing, rope_frequencies, rope_table, rotate

from .properties import few, randn, seeds

PAIRINGS = get_args(Pairing)
every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)


def turn(x, pos, pairing, rotary_dim=None):
    return rotate(
        x,
        *rope_table(pos, rope_frequencies(rotary_dim or x.shape[-1]), x.dtype),
        pairing,
    )


@few
@given(
    seed=seeds,
    a=st.integers(0, 2000),
    b=st.integers(0, 2000),
    shift=st.integers(-500, 5000),
)
def test_the_dot_product_depends_on_the_distance_alone(
    seed: int, a: int, b: int, shift: int
) -> None:
    q, k = randn(seed, 2, 16)
    for pairing in PAIRINGS:
        here = turn(q, torch.tensor(a), pairing) @ turn(k, torch.tensor(b), pairing)
        there = turn(q, torch.tensor(a + shift), pairing) @ turn(
            k, torch.tensor(b + shift), pairing
        )
        assert here.item() == pytest.approx(there.item(), abs=1e-10)


@every_pairing
def test_dimensions_beyond_the_rotated_ones_pass_through(pairing):
    x = randn(0, 5, 12)
    y = turn(x, torch.arange(5) + 1, pairing, rotary_dim=8)
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert ((y - x)[..., :8].abs().amax(-1) > 1e-3).all()


@every_pairing
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_the_gradient_is_right(pairing, rotary_dim):
    pos = torch.tensor([0, 3, 50])
    torch.autograd.gradcheck(
        lambda x: turn(x, pos, pairing, rotary_dim), randn(0, 2, 3, 8).requires_grad_()
    )


def test_a_quarter_turn_by_hand():
    x, cos, sin = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(2), torch.ones(2)
    assert rotate(x, cos, sin, "half").tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert rotate(x, cos, sin, "interleaved").tolist() == [-2.0, 1.0, -4.0, 3.0]
    assert rotate(x, cos, sin, "half_reversed").tolist() == [3.0, 4.0, -1.0, -2.0]


def test_frequencies_fall_from_one_by_equal_factors():
    assert rope_frequencies(8, 10_000.0).tolist() == pytest.approx(
        [1.0, 0.1, 0.01, 0.001], rel=1e-14
    )


@pytest.mark.parametrize("dim", [3, 1, 0, -2])
def test_an_odd_or_empty_rotation_is_refused_and_says_what_to_do(dim):
    with pytest.raises(
        ShapeError, match=r"Use an even head_dim, or rotate a part of it"
    ):
        rope_frequencies(dim)


@each_row("pairing", PAIRINGS)
def test_each_of_many_vectors_and_tables_is_rotated_alike_under_vmap(
    pairing,
):
    x = randn(0, 3, 2, 4, 6)  # the last two numbers do not turn
    cos, sin = rope_table(torch.arange(12.0).view(3, 4), rope_frequencies(4), x.dtype)
    of = partial(rotate, pairing=pairing)
    for dims, a, tables in (
        ((0, None, None), x, (cos[0], sin[0])),
        ((1, None, None), x.transpose(0, 1), (cos[0], sin[0])),
        ((0, 0, 0), x, (cos, sin)),
        ((0, 1, 1), x, (cos.transpose(0, 1), sin.transpose(0, 1))),
        ((None, 0, 0), x[0], (cos, sin)),
        ((0, 0, None), x, (cos, sin[0])),
    ):
        found = torch.func.vmap(of, in_dims=dims)(a, *tables)
        each = []
        for i in range(3):
            picked = [
                t if dim is None else t.select(dim, i)
                for t, dim in zip((a, *tables), dims)
            ]
            each.append(of(*picked))
        assert torch.equal(found, torch.stack(each)), dims


def test_the_table_of_a_compiler_is_the_one_that_is_made_without():
    given = torch.arange(6).view(2, 3), rope_frequencies(8), torch.float32
    torch.library.opcheck(
        torch.ops.qkeel.rope_table.default,
        given,
        test_utils=("test_schema", "test_faketensor"),
    )
    for ours, theirs in zip(torch.ops.qkeel.rope_table(*given), rope_table(*given)):
        assert torch.equal(ours, theirs)
