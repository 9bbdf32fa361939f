"""How the numbers of a step are exchanged between processes: partial values, and how they are gathered."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from qkeel.capture.calls import SiteStats
from qkeel.errors import InvalidValueError
from qkeel.functional.norms import widest
from qkeel.functional.statistics import LogitStats, merge

# The contribution of each process to a number, and how all contributions are combined.

NumberKey = tuple[str, str]  # the site, "" for the whole model, and the name of the number
WHOLE_MODEL = ("lr", "train_loss", "final_hidden_norm")  # numbers that do not belong to a site
Reduction = Literal["mean", "root_mean", "root", "max"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialValue:
    """What one process knows about a number: its value over some of the data, or over its part of a weight.

    `how` says how the values are combined. mean: Σ weight · value / Σ weight; root_mean: √(Σ weight · value² / Σ
    weight); root: √Σ value²; max: the largest value. A process with weight 0 contributes nothing.

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


GivenNumbers = Mapping[
    NumberKey, Tensor | PartialValue
]  # all processes that hold the same weights know the same tensor
Numbers = Mapping[NumberKey, Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentRow:
    """One named number for many sites, with one value per head or one per site.

    Args:
        name: the name of the number.
        sites: the names of the sites.
        counts: the number of heads of each site; () if there is one value per site.
        values: [heads of all sites], or [sites].
        weight: the number of tokens or other data over which each value is a mean; None for values that all processes
            know.
        how: how the values of several processes are combined, see PartialValue.
    """

    name: str
    sites: tuple[str, ...]
    counts: tuple[int, ...]
    values: Tensor
    weight: int | None = None
    how: Reduction = "mean"

    def split(self) -> Iterator[tuple[NumberKey, Tensor | PartialValue]]:
        """Yields the values of each site."""
        parts = self.values.split_with_sizes(self.counts) if self.counts else self.values.unbind()
        for site, x in zip(self.sites, parts, strict=True):
            known = (
                x
                if self.weight is None
                else PartialValue(value=x, weight=torch.full_like(x, self.weight), how=self.how)
            )
            yield (site, self.name), known


@final
class SiteNumbers(Mapping[NumberKey, Tensor | PartialValue]):
    """Numbers by site and name. Numbers that all sites have are stored as rows, which are split when a single number is
    read."""

    def __init__(self, rows: Iterable[SentRow] = (), single: GivenNumbers | None = None) -> None:
        """Creates the mapping from rows and single numbers; if a key occurs more than once, its last value is used."""
        self.rows, self.single = tuple(rows), single or {}

    @functools.cached_property
    def _by_key(self) -> dict[NumberKey, Tensor | PartialValue]:
        return {**dict(itertools.chain.from_iterable(row.split() for row in self.rows)), **self.single}

    def __getitem__(self, key: NumberKey) -> Tensor | PartialValue:
        return self._by_key[key]

    def __iter__(self) -> Iterator[NumberKey]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def __or__(self, other: GivenNumbers) -> SiteNumbers:
        """Returns these numbers combined with others."""
        if isinstance(other, SiteNumbers):
            return SiteNumbers((*self.rows, *other.rows), {**self.single, **other.single})
        return SiteNumbers(self.rows, {**self.single, **other})

    def each(self, change: Callable[[str, Tensor], Tensor]) -> SiteNumbers:
        """Applies `change(name, x)` to every number; the weights of partial values stay the same."""
        rows = [dataclasses.replace(row, values=change(row.name, row.values)) for row in self.rows]
        single: dict[NumberKey, Tensor | PartialValue] = {}
        for key, x in self.single.items():
            share = isinstance(x, PartialValue)
            single[key] = dataclasses.replace(x, value=change(key[1], x.value)) if share else change(key[1], x)
        return SiteNumbers(rows, single)

    def only(self, wanted: Callable[[str], bool]) -> SiteNumbers:
        """Returns the numbers whose names are wanted."""
        single = {key: x for key, x in self.single.items() if wanted(key[1])}
        return SiteNumbers([row for row in self.rows if wanted(row.name)], single)

    def renamed(self, rename: Callable[[str, str], str]) -> SiteNumbers:
        """Returns the numbers with sites renamed by `rename(site, name of the number)`."""
        rows = [dataclasses.replace(r, sites=tuple([rename(site, r.name) for site in r.sites])) for r in self.rows]
        return SiteNumbers(rows, {(rename(site, name), name): x for (site, name), x in self.single.items()})


def _smaller_over_eps(query: Tensor, key: Tensor, eps: Tensor) -> Tensor:
    return torch.minimum(query, key) / eps


def _product(query: Tensor, key: Tensor) -> Tensor:
    return query * key


def _spread(mean: Tensor, square: Tensor) -> Tensor:
    """Returns the population standard deviation from a mean and a mean square."""
    return (square - mean.square()).clamp_min(0).sqrt()


# Numbers that are derived from merged numbers: from which, whether those serve only this purpose, and how.
MADE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., Tensor]]] = {
    "grad_over_eps": (("query_grad_rms", "key_grad_rms", "eps"), ("eps",), _smaller_over_eps),
    "lse_std": (("lse_mean", "lse_square"), ("lse_square",), _spread),
    "gate_std": (("gate_mean", "gate_square"), ("gate_square",), _spread),
    "gain_bound": (("query_bound", "key_bound"), ("query_bound", "key_bound"), _product),
}


