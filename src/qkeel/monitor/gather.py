"""How the numbers of a step are exchanged between processes: partial values, and how they are gathered."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from qkeel.capture.calls import ScoreBlock, SiteStats
from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.norms import widest
from qkeel.functional.statistics import LogitStats, merge, merge_stacked

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


# All processes that hold the same weights know the same tensor.
SiteNumbers = Mapping[NumberKey, Tensor | PartialValue]


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
    MONITOR_EXTREMES.
    """

    stats: Mapping[str, LogitStats]
    numbers: SiteNumbers
    monitor: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def form(self) -> MeasurementForm:
        """Returns the form of the measurement, which must be the same in every step."""
        found = [(site, name, tuple(x.shape), "") for site, s in self.stats.items() for name, x in site_tensors(s)]
        for (site, name), x in self.numbers.items():
            value, how = (x.value, _how(x)) if isinstance(x, PartialValue) else (x, ALIKE)
            found.append((site, name, tuple(value.shape), how))
        return tuple(found)


class _Place(NamedTuple):
    """Where one tensor lies in a vector: the index of its first number, its shape, and its dtype."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def indices(self) -> np.ndarray:
        """The index of each of its numbers, in its shape."""
        return np.arange(self.first, self.first + math.prod(self.shape)).reshape(self.shape)

    def read(self, vector: np.ndarray) -> Tensor:
        """Returns the tensor, in float64 or in its own integer dtype; for n vectors [n size], the n tensors stacked
        [n …]."""
        x = torch.from_numpy(vector[..., self.first : self.first + math.prod(self.shape)])
        x = x.view(self.shape) if x.ndim == 1 else x.reshape(len(x), *self.shape)
        return x if self.dtype.is_floating_point else x.to(self.dtype)


class BlockPlaces(NamedTuple):
    """Where the statistics of a block of sites lie: the fields of `LogitStats` and those of `ClassStats` by name."""

    layout: tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
    fields: Mapping[str, _Place]
    classes: tuple[str, ...] | None
    by_class: Mapping[str, _Place]

    def read(self, vector: np.ndarray) -> ScoreBlock:
        """Returns the block."""
        classes = None
        if self.classes is not None:
            own = {name: place.read(vector) for name, place in self.by_class.items()}
            classes = ClassStats(names=self.classes, **own)
        fields = {name: place.read(vector) for name, place in self.fields.items()}
        return ScoreBlock(*self.layout, LogitStats(**fields, classes=classes))  # type: ignore[arg-type]

    def merged(self, vectors: np.ndarray) -> ScoreBlock:
        """Returns the block merged over several vectors, without the statistics by token class."""
        return ScoreBlock(*self.layout, merge_stacked({name: x.read(vectors) for name, x in self.fields.items()}))


class _Form(NamedTuple):
    """What measurements must have in common to be packed in the same way."""

    sites: tuple[str, ...]
    blocks: tuple[tuple[object, ...], ...]
    single: tuple[NumberKey, ...]
    shares: tuple[NumberKey, ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@final
class Packing:
    """Where the numbers of a measurement lie in one vector. All measurements of the same form share one packing.

    Tensors of the same dtype are adjacent, so that they are converted together.
    """

    def __init__(self, form: _Form) -> None:
        self.sites = form.sites
        self.by_dtype: dict[torch.dtype, list[int]] = {}  # the indices of tensors, in the order of the vector
        for i, (dtype, _) in enumerate(form.tensors):
            self.by_dtype.setdefault(dtype, []).append(i)
        self.size = 0
        firsts: dict[int, int] = {}
        for i in itertools.chain.from_iterable(self.by_dtype.values()):
            firsts[i] = self.size
            self.size += math.prod(form.tensors[i][1])
        places = iter([_Place(firsts[i], shape, dtype) for i, (dtype, shape) in enumerate(form.tensors)])
        self.blocks: list[BlockPlaces] = []
        for layout, fields, classes, by_class in form.blocks:
            own = {name: next(places) for name in by_class}  # type: ignore[attr-defined]
            self.blocks.append(BlockPlaces(layout, {name: next(places) for name in fields}, classes, own))  # type: ignore
        self.single = {key: next(places) for key in form.single}
        weights = [next(places) for _ in form.shares]
        self._shares = _indices([self.single[key] for key in form.shares])
        self._weights = _indices(weights)
        self._made: list[tuple[Callable[..., Tensor], list[np.ndarray]]] = []
        if any(name in _LAST for _, name in self.single):
            self._make()

    @classmethod
    def of(cls, measured: Measurement) -> tuple[Packing, list[Tensor]]:
        """Returns the packing of a measurement, and the tensors of the measurement in the order of the packing."""
        stats = SiteStats.of(measured.stats)
        numbers = measured.numbers
        tensors: list[Tensor] = []
        blocks = []
        for block in stats.blocks:
            classes, fields = block.joint.classes, block.joint.tensors()
            by_class = {} if classes is None else classes.tensors()
            tensors += [*by_class.values(), *fields.values()]
            blocks.append((block.layout, tuple(fields), None if classes is None else classes.names, tuple(by_class)))
        tensors += [x.value if isinstance(x, PartialValue) else x for x in numbers.values()]
        shares = {key: x.weight for key, x in numbers.items() if isinstance(x, PartialValue)}
        tensors += shares.values()
        form = _Form(
            stats.names,
            tuple(blocks),
            tuple(numbers),
            tuple(shares),
            tuple([(x.dtype, tuple(x.shape)) for x in tensors]),
        )
        return _packing(form), tensors

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Returns the tensors as one vector on the device, in its widest floating-point dtype. In float64 counts below
        2^53 are exact."""
        dtype = widest(device)
        parts = []
        for of in self.by_dtype.values():
            own = [x.detach() if x.requires_grad else x for x in [tensors[i] for i in of]]
            flat = [
                (x if x.ndim == 1 else x.reshape(-1)) if x.device == device else on_device(device, dtype, x)
                for x in own
            ]
            parts.append(torch.cat(flat).to(dtype))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)

    def finish(self, vector: np.ndarray) -> np.ndarray:
        """Returns the vector in float64, with NaN in place of numbers that no process knows, and with the numbers that
        are derived from others appended."""
        vector = vector.astype(np.float64, copy=False)
        if len(self._shares):
            vector[self._shares[~(vector[self._weights] > 0)]] = np.nan
        made = [make(*[torch.from_numpy(vector[i]) for i in parts]).numpy() for make, parts in self._made]
        return np.concatenate([vector, *made]) if made else vector

    def _make(self) -> None:
        """Finds the numbers that are derived from others according to MADE."""
        known = {key: place.indices for key, place in self.single.items()}
        for name, (parts, only, make) in MADE.items():
            sites = [site for site, other in known if other == parts[-1]]
            ready = [site for site in sites if all((site, part) in known for part in parts)]
            found = [np.broadcast_arrays(*[known[site, part] for part in parts]) for site in ready]
            for site, of in zip(ready, found):
                known[site, name] = np.arange(self.size, self.size + of[0].size)
                self.single[site, name] = _Place(self.size, of[0].shape, torch.float64)
                self.size += of[0].size
            if ready:
                self._made.append((make, [np.concatenate([x.reshape(-1) for x in xs]) for xs in zip(*found)]))
            for key in itertools.product(sites, only):
                known.pop(key, None)
                self.single.pop(key, None)


