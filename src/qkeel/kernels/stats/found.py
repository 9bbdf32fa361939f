"""What was found of an attention call, before it is reduced to statistics: the heads of many calls are reduced at once.

A reduction over rows takes as many operations for the heads of all layers as for those of one, each of which costs the
host, and a GPU's queue, some microseconds. So what was found of calls that are alike waits until the pass is over, or
until what waits holds too much memory.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.functional.statistics.class_stats import TokenClasses
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.functional.statistics.rows import KernelRows, RowStats, reduce_kernel_rows, reduce_rows
from qkeel.spec.cap import Cap


class Found(abc.ABC):
    """What was found of one attention call. Calls of which `alike` is equal, and not (), are reduced together."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def heads(self) -> tuple[int, int]:
        """The numbers of query and key heads."""

    @property
    @abc.abstractmethod
    def alike(self) -> tuple[object, ...]:
        """What must be equal of two calls whose heads are reduced together; () of one that is reduced alone."""

    @property
    def size(self) -> int:
        """How many numbers it holds until it is reduced."""
        return 0

    @abc.abstractmethod
    def with_others(self, others: Sequence[Any]) -> LogitStats:
        """The statistics of this call and of others that are alike, their heads one after the other."""


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundStats(Found):
    """Statistics that are made already."""

    stats: LogitStats

    @property
    def heads(self) -> tuple[int, int]:
        return len(self.stats.max_logit), len(self.stats.key_norm)

    @property
    def alike(self) -> tuple[object, ...]:
        return ()

    def with_others(self, others: Sequence[FoundStats]) -> LogitStats:
        return self.stats


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundRows(Found):
    """The statistics of the rows of a call, and the norms of its queries and keys; see `reduce_rows`."""

    rows: RowStats
    counted: Bool[Tensor, "b t"] | None
    q_norm: Float[Tensor, "b h t"] | None
    k_norm: Float[Tensor, "b g s"] | None
    keys_seen: Bool[Tensor, "b g s"]
    classes: TokenClasses | None = None
    of_key: Int[Tensor, " s"] | None = None

    @property
    def heads(self) -> tuple[int, int]:
        return self.rows.n_keys.shape[1], self.keys_seen.shape[1]

    @property
    def alike(self) -> tuple[object, ...]:
        if self.classes is not None or self.of_key is not None:
            return ()
        x, keys = self.rows.total, self.keys_seen
        known = self.q_norm is None, self.k_norm is None, id(self.counted)
        return FoundRows, x.shape[0], x.shape[2], keys.shape[0], keys.shape[2], x.dtype, x.device, *known

    @property
    def size(self) -> int:
        return 13 * self.rows.total.numel() + 2 * self.keys_seen.numel()

    def with_others(self, others: Sequence[FoundRows]) -> LogitStats:
        every = (self, *others)
        rows, q_norm, k_norm, seen = self.rows, self.q_norm, self.k_norm, self.keys_seen
        if others:
            rows = RowStats.cat([one.rows for one in every], dim=1)
            q_norm = None if q_norm is None else torch.cat([x for one in every if (x := one.q_norm) is not None], 1)
            k_norm = None if k_norm is None else torch.cat([x for one in every if (x := one.k_norm) is not None], 1)
            seen = torch.cat([one.keys_seen for one in every], 1)
        return reduce_rows(rows, self.counted, q_norm, k_norm, seen, self.classes, self.of_key)


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundPacked(Found):
    """The same from the compiled pass: the fields of its rows in one tensor, the norms of queries last. Where
    `keys_seen` is None, every key is seen."""

    fields: Float[Tensor, "n b h t"]
    names: tuple[str, ...]  # of all but the last
    n_keys: Int[Tensor, "b h t"]
    k_norm: Float[Tensor, "b g s"]
    keys_seen: Bool[Tensor, "b g s"] | None
    counted: Bool[Tensor, "b t"] | None
    of_key: Int[Tensor, " s"] | None

    @property
    def heads(self) -> tuple[int, int]:
        return self.fields.shape[2], self.k_norm.shape[1]

    @property
    def alike(self) -> tuple[object, ...]:
        if self.of_key is not None:
            return ()
        return FoundPacked, self.fields.shape[::3], self.k_norm.shape[::2], self.keys_seen is None, id(self.counted)

    @property
    def size(self) -> int:
        return self.fields.numel() + self.n_keys.numel() + 2 * self.k_norm.numel()

    def with_others(self, others: Sequence[FoundPacked]) -> LogitStats:
        fields, n_keys, k_norm, seen = self.fields, self.n_keys, self.k_norm, self.keys_seen
        if others:
            every = (self, *others)
            fields = torch.cat([one.fields for one in every], 2)
            n_keys = torch.cat([one.n_keys for one in every], 1)
            k_norm = torch.cat([one.k_norm for one in every], 1)
            seen = None if seen is None else torch.cat([x for one in every if (x := one.keys_seen) is not None], 1)
        *values, q_norm = fields.unbind()
        rows = RowStats(**dict(zip(self.names, values)), n_keys=n_keys, n_products=n_keys)
        seen = torch.ones(k_norm.shape, dtype=torch.bool) if seen is None else seen
        return reduce_rows(rows, self.counted, q_norm, k_norm, seen, of_key=self.of_key)


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundByKernel(Found):
    """What a kernel found of each row of a call while it attended; see `reduce_kernel_rows`."""

    rows: KernelRows
    counted: Bool[Tensor, "b t"] | None
    n_kv_heads: int
    cap: Cap

    @property
    def heads(self) -> tuple[int, int]:
        return self.rows.lse.shape[1], self.n_kv_heads

    @property
    def alike(self) -> tuple[object, ...]:
        x = self.rows.largest
        return FoundByKernel, x.shape[0], x.shape[2], x.dtype, x.device, id(self.counted), self.cap

    @property
    def size(self) -> int:
        return 3 * self.rows.lse.numel()

    def with_others(self, others: Sequence[FoundByKernel]) -> LogitStats:
        rows, groups = self.rows, self.n_kv_heads + sum([one.n_kv_heads for one in others])
        if others:
            rows = KernelRows(*(torch.cat(parts, 1) for parts in zip(rows, *(one.rows for one in others))))
        return with_capped(reduce_kernel_rows(rows, self.counted, groups), self.cap)


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundExtremes(Found):
    """The largest logit of every row of a call, and the smallest where it is known, and nothing else; of rows that see
    no key, and of those that do not count, -inf and inf."""

    top: Float[Tensor, "b h t"]
    low: Float[Tensor, "b h t"] | None

    @property
    def heads(self) -> tuple[int, int]:
        return self.top.shape[1], self.top.shape[1]

    @property
    def alike(self) -> tuple[object, ...]:
        top = self.top
        return FoundExtremes, top.shape[0], top.shape[2], top.dtype, top.device, self.low is None

    @property
    def size(self) -> int:
        return self.top.numel() if self.low is None else 2 * self.top.numel()

    def with_others(self, others: Sequence[FoundExtremes]) -> LogitStats:
        top, low = self.top, self.low
        if others:
            every = (self, *others)
            top = torch.cat([one.top for one in every], 1)
            low = None if low is None else torch.cat([x for one in every if (x := one.low) is not None], 1)
        return only_extremes(top.amax((0, 2)), None if low is None else low.amin((0, 2)))


def only_extremes(top: Float[Tensor, " h"], low: Float[Tensor, " h"] | None = None) -> LogitStats:
    """Statistics of which nothing but the largest, and perhaps the smallest, logit of each head is known."""
    nothing = LogitStats.empty(len(top), len(top), top)
    if low is None:
        return dataclasses.replace(nothing, max_logit=top)
    return dataclasses.replace(nothing, max_logit=top, min_logit=low)


def with_capped(found: LogitStats, cap: Cap) -> LogitStats:
    """The statistics with the largest logit after the cap."""
    top = found.max_logit
    capped = top if cap.kind == "none" else torch.where(top == -torch.inf, top, cap.apply(top))
    return dataclasses.replace(found, capped_max_logit=capped)
