"""The numbers of a measured step: what is collected, and how it gets to the host as one vector."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from qkeel.capture.calls import SiteStatistics, joint_statistics
from qkeel.distributed.reduce import (
    WHOLE_MODEL,
    Axis,
    Entry,
    Rule,
    StepTable,
    step_table,
)
from qkeel.functional.class_statistics import MERGES as CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.norms import widest
from qkeel.functional.statistics import MERGES, LogitStats, of_key_heads

__all__ = [
    "WHOLE_MODEL",
    "Measurement",
    "NumberKey",
    "PartialValue",
    "Reduction",
    "SiteNumbers",
    "Stats",
    "StepRecord",
    "Transfer",
    "flatten",
    "merged_records",
    "on_host",
]

Reduction = Literal["mean", "root_mean", "root", "max", "min"]
Stats = Mapping[str, LogitStats]
# A site, "" for the whole model, and the name of a number; or several sites, one row of the number for each.
NumberKey = tuple[str | tuple[str, ...], str]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialValue:
    """What one process knows about a number: its value over some of the data, or over its part of a weight.

    `how` says how the values are combined, as the rules of `distributed.reduce.Entry`. A process with weight 0
    contributes nothing.

    Args:
        value, weight: two tensors of the same shape.
        of: "data" combines all processes; "weights" combines the processes that hold different parts of the weights.
        own: True if the values cover only the heads that this process computes, rather than all heads.
    """

    value: Tensor
    weight: Tensor
    how: Reduction = "mean"
    of: Literal["data", "weights"] = "data"
    own: bool = False


# A plain tensor is a number that all processes with the same weights know.
SiteNumbers = Mapping[NumberKey, Tensor | PartialValue]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one step: statistics by site, and other numbers by site or sites and name."""

    stats: Stats
    numbers: SiteNumbers


# Tensors of several sites, and what stands in each row; its entries differ in their sites alone.
_Column = tuple[tuple[str, ...], Entry]


@functools.lru_cache(maxsize=1024)
def _statistics_columns(
    sites: tuple[str, ...],
    n_heads: int,
    n_kv_heads: int,
    classes: tuple[str, ...] | None,
) -> tuple[_Column, ...]:
    """Returns the columns of the statistics of sites, in the order of `LogitStats.tensors` and CLASS_MERGES."""

    def column(
        name: str, rule: Rule, weight: str, blank: float, n_classes: Sequence[int] = ()
    ) -> _Column:
        axis: Axis = "key" if of_key_heads(name) else "query"
        heads = n_kv_heads if axis == "key" else n_heads
        suffix = "".join(f"\t{label}" for label in classes or ()) if n_classes else ""
        weight = weight + suffix if weight else ""
        shape = heads, *n_classes
        return sites, Entry("", name + suffix, shape, rule, weight, axis, blank=blank)

    columns = [
        column(name, merging.how, merging.count, merging.neutral)
        for name, merging in MERGES.items()
    ]
    if classes is not None:
        for name, merging in CLASS_MERGES.items():
            n_classes = [len(classes)] * CLASS_DIMENSIONS[name]
            blank = -np.inf if name == "max_logit" else merging.neutral
            columns.append(column(name, merging.how, merging.count, blank, n_classes))
    return tuple(columns)


@functools.lru_cache(maxsize=64)
def _table_of(columns: tuple[_Column, ...]) -> StepTable:
    """The table of a step's numbers, whose entries are found once: a step has hundreds of them, and tens of columns."""
    return step_table(
        tuple([entry._replace(site=site) for sites, entry in columns for site in sites])
    )


# The number of dimensions behind the heads: the class of the query, the class of the key, or both.
CLASS_DIMENSIONS = {
    name: 2 if name in ("max_logit", "mass", "uniform_mass", "n_pairs") else 1
    for name in CLASS_MERGES
}