_packing = functools.lru_cache(maxsize=32)(Packing)


def _indices(places: Sequence[_Place]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.intp), *[place.indices.reshape(-1) for place in places]])


@final
class Arrived:
    """The measurement of a step on the host, as one vector in float64, from which tensors are created on request.

    `monitor` contains the monitor's statistics on its own work, keyed by the names in records.MONITOR_FIELDS and
    MONITOR_EXTREMES.
    """

    def __init__(self, packing: Packing, vector: np.ndarray, monitor: Mapping[str, float] | None = None) -> None:
        self.packing, self.vector, self.monitor = packing, packing.finish(vector), monitor or {}

    @classmethod
    def of(cls, measured: Measurement) -> Arrived:
        """Packs a measurement that is already on the host."""
        packing, tensors = Packing.of(measured)
        return cls(packing, packing.pack(tensors, torch.device("cpu")).numpy(), measured.monitor)

    @functools.cached_property
    def stats(self) -> SiteStats:
        """The statistics by site."""
        return SiteStats([block.read(self.vector) for block in self.packing.blocks], self.packing.sites)

    def number(self, name: str) -> dict[str, Tensor]:
        """Returns one of the numbers other than the statistics, keyed by site."""
        return {site: place.read(self.vector) for (site, of), place in self.packing.single.items() if of == name}


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
        read: Callable[[list[Tensor]], Arrived],
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
        packing, tensors = Packing.of(measured)
        vector = packing.pack(tensors, _device(measured))
        return cls([vector], lambda rows: Arrived(packing, rows[0].numpy()))

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

    def result(self) -> Arrived:
        """Returns the numbers on the host; waits for them if necessary.

        Raises:
            InvalidValueError: another process has stopped measuring.
        """
        if self.stopped:
            raise InvalidValueError(
                "the monitor of another process of this run has switched itself off, or was closed there"
            )
        return self._read(self.vectors)


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


def merged_arrivals(steps: Sequence[Arrived]) -> SiteStats:
    """Merges the statistics of several steps."""
    packings = {step.packing for step in steps}
    if len(steps) == 1 or len(packings) > 1 or any(block.classes for block in steps[0].packing.blocks):
        return merged([step.stats for step in steps])
    every = np.stack([step.vector for step in steps])
    (packing,) = packings
    return SiteStats([block.merged(every) for block in packing.blocks], packing.sites)


def on_host(stats: Stats) -> SiteStats:
    """Returns the statistics on the CPU, in float64."""
    if not stats:
        return SiteStats()
    return Transfer.alone(Measurement(stats=stats, numbers={})).result().stats
