"""The numbers of a measured step: how they get to the host as one vector."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from qkeel.capture.calls import joint_statistics
from qkeel.distributed.reduce import Axis, Column, StepTable, step_table
from qkeel.functional.class_statistics import MERGES as CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats, Merge
from qkeel.functional.norms import widest
from qkeel.functional.statistics import MERGES, LogitStats, of_key_heads
from qkeel.monitor.numbers import Number, Numbers, Stats
from qkeel.records import HEAD_FIELDS

# The statistics by token class stand in a vector under their names behind this.
BY_CLASS = "class_"
# The number of dimensions behind the heads: the class of the query, the class of the key, or both.
CLASS_DIMENSIONS = {
    name: 2 if name in ("max_logit", "mass", "uniform_mass", "n_pairs") else 1
    for name in CLASS_MERGES
}
# They may be known of a head of which nothing was counted.
EXTREMES = ("max_logit", "min_logit", "capped_max_logit")


@functools.lru_cache(maxsize=1024)
def _statistics_columns(
    sites: tuple[str, ...], n_heads: int, n_kv_heads: int, classes: tuple[str, ...]
) -> tuple[Column, ...]:
    """Returns the columns of the statistics of sites, in the order of `LogitStats.tensors` and CLASS_MERGES."""

    def columns(merges: Mapping[str, Merge], prefix: str) -> Iterator[Column]:
        for name, merging in merges.items():
            axis: Axis = "key" if of_key_heads(name) else "query"
            n_classes = [len(classes)] * CLASS_DIMENSIONS[name] if prefix else []
            count, blank = merging.count, merging.neutral
            if merging.how in ("max", "min", "root"):
                if not prefix and name not in EXTREMES:
                    count = HEAD_FIELDS[name].count
                elif prefix and name == "max_logit":
                    count, blank = "n_pairs", -np.inf
            yield Column(
                sites,
                prefix + name,
                (n_kv_heads if axis == "key" else n_heads, *n_classes),
                merging.how,
                count and prefix + count,
                axis,
                blank=blank,
                classes=classes if prefix else (),
            )

    of_classes = columns(CLASS_MERGES, BY_CLASS) if classes else ()
    return (*columns(MERGES, ""), *of_classes)


def flatten(stats: Stats, numbers: Numbers) -> tuple[StepTable, list[Tensor]]:
    """Returns the table of the vector of a step, and its tensors in the same order.

    Tensors of one dtype are neighbours, so that they are converted together.
    """
    pairs: list[tuple[Column, Tensor]] = []
    n_heads: dict[str, int] = {}
    for sites, of_sites in joint_statistics(stats).items():
        classes, tensors = of_sites.classes, [*of_sites.tensors().values()]
        if classes is not None:
            by_class = classes.tensors()
            tensors += [by_class[name] for name in CLASS_MERGES]
        names = () if classes is None else classes.names
        sizes = [len(x) // len(sites) for x in (of_sites.max_logit, of_sites.key_norm)]
        n_heads |= dict.fromkeys(sites, sizes[0])
        pairs += zip(_statistics_columns(sites, *sizes, names), tensors, strict=True)
    for (key, name), number in numbers.items():
        value, weight, how, of, own = (
            number if isinstance(number, Number) else Number(number)
        )
        sites, shape = (
            ((key,), value.shape) if isinstance(key, str) else (key, value.shape[1:])
        )
        shape = tuple(shape)
        if weight is None:
            pairs.append((Column(sites, name, shape, "max"), value))
            continue
        if not isinstance(weight, Tensor):
            weight = torch.full_like(value, weight)
        by_head = own and shape[:1] == (n_heads.get(sites[0]),)
        axis: Axis = "query" if by_head else ""
        column = Column(
            sites,
            name,
            shape,
            "mean" if how == "total" else how,
            f"{name}:weight",
            axis,
            by_weights=of == "weights",
        )
        of_weight = column._replace(
            name=column.weight, rule="sum", weight="", blank=0.0
        )
        pairs += [(column, value), (of_weight, weight)]
    # Neighbours of one dtype are converted by one kernel.
    by_dtype: dict[torch.dtype, list[tuple[Column, Tensor]]] = {}
    for pair in pairs:
        by_dtype.setdefault(pair[1].dtype, []).append(pair)
    columns, tensors = zip(*[pair for like in by_dtype.values() for pair in like])
    return step_table(columns), [*tensors]


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


class StepRecord(NamedTuple):
    """The numbers of a step on the host, as one vector in float64.

    `monitor` contains the monitor's statistics on its own work, keyed by the names in records.MONITOR_FIELDS and
    MONITOR_EXTREMES.
    """

    table: StepTable
    vector: np.ndarray
    monitor: Mapping[str, float] = {}

    def stats(self) -> dict[str, LogitStats]:
        """Returns the statistics by site."""
        fields: dict[str, dict[str, Tensor]] = {}
        by_class: dict[str, dict[str, Tensor]] = {}
        names: dict[str, tuple[str, ...]] = {}
        for column in self.table.form:
            name = column.name.removeprefix(BY_CLASS if column.classes else "")
            if name not in (CLASS_MERGES if column.classes else MERGES):
                continue
            values = torch.from_numpy(self.vector[self.table.indices(column)])
            values = values.long() if column.rule == "sum" else values
            for site, of_site in zip(column.sites, values):
                if column.classes:
                    names[site] = column.classes
                    by_class.setdefault(site, {})[name] = of_site
                else:
                    fields.setdefault(site, {})[name] = of_site
        stats = {}
        for site, tensors in fields.items():
            classes = None
            if site in names:
                classes = ClassStats(names=names[site], **by_class[site])
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
    def alone(cls, stats: Stats, numbers: Numbers) -> Transfer:
        """Starts the transfer of this process's numbers to its host."""
        table, tensors = flatten(stats, numbers)
        return cls([vector_of(tensors)], lambda vectors: StepRecord(table, vectors[0]))

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


def on_host(stats: Stats) -> dict[str, LogitStats]:
    """Returns the statistics on the CPU, in float64."""
    record = Transfer.alone(stats, {}).result() if stats else None
    return {} if record is None else record.stats()
