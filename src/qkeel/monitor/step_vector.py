"""The numbers of a measured step as one vector: how it gets to the host, and the arrays that are read from it."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from qkeel.capture.calls import joint_statistics
from qkeel.distributed.reduce import Axis, Column, MergeRule, StepTable, step_table
from qkeel.functional import statistics
from qkeel.functional.class_statistics import MERGES as CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats, Merge
from qkeel.functional.norms import widest
from qkeel.functional.statistics import MERGES, LogitStats, of_key_heads
from qkeel.monitor.finite_stages import finite_stages, place_of_row
from qkeel.monitor.numbers import Number, Numbers, StatsBySite
from qkeel.records import (
    CLASS_FIELDS,
    HEAD_FIELDS,
    NON_FINITE,
    SINK_HEAD,
    fold_heads,
)

# The statistics by token class stand in a vector under their names behind this.
BY_CLASS = "class_"
# The number of dimensions behind the heads: the class of the query, the class of the key, or both.
CLASS_DIMENSIONS = {
    name: 2 if name in ("max_logit", "mass", "uniform_mass", "n_pairs") else 1
    for name in CLASS_MERGES
}
# The weight of a number stands in a vector under its name before this.
WEIGHT = ":weight"
# They may be known of a head of which nothing was counted.
EXTREMES = ("max_logit", "min_logit", "capped_max_logit", "logit_spread")


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


def flatten(stats: StatsBySite, numbers: Numbers) -> tuple[StepTable, list[Tensor]]:
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
        if not isinstance(number, Number):
            number = Number(number)
        value, weight, how, of, own = number
        if isinstance(key, str):
            sites, shape = (key,), tuple(value.shape)
        else:
            sites, shape = key, tuple(value.shape[1:])
        by_head = own and shape[:1] == (n_heads.get(sites[0]),)
        column = Column(
            sites,
            name,
            shape,
            "max",
            axis="query" if by_head else "",
            by_weights=of == "weights",
        )
        if weight is not None:
            is_count = not isinstance(weight, Tensor)
            weights = torch.full_like(value, weight) if is_count else weight
            of_weight = column._replace(name=name + WEIGHT, rule="sum", blank=0.0)
            pairs.append((of_weight, weights))
            rule: MergeRule = "mean" if how == "total" else how
            column = column._replace(rule=rule, weight=of_weight.name)
        pairs.append((column, value))
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


# Merges this process's vector (None without numbers) with those of the others on the host: the whole model's vector, or
# None if no process has numbers, and the number of processes that have some.
Exchange = Callable[[np.ndarray | None], tuple[np.ndarray | None, float]]


@final
class StepVector:
    """The vector of a step on its way from the device to the host, which waits for it only if necessary.

    Attributes:
        table: where each number lies in the vector.
        vector: the numbers in float64, once `wait` has returned True.
        n_processes: the number of processes that have numbers of the step.
    """

    def __init__(
        self,
        table: StepTable,
        vector: Tensor | None,
        exchange: Exchange | None = None,
    ) -> None:
        """Starts copying a vector to the host. From a GPU the exchange runs in a thread of its own, because it has to wait
        for the copy; an exception is raised by `wait`."""
        self.table, self._exchange = table, exchange
        self.vector = np.zeros(0)
        self.n_processes = 1.0
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._host = vector
        if vector is not None and vector.device.type == "cuda":
            # Pinned, so that the copy runs beside the training's kernels.
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            # Without an exchange no thread: one that waits for a device may disturb the recording of a graph there.
            if exchange is not None:
                self._thread = threading.Thread(
                    target=self._receive, name="qkeel exchange"
                )
                self._thread.start()
        else:
            self._host = None if vector is None else vector.cpu()
            self._receive()

    @classmethod
    def alone(cls, stats: StatsBySite, numbers: Numbers) -> StepVector:
        """Starts copying this process's numbers to its host."""
        table, tensors = flatten(stats, numbers)
        return cls(table, vector_of(tensors))

    def _receive(self) -> None:
        try:
            if self._event is not None:
                self._event.synchronize()
            vector = None if self._host is None else self._host.double().numpy()
            if self._exchange is not None:
                vector, self.n_processes = self._exchange(vector)
            self.vector = self.vector if vector is None else vector
        except Exception as error:
            # In a thread it would be lost; `wait` raises it under the monitor's guard.
            self._error = error

    @property
    def arrived(self) -> bool:
        """Returns whether the numbers can be read without waiting."""
        if self._thread is not None:
            return not self._thread.is_alive()
        return self._event is None or self._event.query()

    def wait(self) -> bool:
        """Waits for the numbers if necessary, and returns whether any process has some.

        Raises: what the exchange raises.
        """
        if self._thread is not None:
            self._thread.join()
        elif self._event is not None:
            self._receive()
        if self._error is not None:
            raise self._error
        return self.n_processes > 0

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
                names[site] = names.get(site) or column.classes
                tensors = by_class if column.classes else fields
                tensors.setdefault(site, {})[name] = of_site
        return {
            site: LogitStats(
                **tensors,  # type: ignore[arg-type]
                classes=ClassStats(names=names[site], **by_class[site])
                if names[site]
                else None,
            )
            for site, tensors in fields.items()
        }


