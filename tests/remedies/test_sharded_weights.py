"""Weights of which each of two processes holds a part: rows of heads, their squares, and what is refused; on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.each_row import each_row
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from qkeel.errors import RefusedError
from qkeel.functional.bounds import spectral_norm
from qkeel.remedies.head_rows import frobenius_norm, head_views
from qkeel.remedies.head_weights import (
    SplitNorms,
    check_plain_rows,
    check_whole,
    has_plain_rows,
)
from qkeel.sites import HeadSlice

# The whole weight, how it is split over two processes, and its heads: some rows are no head's.
WHOLE = torch.randn(
    9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)
ROWS = HeadSlice(parameter="rows", axis=0, index=torch.tensor([[0, 1], [4, 5], [7, 6]]))
COLUMNS = HeadSlice(parameter="columns", axis=1, index=torch.tensor([[1, 2], [3, 5]]))
PLAIN = HeadSlice(parameter="plain", axis=0, index=torch.arange(4).view(2, 2))


@contextmanager
def process(rank: int) -> Iterator[None]:
    """As process `rank` of two, whose collectives do nothing."""
    distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def part(rank: int, how: Placement) -> Tensor:
    """The part of the whole weight that a process holds, as a DTensor."""
    assert isinstance(how, Shard)
    own = WHOLE.chunk(2, how.dim)[rank].contiguous()
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(
        own, mesh, [how], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )


@each_row("dim", [0, 1])
def test_squares_of_the_parts_add_up_to_those_of_the_heads(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = [torch.zeros(s.n, dtype=torch.float64) for s in (ROWS, COLUMNS)]
    plain = torch.randn(4, 5, dtype=torch.float64)
    row = torch.arange(
        1.0, 8.0, dtype=torch.float64
    )  # of the three entries: squares of the first two, norms of the last
    sent = torch.zeros(7, dtype=torch.float64)
    for rank in range(2):
        with process(rank):
            split = part(rank, Shard(dim))
            norms = SplitNorms(
                [ROWS, COLUMNS, PLAIN], [split, split, plain], frobenius_norm
            )
            assert [i in norms for i in range(3)] == [True, True, False]
            for own, i in zip(total, range(2)):
                own.add_(norms.squares(i))
            seen: list[Tensor] = []
            monkeypatch.setattr(
                "qkeel.distributed.sharding.reduced",
                lambda x, *_, seen=seen: (seen.append(x), 4 * x)[1],
            )
            found = norms.norms(row)
            assert torch.equal(found[:5], (4 * row[:5]).sqrt())
            assert torch.equal(found[5:], row[5:])
            sent += seen[0]
            assert len(seen) == 1
    for s, own in zip((ROWS, COLUMNS), total):
        torch.testing.assert_close(own.sqrt(), frobenius_norm(s.heads(WHOLE)))
    assert torch.equal(
        sent, torch.cat([2 * row[:5], row[5:]])
    )  # what both hold alike is counted once
    alone = SplitNorms([PLAIN], [plain], spectral_norm)
    assert alone.norms(row[:2]).tolist() == [1.0, 2.0]


@each_row("s, dim", [(ROWS, 0), (ROWS, 1), (COLUMNS, 0), (COLUMNS, 1)])
def test_the_rows_of_a_part_have_the_factors_of_their_heads(
    s: HeadSlice, dim: int
) -> None:
    other = HeadSlice(parameter=s.parameter, axis=s.axis, index=s.index.flip(0)[:1])
    counts, whole = [s.n, other.n], s.rows_of(WHOLE)
    owners = [
        [h for h in range(s.n) if i in s.index[h]]
        + [s.n for _ in (0,) if i in other.index]
        for i in range(len(whole))
    ]
    for rank in range(2):
        with process(rank):
            (view,) = head_views(part(rank, Shard(dim)), [(0, s), (1, other)])
            places, rows = view.places(counts), view.view()
        first = 0 if dim != s.axis else rank * -(-len(whole) // 2)
        own = (
            whole[first : first + len(rows)]
            if dim == s.axis
            else whole.chunk(2, 1)[rank]
        )
        assert torch.equal(rows[:, 0], own)
        assert [sorted(set(p)) for p in places.tolist()] == [
            o or [sum(counts)] for o in owners[first : first + len(rows)]
        ]


def test_what_cannot_be_done_with_a_part_is_refused() -> None:
    with process(0):
        split = part(0, Shard(0))
        with pytest.raises(
            RefusedError,
            match="rows is split across processes, and a spectral norm cannot",
        ):
            SplitNorms([PLAIN, ROWS], [WHOLE, split], spectral_norm)
        with pytest.raises(
            RefusedError,
            match="w is split across processes, and spectral_cap needs all rows",
        ):
            check_whole("w", split, "spectral_cap")
        assert has_plain_rows(split)
        check_plain_rows("w", split, "lalr")
    check_whole("w", WHOLE, "spectral_cap")
    assert has_plain_rows(WHOLE)
    integers = torch.ones(2, 2, dtype=torch.int8)
    assert not has_plain_rows(integers)
    with pytest.raises(RefusedError, match=r"w is quantised \(Tensor of torch.int8\)"):
        check_plain_rows("w", integers, "lalr")