def flatten(measured: Measurement) -> tuple[StepTable, list[Tensor]]:
    """Returns the table of a measurement's vector, and its tensors in the same order.

    Tensors of one dtype are neighbours, so that they are converted together.
    """
    pairs: list[tuple[_Column, Tensor]] = []
    n_heads: dict[str, int] = {}
    for sites, stats in joint_statistics(measured.stats).items():
        classes, tensors = stats.classes, [*stats.tensors().values()]
        if classes is not None:
            by_class = classes.tensors()
            tensors += [by_class[name] for name in CLASS_MERGES]
        names = None if classes is None else classes.names
        sizes = [len(x) // len(sites) for x in (stats.max_logit, stats.key_norm)]
        n_heads |= dict.fromkeys(sites, sizes[0])
        pairs += zip(_statistics_columns(sites, *sizes, names), tensors, strict=True)
    for (key, name), number in measured.numbers.items():
        value = number.value if isinstance(number, PartialValue) else number
        sites, shape = (
            ((key,), value.shape) if isinstance(key, str) else (key, value.shape[1:])
        )
        shape = tuple(shape)
        if not isinstance(number, PartialValue):
            pairs.append(((sites, Entry("", name, shape, "max")), number))
            continue
        by_head = number.own and shape[:1] == (n_heads.get(sites[0]),)
        axis: Axis = "query" if by_head else ""
        weight, by_weights = f"{name}:weight", number.of == "weights"
        entry = Entry("", name, shape, number.how, weight, axis, by_weights)
        of_weight = Entry("", weight, shape, "sum", "", axis, by_weights, 0.0)
        pairs += [((sites, entry), value), ((sites, of_weight), number.weight)]
    # Neighbours of one dtype are converted by one kernel.
    by_dtype: dict[torch.dtype, list[tuple[_Column, Tensor]]] = {}
    for pair in pairs:
        by_dtype.setdefault(pair[1].dtype, []).append(pair)
    ordered = [pair for of_dtype in by_dtype.values() for pair in of_dtype]
    return _table_of(tuple([column for column, _ in ordered])), [
        tensor for _, tensor in ordered
    ]


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns tensors as one vector on the device of the first one, in its widest floating-point dtype.

    In float64 counts below 2^53 are exact. A number on the host is written to a device by a fill, because a copy would
    have to wait.
    """
    device = tensors[0].device
    flat: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        piece = tensor.detach() if tensor.requires_grad else tensor
        if piece.ndim != 1:
            piece = piece.reshape(-1)
        if piece.device != device:
            fills = piece.device.type == "cpu" and piece.numel() == 1
            piece = (
                piece.new_full((1,), float(piece), device=device)
                if fills
                else piece.to(device)
            )
        flat.setdefault(tensor.dtype, []).append(piece)
    return torch.cat([torch.cat(pieces).to(widest(device)) for pieces in flat.values()])


@final
class StepRecord:
    """The measurement of a step on the host, as one vector in float64.

    `monitor` contains the monitor's statistics on its own work, keyed by the names in records.MONITOR_FIELDS and
    MONITOR_EXTREMES.
    """

    def __init__(
        self,
        table: StepTable,
        vector: np.ndarray,
        monitor: Mapping[str, float] | None = None,
    ) -> None:
        self.table, self.vector, self.monitor = table, vector, monitor or {}

    @property
    def sites(self) -> list[str]:
        """The names of the sites."""
        return [entry.site for entry in self.table.form if entry.name == "max_logit"]

    @functools.cached_property
    def stats(self) -> dict[str, LogitStats]:
        """The statistics by site."""
        fields: dict[str, dict[str, Tensor]] = {site: {} for site in self.sites}
        by_class: dict[str, dict[str, Tensor]] = {}
        names: dict[str, tuple[str, ...]] = {}
        for entry in self.table.form:
            name, *classes = entry.name.split("\t")
            if classes:
                names[entry.site] = tuple(classes)
                by_class.setdefault(entry.site, {})[name] = self.table.read(
                    self.vector, entry
                )
            elif entry.site in fields and name in MERGES:
                fields[entry.site][name] = self.table.read(self.vector, entry)
        stats = {}
        for site, tensors in fields.items():
            classes = (
                ClassStats(names=names[site], **by_class[site])
                if site in names
                else None
            )
            stats[site] = LogitStats(**tensors, classes=classes)  # type: ignore[arg-type]
        return stats


@final
class Transfer:
    """The transfer of a step's numbers from the device to the host, which waits for them only if necessary."""

    def __init__(
        self,
        vectors: Sequence[Tensor],
        read: Callable[[list[np.ndarray]], StepRecord | None],
        exchange: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        """Starts copying the vectors to the host.

        Args:
            vectors: the numbers, on one device.
            read: builds the record from the vectors once they are on the host; None if no process has numbers.
            exchange: reduces the vectors on the host over all processes, in place. On a GPU it runs in a thread of its
                own, because it has to wait for the copy; an exception is raised by `result`.
        """
        self._read, self._exchange = read, exchange
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if vectors[0].device.type == "cuda":
            # Pinned, so that the copy runs beside the training's kernels.
            self._host = [
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in vectors
            ]
            for target, x in zip(self._host, vectors):
                target.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            if exchange is not None:
                self._thread = threading.Thread(
                    target=self._run_exchange, name="qkeel exchange"
                )
                self._thread.start()
        else:
            self._host = [x.cpu().double() for x in vectors]
            self._run_exchange()

    @classmethod
    def alone(cls, measured: Measurement) -> Transfer:
        """Starts the transfer of this process's measurement to its host."""
        table, tensors = flatten(measured)
        return cls(
            [vector_of(tensors)],
            lambda vectors: StepRecord(table, table.blank(vectors[0])),
        )

    def _run_exchange(self) -> None:
        try:
            if self._event is not None:
                self._event.synchronize()
            if self._exchange is not None:
                self._exchange(self._host)
        except Exception as error:
            # In a thread it would be lost; `result` raises it under the monitor's guard.
            self._error = error

    @property
    def arrived(self) -> bool:
        """Returns whether the numbers can be read without waiting."""
        if self._thread is not None:
            return not self._thread.is_alive()
        return self._event is None or self._event.query()

    def result(self) -> StepRecord | None:
        """Returns the numbers on the host, or None if no process has any; waits for them if necessary.

        Raises: what the exchange raises.
        """
        if self._thread is not None:
            self._thread.join()
        elif self._event is not None:
            self._event.synchronize()
        if self._error is not None:
            raise self._error
        return self._read([x.double().numpy() for x in self._host])


def merged_records(steps: Sequence[StepRecord]) -> dict[str, LogitStats]:
    """Merges the statistics of several steps."""
    by_table: dict[StepTable, list[np.ndarray]] = {}
    for step in steps:
        by_table.setdefault(step.table, []).append(step.vector)
    return dict(
        SiteStatistics(
            StepRecord(table, table.merge(vectors)).stats
            for table, vectors in by_table.items()
        )
    )


def on_host(stats: Stats) -> dict[str, LogitStats]:
    """Returns the statistics on the CPU, in float64."""
    record = (
        Transfer.alone(Measurement(stats=stats, numbers={})).result() if stats else None
    )
    return {} if record is None else record.stats