def on_host(stats: StatsBySite) -> dict[str, LogitStats]:
    """Returns the statistics on the CPU, in float64."""
    if not stats:
        return {}
    step = StepVector.alone(stats, {})
    step.wait()
    return step.stats()


# Statistics of the whole model, in STEP_FIELDS.
_WHOLE = (
    "max_logit",
    "min_logit",
    "max_abs_logit",
    "capped_max_logit",
    "entropy",
)


def class_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that are recorded for these classes, according to records.CLASS_FIELDS.

    >>> class_fields(["text", "image"])[1:4]
    ('key_competition', 'class_max_logit/text->text', 'class_max_logit/text->image')
    """
    fields = []
    for field in CLASS_FIELDS:
        if not field.startswith("class_"):
            fields.append(field)
        elif field.endswith("_norm"):
            fields += [f"{field}/{name}" for name in names]
        else:
            pairs = itertools.product(names, repeat=2)
            fields += [f"{field}/{query}->{key}" for query, key in pairs]
    return tuple(fields)


def _largest_over_smallest(norms: np.ndarray) -> np.ndarray:
    """Returns the ratio [layers heads] of the largest to the smallest norm [classes layers heads]; NaN if fewer than
    two classes were seen."""
    largest = np.fmax.reduce(norms, axis=0)
    smallest = np.fmin.reduce(norms, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((~np.isnan(norms)).sum(0) > 1, largest / smallest, np.nan)


@final
class RecordArrays:
    """Reads the arrays [layers heads] of a record from the vectors in which the numbers of steps arrive.

    NaN stands where a layer has fewer heads or was not measured.
    """

    def __init__(self, table: StepTable, sites: Sequence[str], width: int) -> None:
        """Takes the layers of the record, and the number of heads of the layer with the most heads."""
        self._table, self._layers = table, {site: i for i, site in enumerate(sites)}
        self._shape = len(sites), width
        # The index of the NaN behind the vector stands where there is no number.
        self._index: dict[str, np.ndarray] = {}
        self.classes: tuple[str, ...] = ()
        self._scalars: dict[str, int] = {}
        tops = [column for column in table.form if column.name == "max_logit"]
        n_heads = {site: column.shape[0] for column in tops for site in column.sites}
        for column in table.form:
            self.classes = self.classes or column.classes
            if column.name.endswith(WEIGHT):
                continue
            for site, indices in zip(column.sites, table.indices(column)):
                if not indices.ndim:
                    name = f"{column.name}/{site}" if site else column.name
                    self._scalars[name] = int(indices)
                elif site in self._layers:
                    self._add_heads(column, site, indices, n_heads.get(site))
        # One look-up is as fast for all fields as for one.
        self._indices = np.array([*self._index.values()])

    def _add_heads(
        self, column: Column, site: str, indices: np.ndarray, n_heads: int | None
    ) -> None:
        """Adds the number of a site's heads [heads], or by token class [heads classes] or [heads classes classes]."""
        name = column.name
        is_statistic = bool(column.classes) or name in statistics.TENSORS
        is_of_site = name not in HEAD_FIELDS and len(indices) == 1
        # The value of a key head, or of the whole site, stands at each query head.
        if n_heads and (is_statistic or is_of_site):
            indices = np.repeat(indices, n_heads // len(indices), axis=0)
        labels = itertools.product(column.classes, repeat=indices.ndim - 1)
        n = min(len(indices), self._shape[1])
        for label, of_label in zip(labels, indices.reshape(len(indices), -1).T):
            field = f"{name}/{'->'.join(label)}" if label else name
            blank = np.full(self._shape, self._table.size)
            index = self._index.setdefault(field, blank)
            index[self._layers[site], :n] = of_label[:n]

    def read(
        self, vector: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the arrays by name, in the order of HEAD_FIELDS and `class_fields`; and the numbers without heads, which
        begin with those of the whole model."""
        numbers = self._table.known(vector)
        arrays = dict(zip(self._index, numbers[self._indices]))
        if "max_logit" in arrays:
            self._add_derived(arrays)
        for side in ("query", "key") if self.classes else ():
            norms = [arrays[f"class_{side}_norm/{label}"] for label in self.classes]
            arrays[f"{side}_competition"] = _largest_over_smallest(np.stack(norms))
        fields = (*HEAD_FIELDS, *(class_fields(self.classes) if self.classes else ()))
        heads = {name: arrays[name] for name in fields if name in arrays}
        # What was measured may be NaN everywhere.
        has_rows = "n_queries" in arrays and (arrays["n_queries"] > 0).any()
        values = {}
        for name in _WHOLE:
            if name in heads and (has_rows or not np.isnan(heads[name]).all()):
                values[name] = float(fold_heads(name, heads[name].reshape(1, -1))[0])
        values |= {name: float(numbers[at]) for name, at in self._scalars.items()}
        return heads, values

    def _add_derived(self, arrays: dict[str, np.ndarray]) -> None:
        """Adds what is computed from the statistics, in which NaN may be a value."""
        top, low, entropy = arrays["max_logit"], arrays["min_logit"], arrays["entropy"]
        n_queries, n_pairs = arrays["n_queries"], arrays["n_pairs"]
        is_counted = n_queries > 0
        arrays["min_logit"] = low = np.where(n_pairs > 0, low, np.nan)
        arrays["max_abs_logit"] = np.maximum(np.maximum(top, -low), 0.0)
        is_finite = np.isfinite(top)
        is_finite &= np.isfinite(low) | (n_pairs == 0)
        is_finite &= np.isfinite(entropy) | (n_queries == 0)
        # Only maxima may be known of a head, of which nothing was counted.
        is_known = is_counted | ((n_queries == 0) & (top != -np.inf))
        arrays[NON_FINITE] = np.where(is_known, 1.0 - is_finite, np.nan)
        for name in ("max_logit", "capped_max_logit", "logit_spread"):
            is_unknown = ~is_counted & (arrays[name] == -np.inf)
            arrays[name] = np.where(is_unknown, np.nan, arrays[name])
        # Queries and keys may be unknown where scores are written by hand.
        has_products = arrays["n_products"] > 0
        arrays["query_norm"] = np.where(has_products, arrays["query_norm"], np.nan)
        share = arrays["sink_share"]
        is_sink = np.where(np.isnan(share), np.nan, share > SINK_HEAD)
        arrays["sink_head_ratio"] = is_sink
        is_weight: np.ndarray | bool = False
        for name in ("query_weight_norm", "key_weight_norm"):
            if name in arrays:
                is_recorded = self._index[name] != self._table.size
                is_weight |= is_recorded & np.isnan(arrays[name])
        stages = finite_stages(arrays, is_weight)
        if stages is not None:
            arrays["finite_stages"] = stages
        if "first_empty_row" in arrays:
            sample, query = place_of_row(arrays["first_empty_row"])
            arrays["empty_sample"], arrays["empty_query"] = sample, query