_LAST = frozenset(parts[-1] for parts, _, _ in MADE.values())


def with_made(numbers: Numbers) -> Numbers:
    """Returns the numbers and those derived from them."""
    if isinstance(numbers, SiteNumbers) and not any([name in _LAST for _, name in numbers.single]):  # noqa: C419
        return numbers
    found = dict(numbers)
    for name, (parts, only, make) in MADE.items():
        for site in [site for site, known in numbers if known == parts[-1]]:
            if all((site, part) in numbers for part in parts):
                found[site, name] = make(*(numbers[site, part] for part in parts))
            for part in only:
                found.pop((site, part), None)
    return found


# The transfer from the device to the host, and from every process to every process, in one piece.

Stats = Mapping[str, LogitStats]
# For each measured tensor: the site, the name, the shape, and how partial values are combined ("" for statistics).
MeasurementForm = tuple[tuple[str, str, tuple[int, ...], str], ...]
ALIKE = "alike"  # for numbers that all processes with the same weights know


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one step: statistics by site, and other numbers by (site, name), where "" stands for the whole
    model.

    `monitor` contains the monitor's statistics on its own work, keyed by the names in records.MONITOR_FIELDS and
    MONITOR_EXTREMES. `arrays` are the statistics with one value per head, for each block of sites, as NumPy arrays;
    they exist only in measurements that have arrived on the host, where one view of all values replaces some twenty
    views.
    """

    stats: Mapping[str, LogitStats]
    numbers: GivenNumbers
    monitor: Mapping[str, float] = dataclasses.field(default_factory=dict)
    arrays: Sequence[Mapping[str, np.ndarray]] = ()

    def form(self) -> MeasurementForm:
        """Returns the form of the measurement, which must be the same in every step."""
        found = [(site, name, tuple(x.shape), "") for site, s in self.stats.items() for name, x in site_tensors(s)]
        for (site, name), x in self.numbers.items():
            value, how = (x.value, _how(x)) if isinstance(x, PartialValue) else (x, ALIKE)
            found.append((site, name, tuple(value.shape), how))
        return tuple(found)

    def each(self, change: Callable[[list[Tensor]], list[Tensor]]) -> Measurement:
        """Returns the measurement with changed tensors, in which partial values are replaced by plain tensors. `change`
        is called with several tensors at a time, in the order of `parts`."""
        stats = SiteStats.of(self.stats).each(change)
        numbers = self.numbers if type(self.numbers) is SiteNumbers else SiteNumbers((), self.numbers)
        rows, single = numbers.rows, numbers.single
        values = change([row.values for row in rows])
        known = change([x.value if isinstance(x, PartialValue) else x for x in single.values()])
        shares = {key: x for key, x in single.items() if isinstance(x, PartialValue)}
        weights = dict(zip(shares, change([x.weight for x in shares.values()])))
        found: dict[NumberKey, Tensor | PartialValue] = {
            key: x.where(weights[key] > 0, torch.nan) if key in shares else x for key, x in zip(single, known)
        }
        kept = [
            SentRow(name=row.name, sites=row.sites, counts=row.counts, values=x, weight=None)
            for row, x in zip(rows, values)
        ]
        return Measurement(stats=stats, numbers=SiteNumbers(kept, found))

    def parts(self) -> list[Tensor]:
        """Returns all tensors in the order in which `each` passes them on."""
        found: list[Tensor] = []
        for block in SiteStats.of(self.stats).blocks:
            if block.joint.classes is not None:
                found += block.joint.classes.tensors().values()
            found += block.joint.tensors().values()
        numbers = self.numbers if type(self.numbers) is SiteNumbers else SiteNumbers((), self.numbers)
        found += [row.values for row in numbers.rows]
        found += [x.value if isinstance(x, PartialValue) else x for x in numbers.single.values()]
        return found + [x.weight for x in numbers.single.values() if isinstance(x, PartialValue)]


def on_device(device: torch.device, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Returns a tensor as a vector on a device; a number on the host is written by a fill, because a copy would have to
    wait."""
    if x.device == device:
        return x.reshape(-1)
    return torch.full((1,), float(x), dtype=dtype, device=device) if x.numel() == 1 else x.reshape(-1).to(device, dtype)


