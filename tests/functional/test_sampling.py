"""The rows that stand for all of a sequence: each drawn as often as the others, and spread over it."""

from __future__ import annotations

import pytest
import torch

from qkeel.errors import InvalidValueError
from qkeel.functional.statistics.sampling import chosen_rows


def test_rows_are_drawn_equally_often_and_one_from_each_stretch() -> None:
    generator = torch.Generator().manual_seed(0)
    for t, n in ((10, 3), (10, 7), (64, 8), (7, 1)):
        draws = torch.stack([chosen_rows(t, n, generator) for _ in range(4000)])  # type: ignore[misc]
        assert (draws.diff(dim=1) >= 0).all()
        stretch = torch.arange(n)
        assert (draws >= (stretch * t / n).floor()).all()
        assert (draws < ((stretch + 1) * t / n).ceil()).all()
        often = draws.flatten().bincount(minlength=t).double() / 4000
        assert ((often - n / t).abs() < 5 * (n / t / 4000) ** 0.5).all()


def test_all_rows_are_no_sample_and_no_rows_are_refused() -> None:
    generator = torch.Generator()
    assert chosen_rows(5, None, None) is None
    assert chosen_rows(5, 5, generator) is None
    assert chosen_rows(5, 1000, generator) is None
    with pytest.raises(InvalidValueError, match="at least one query, got 0"):
        chosen_rows(5, 0, generator)
    with pytest.raises(InvalidValueError, match="needs a generator"):
        chosen_rows(5, 3, None)


def test_the_generator_alone_decides() -> None:
    state = torch.get_rng_state()
    first, same, other = (chosen_rows(230, 40, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first is not None
    assert same is not None
    assert other is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
