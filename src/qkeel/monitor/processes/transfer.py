"""From the device to the host, and from every process to every process, in one piece."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from qkeel import dist
from qkeel.errors import InvalidValueError
from qkeel.functional.statistics.class_stats import ClassStats
from qkeel.functional.statistics.logit_stats import TENSORS, LogitStats, merge

Stats = dict[str, LogitStats]
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
_FORMULA = "formula "


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one step: statistics by site, and other numbers by (site, name), "" for the whole model."""

    stats: Mapping[str, LogitStats]
    numbers: Mapping[tuple[str, str], Tensor]

    def layout(self) -> Layout:
        """Name and shape of every tensor, in the order they are packed."""
        of_stats = [(site, field, x) for site, s in self.stats.items() for field, x in _tensors(s)]
        others = [(site, name, x) for (site, name), x in self.numbers.items()]
        return tuple((site, name, tuple(x.shape)) for site, name, x in (*of_stats, *others))

    def pack(self, device: torch.device) -> Tensor:
        """All of it as one vector, a Flag in front."""
        of_stats = [x for s in self.stats.values() for _, x in _tensors(s)]
        dtype = torch.float32 if device.type == "mps" else torch.float64  # exact for counts under 2^53
        parts = [torch.full((1,), Flag.WELL, dtype=dtype, device=device)]
        parts += [x.detach().reshape(-1).to(device) for x in (*of_stats, *self.numbers.values())]
        return torch.cat(parts)  # in the widest of their dtypes, which is that of the first


class Flag(enum.IntEnum):
    """The state that a process reports before its numbers: some, none this time, or switched off."""

    WELL = 0
    NOTHING = 1
    OFF = 2


@final
class Transfer:
    """A vector on its way: gathered from all processes and copied to the host without waiting for it. Statistics of
    processes are merged, other numbers averaged, so that each process ends with the same.
    """

    def __init__(self, packed: Tensor, layout: Layout, *, alone: bool) -> None:
        """`alone`: this process's numbers only."""
        self.layout = layout
        gathered = packed[None] if alone else dist.gather(packed)
        self._event: torch.cuda.Event | None = None
        if gathered.device.type == "cuda":
            self._host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._host.copy_(gathered, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = gathered.cpu()

    @classmethod
    def of(cls, measured: Measurement, *, alone: bool) -> Transfer:
        """The transfer of a measurement."""
        device = _device(measured) if alone else dist.collective_device()
        return cls(measured.pack(device), measured.layout(), alone=alone)

    @classmethod
    def say(cls, flag: Flag, layout: Layout) -> Transfer:
        """Taking part in a gather of this layout with nothing but a word."""
        vector = torch.zeros(1 + sum(math.prod(shape) for _, _, shape in layout), dtype=torch.float64)
        vector[0] = flag
        return cls(vector.to(dist.collective_device()), layout, alone=False)

    @property
    def arrived(self) -> bool:
        """Returns whether it can be read without waiting."""
        return self._event is None or self._event.query()

    def flagged(self, flag: Flag) -> bool:
        """Returns whether some process reported this; waits for the numbers if need be."""
        if self._event is not None:
            self._event.synchronize()
        return bool((self._host[:, 0] == flag).any())

    def result(self) -> Measurement:
        """The numbers of all processes that had some, on the host; waits for them if need be.

        Raises: InvalidValueError if a process has stopped measuring.
        """
        if self.flagged(Flag.OFF):
            raise InvalidValueError("the monitor of another process of this run has switched itself off")
        ranks = [self._unpacked(row) for row in self._host if row[0] == Flag.WELL]
        if not ranks:
            return Measurement(stats={}, numbers={})
        stats = ranks[0][0]
        for other, _ in ranks[1:]:
            stats = {site: merge(s, other[site]) for site, s in stats.items()}
        numbers = {key: torch.stack([n[key] for _, n in ranks]).mean(0) for key in ranks[0][1]}
        return Measurement(stats=stats, numbers=numbers)

    def _unpacked(self, row: Tensor) -> tuple[dict[str, LogitStats], dict[tuple[str, str], Tensor]]:
        found = {}
        _, *values = row.split([1, *(math.prod(shape) for _, _, shape in self.layout)])
        for (site, name, shape), value in zip(self.layout, values):
            found[site, name] = value if len(shape) == 1 else value.view(shape)
        sites = dict.fromkeys(site for site, name, _ in self.layout if name == TENSORS[0])
        stats = {
            site: LogitStats(
                **{f: _counted(f, found.pop((site, f))) for f in TENSORS},  # type: ignore[arg-type]
                classes=_classes(site, found),
                formulas=_formulas(site, found),
            )
            for site in sites
        }
        return stats, found


def _tensors(stats: LogitStats) -> list[tuple[str, Tensor]]:
    """Every tensor of a site's statistics; those by class carry the names of the classes, formulas a mark."""
    found = [*stats.tensors().items(), *((_FORMULA + name, value) for name, value in stats.formulas.items())]
    classes = stats.classes
    if classes is not None:
        found += [("\t".join((name, *classes.names)), value) for name, value in classes.tensors().items()]
    return found


def _formulas(site: str, found: dict[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Those of a site, taken out of what was found."""
    own = [name for at, name in found if at == site and name.startswith(_FORMULA)]
    return {name.removeprefix(_FORMULA): found.pop((site, name)) for name in own}


def _classes(site: str, found: dict[tuple[str, str], Tensor]) -> ClassStats | None:
    """Those of a site, taken out of what was found."""
    own = [name.split("\t") for at, name in found if at == site and "\t" in name]
    if not own:
        return None
    names = own[0][1:]
    values = {name: _counted(name, found.pop((site, "\t".join((name, *names))))) for name, *_ in own}
    return ClassStats(names=tuple(names), **values)


def _counted(field: str, value: Tensor) -> Tensor:
    return value.to(torch.int64) if field.startswith("n_") else value


def _device(measured: Measurement) -> torch.device:
    for stats in measured.stats.values():
        return stats.max_logit.device
    return next((x.device for x in measured.numbers.values()), torch.device("cpu"))


def merged(parts: Iterable[Mapping[str, LogitStats]]) -> Stats:
    """Statistics by site, those of one site merged."""
    found: Stats = {}
    for part in parts:
        for name, stats in part.items():
            found[name] = merge(found[name], stats) if name in found else stats
    return found


def on_host(stats: Stats) -> Stats:
    """The statistics on the CPU, in float64."""
    if not stats:
        return {}
    return dict(Transfer.of(Measurement(stats=stats, numbers={}), alone=True).result().stats)
