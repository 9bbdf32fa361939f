"""The rows of heads in the tensors of an optimizer, with one factor for each head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from qkeel import distributed as dist
from qkeel.functional.norms import wide
from qkeel.patching.torch_state import copy_to_all, lerp_all_in_place, multiply_all
from qkeel.sites.site import HeadSlice


@final
class TensorViews:
    """Views of tensors, which are made again only if a tensor has got other memory, or another form, since.

    A step asks for them several times, and making one takes several operators and Python calls for every tensor.

    Args:
        tensors: weights, or other tensors that stay the same objects. Of those that are split across processes, views
            are made each time.
        view: makes the view of a tensor, given its index, without a graph; of a split one, of this process's part.
    """

    def __init__(
        self, tensors: Sequence[Tensor], view: Callable[[int, Tensor], Tensor]
    ) -> None:
        self._tensors, self._view = tensors, view
        self._are_kept = not any(map(dist.is_split, tensors))
        self._memory: list[object] = []
        self._views: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        """Returns the views; the same list as before if none was made again."""
        # While the views are kept, no other tensor can get the address of their memory.
        memory: list[object] = (
            [(x.data_ptr(), x.shape, x.stride()) for x in self._tensors]
            if self._are_kept
            else []
        )
        if not memory or memory != self._memory:
            self._memory = memory
            self._views = [
                self._view(i, dist.local(x).detach())
                for i, x in enumerate(self._tensors)
            ]
        return self._views


#: A tensor, a slice of it, and the indices [n most] of each head's factors in a row of factors.
Share = tuple[Tensor, HeadSlice, Tensor]


@final
class HeadRows:
    """Rows of many tensors, which are copied, scaled and set back by one factor for each head.

    A row's factor is the smallest of the factors of the heads that own it, and 1 if no head does. Of a weight that is
    split across processes, these are the rows of this process's part. Nothing waits for a device, except where it is
    said.

    Args:
        shares: which rows of which tensors have which factors.
        last: the index of the 1 at the end of a row of factors.
    """

    def __init__(self, shares: Iterable[Share], last: int) -> None:
        columns: dict[int, tuple[Tensor, HeadSlice, list[Tensor]]] = {}
        for tensor, s, indices in shares:
            is_column = tensor.ndim > 1 and s.axis == 1
            sizes = tensor.shape[1:] if is_column else tensor.shape[:1]
            n = math.prod(sizes)
            columns.setdefault(id(tensor), (tensor, s, []))[2].extend(
                s.lines(of_heads, n, nobody=last) for of_heads in indices.unbind(1)
            )
        tables: list[Tensor] = []
        for tensor, s, factors_of_rows in columns.values():
            table = torch.stack(factors_of_rows, 1)
            # A row of a head repeats that head's index in place of missing ones: a factor above 1 would be lowered by
            # the 1 at the end.
            table = torch.where(table == last, table.amin(1, keepdim=True), table)
            block = dist.local_block(s.parameter, tensor)
            if block is not None:
                table = table[slice(*block.spans[s.axis if tensor.ndim > 1 else 0])]
            tables.append(table)
        self._tensors = [(tensor, s) for tensor, s, _ in columns.values()]
        #: Returns each tensor as its rows [n m].
        self.rows = TensorViews(
            [tensor for tensor, _ in self._tensors],
            lambda i, tensor: self._tensors[i][1].rows_of(tensor),
        )
        self._counts = [len(table) for table in tables]
        most = max(table.shape[1] for table in tables)
        # A row with fewer factors than another repeats its first.
        self._indices = torch.cat(
            [torch.cat([t, t[:, :1].expand(-1, most - t.shape[1])], 1) for t in tables]
        )
        # The runs of rows with the same factors, as those of a head: their indices, and their lengths in each tensor.
        self._runs: tuple[Tensor, list[list[int]]] | None = None
        self._copies: list[Tensor] = []
        self._copied: list[Tensor] = []

    def factors(
        self, row: Tensor, rows: Sequence[Tensor], *, of_old: bool = False
    ) -> list[Tensor]:
        """Returns the factors f [n 1] of the rows of each tensor, on its device, in at least float32.

        row: the factors of all heads, and a 1 behind them. of_old: whether 1 - f is returned, the share of the old
        weight."""
        self._indices = self._indices.to(row.device)
        factors = row[self._indices].amin(1, keepdim=True)
        shares = (1 - factors if of_old else factors).split(self._counts)
        dtypes = {dtype: wide(dtype) for dtype in {x.dtype for x in rows}}
        return [
            f
            if f.dtype == dtypes[x.dtype] and f.device == x.device
            else f.to(x.device, dtypes[x.dtype])
            for f, x in zip(shares, rows)
        ]

    def copies(self) -> list[Tensor]:
        """Returns copies of the rows."""
        rows, copies = self.rows(), self._copies
        # The model may have been moved or cast since the last step.
        if rows is not self._copied:
            copies = [torch.empty_like(x) for x in rows]
            # A CPU's allocator would map large blocks anew in each step; a GPU's keeps freed memory for others to use.
            are_kept = all([x.is_cpu for x in rows])
            self._copied, self._copies = (rows, copies) if are_kept else ([], [])
        copy_to_all(copies, rows)
        return copies

    def interpolate(self, copies: Sequence[Tensor], row: Tensor) -> None:
        """Sets w ← copy + f · (w - copy). With a factor of 1 the weights do not change."""
        rows = self.rows()
        # From the new weight towards the old one, in place. The rounding of 1 - f costs at most 2⁻²⁵ of the full step.
        lerp_all_in_place(rows, list(copies), self.factors(row, rows, of_old=True))

    def restore(self, copies: Sequence[Tensor], row: Tensor) -> None:
        """Sets w ← copy where the factor is 0, bit for bit, even if the step made w infinite or NaN."""
        rows = self.rows()
        for x, old, factor in zip(rows, copies, self.factors(row, rows)):
            x.copy_(torch.where(factor == 0, old, x))

    def scale(
        self,
        row: Tensor,
        *,
        on_host: bool = False,
        copies: Callable[[Tensor], Iterable[Tensor]] = lambda _: (),
    ) -> None:
        """Sets w ← f · w for each tensor and its `copies`.

        With `on_host`, the host reads the factors, and rows with a factor of 1 are left out: as few heads are over a
        threshold at a time, moving the whole weights would take most of the time."""
        rows = self.rows()
        tensors = [
            [x, *(s.rows_of(copy.detach()) for copy in copies(tensor))]
            for (tensor, s), x in zip(self._tensors, rows)
        ]
        if on_host:
            self._scale_runs(tensors, row)
            return
        factors = self.factors(row, rows)
        multiply_all(
            [x for group in tensors for x in group],
            [
                factor.to(x.device, wide(x.dtype))
                for group, factor in zip(tensors, factors)
                for x in group
            ],
        )

    def _scale_runs(self, tensors: Sequence[Sequence[Tensor]], row: Tensor) -> None:
        """Scales the rows of which the factor is not 1, of each tensor and its copies."""
        if self._runs is None:
            runs = [
                table.unique_consecutive(dim=0, return_counts=True)
                for table in self._indices.split(self._counts)
            ]
            self._runs = (
                torch.cat([indices for indices, _ in runs]),
                [lengths.tolist() for _, lengths in runs],
            )
        indices, lengths = self._runs
        factors = row[indices.to(row.device)].amin(1)
        is_scaled = factors != 1
        n_runs = [*map(len, lengths)]
        views: list[Tensor] = []
        factors_of_views: list[float] = []
        # Read for all tensors at once, since each operator on cold memory takes 50 µs.
        for group, of_tensor, numbers, selected in zip(
            tensors,
            lengths,
            _lists(factors, n_runs),
            _lists(is_scaled, n_runs),
        ):
            for x in group if any(selected) else ():
                views += itertools.compress(x.split(of_tensor), selected)
                factors_of_views += itertools.compress(numbers, selected)
        if views:
            multiply_all(views, factors_of_views)


def _lists(values: Tensor, sizes: Iterable[int]) -> Iterator[list[Any]]:
    """Splits a vector into lists of these sizes."""
    numbers = iter(values.tolist())
    return (list(itertools.islice(numbers, size)) for size in sizes)