@final
class Transfer:
    """The transfer of a step's numbers from the device to the host, which waits for them only if necessary."""

    def __init__(
        self,
        vectors: Sequence[Tensor],
        read: Callable[[list[Tensor]], Measurement],
        stopped: Callable[[list[Tensor]], bool] | None = None,
    ) -> None:
        """Starts copying the vectors to the host.

        Args:
            vectors: the numbers, on one device.
            read: builds a measurement from the vectors once they are on the host.
            stopped: determines from the vectors whether another process has stopped measuring; None if there is no
                other process.
        """
        self._read, self._stopped = read, stopped
        self._event: torch.cuda.Event | None = None
        if vectors and vectors[0].device.type == "cuda":
            self._host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in vectors]
            for there, x in zip(self._host, vectors):
                there.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = [x.cpu() for x in vectors]

    @classmethod
    def alone(cls, measured: Measurement) -> Transfer:
        """Starts the transfer of this process's measurement to its host."""
        given = measured.parts()
        sizes = [x.numel() for x in given]
        device = _device(measured)
        dtype = widest(device)  # exact for counts under 2^53
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, x in enumerate(given):
            by_dtype.setdefault(x.dtype, []).append(i)
        parts = []
        for of in by_dtype.values():
            own = [x.detach() if x.requires_grad else x for x in [given[i] for i in of]]
            flat = [
                (x if x.ndim == 1 else x.reshape(-1)) if x.device == device else on_device(device, dtype, x)
                for x in own
            ]
            parts.append(torch.cat(flat).to(dtype))
        lengths = [x.numel() for x in parts]
        order = list(itertools.chain.from_iterable(by_dtype.values()))
        places = itertools.accumulate([sizes[i] for i in order], initial=0)
        firsts = dict(zip(order, places))  # the first index of each part in the vector

        def read(rows: list[Tensor]) -> Measurement:
            values: list[Tensor | None] = [None] * len(given)
            groups = rows[0].split_with_sizes(lengths)
            for (kind, of), group in zip(by_dtype.items(), groups):
                group = group if kind.is_floating_point else group.to(kind)
                for i, x in zip(of, group.split_with_sizes([sizes[i] for i in of])):
                    values[i] = x if given[i].ndim == 1 else x.view(given[i].shape)
            at = iter(values)
            found = measured.each(lambda tensors: [next(at) for _ in tensors])  # type: ignore[misc]
            return dataclasses.replace(found, arrays=_arrays(SiteStats.of(measured.stats), rows[0].numpy(), firsts))

        return cls([torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)], read)

    @property
    def arrived(self) -> bool:
        """Returns whether the numbers can be read without waiting."""
        return self._event is None or self._event.query()

    @property
    def stopped(self) -> bool:
        """Returns whether another process has stopped measuring; waits for the numbers if necessary."""
        return self._stopped is not None and self._stopped(self.vectors)

    @property
    def vectors(self) -> list[Tensor]:
        """The vectors on the host; waits for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def result(self) -> Measurement:
        """The numbers on the host; waits for them if necessary.

        Raises:
            InvalidValueError: another process has stopped measuring.
        """
        if self.stopped:
            raise InvalidValueError(
                "the monitor of another process of this run has switched itself off, or was closed there"
            )
        measured = self._read(self.vectors)
        return dataclasses.replace(measured, numbers=with_made(measured.numbers))  # type: ignore[arg-type]


def _arrays(stats: SiteStats, flat: np.ndarray, firsts: Mapping[int, int]) -> list[dict[str, np.ndarray]]:
    """The statistics with one value per head, for each block, as views of a vector in which part i of
    `Measurement.parts` begins at `firsts[i]`."""
    found, i = [], 0
    for block in stats.blocks:
        i += 0 if block.joint.classes is None else len(block.joint.classes.tensors())
        own = {}
        for name, x in block.joint.tensors().items():
            if x.ndim == 1:
                own[name] = flat[firsts[i] : firsts[i] + x.numel()]
            i += 1
        found.append(own)
    return found


def _how(share: PartialValue) -> str:
    return f"{share.how} {share.of} {'own' if share.own else 'all'}"


def site_tensors(stats: LogitStats) -> list[tuple[str, Tensor]]:
    """Every tensor of a site's statistics, with its name; the names of statistics by class contain the names of the
    classes."""
    found = [*stats.tensors().items()]
    classes = stats.classes
    if classes is not None:
        found += [("\t".join((name, *classes.names)), value) for name, value in classes.tensors().items()]
    return found


def _device(measured: Measurement) -> torch.device:
    for block in SiteStats.of(measured.stats).blocks:
        return block.joint.max_logit.device
    values = (x.value if isinstance(x, PartialValue) else x for x in measured.numbers.values())
    return next((x.device for x in values), torch.device("cpu"))


def merged(parts: Iterable[Stats]) -> SiteStats:
    """Merges statistics by site."""
    found = [stats for part in parts if (stats := SiteStats.of(part)).blocks]
    if len({tuple([block.layout for block in stats.blocks]) for stats in found}) == 1:
        blocks = zip(*[stats.blocks for stats in found])
        return SiteStats([of[0]._replace(joint=merge(*[block.joint for block in of])) for of in blocks], found[0].names)
    return functools.reduce(SiteStats.merged, found, SiteStats())


def on_host(stats: Stats) -> SiteStats:
    """Returns the statistics on the CPU, in float64."""
    if not stats:
        return SiteStats()
    return SiteStats.of(Transfer.alone(Measurement(stats=stats, numbers={})).result().stats)
