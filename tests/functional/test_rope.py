"""The rotation: a quarter turn by hand, tables of many, and what cannot turn."""

import pytest
import torch
from tests.each_row import each_row

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.functional.rope import ntk, rope_frequencies, rope_table, rotate

# Of 1, 2, 3, 4 and a fifth number, which does not turn.
QUARTERS = {
    "half": [-3.0, -4.0, 1.0, 2.0, 5.0],
    "interleaved": [-2.0, 1.0, -4.0, 3.0, 5.0],
    "half_reversed": [3.0, 4.0, -1.0, -2.0, 5.0],
}


@each_row("pairing, turned", QUARTERS.items())
def test_a_quarter_turn_by_hand(pairing, turned):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert rotate(x, torch.zeros(2), torch.ones(2), pairing).tolist() == turned


def test_the_table_of_a_compiler_is_the_one_that_is_made_without():
    arguments = torch.arange(6).view(2, 3), rope_frequencies(8), torch.float32
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.qkeel.rope_table.default, arguments, test_utils=checks
    )
    compiled = torch.ops.qkeel.rope_table(*arguments)
    assert all(map(torch.equal, compiled, rope_table(*arguments)))


def test_what_has_no_pairs_or_too_few_is_refused():
    for dim in (3, 1, 0, -2):
        with pytest.raises(ShapeError, match="even number of dimensions"):
            rope_frequencies(dim)
    with pytest.raises(InvalidValueError, match="at least 4 rotated dimensions"):
        ntk(torch.ones(1), 2.0, exact=True)
