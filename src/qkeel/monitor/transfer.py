"""From the device to the host, and from every process to every process, in one piece."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from qkeel import dist
from qkeel.errors import InvalidValueError
from qkeel.functional.stats import LogitStats, merge

FIELDS = tuple(f.name for f in dataclasses.fields(LogitStats))
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one step gave: statistics by site, and other numbers by (site, name), "" for the whole model."""

    stats: Mapping[str, LogitStats]
    numbers: Mapping[tuple[str, str], Tensor]

    def layout(self) -> Layout:
        """Name and shape of every tensor, in the order they are packed."""
        of_stats = [(site, field, getattr(s, field)) for site, s in self.stats.items() for field in FIELDS]
        others = [(site, name, x) for (site, name), x in self.numbers.items()]
        return tuple((site, name, tuple(x.shape)) for site, name, x in (*of_stats, *others))

    def pack(self, device: torch.device) -> Tensor:
        """All of it as one vector; a flag, 0 for "all is well", in front."""
        of_stats = [getattr(s, field) for s in self.stats.values() for field in FIELDS]
        dtype = torch.float32 if device.type == "mps" else torch.float64  # exact for counts under 2^53
        parts = [torch.zeros(1, dtype=dtype, device=device)]
        parts += [x.detach().reshape(-1).to(device=device, dtype=dtype) for x in (*of_stats, *self.numbers.values())]
        return torch.cat(parts)


@final
class Transfer:
    """A vector under way: gathered from all processes and copied to the host without waiting for it.

    Statistics of processes are merged, other numbers averaged, so that each process ends with the same.
    """

    def __init__(self, measured: Measured, *, alone: bool) -> None:
        """`alone`: this process's numbers only."""
        self.layout = measured.layout()
        self.sites = tuple(measured.stats)
        several = not alone and dist.world() > 1
        device = dist.collective_device() if several else _device(measured)
        packed = measured.pack(device)
        gathered = dist.gather(packed) if several else packed[None]
        self._event: torch.cuda.Event | None = None
        if gathered.device.type == "cuda":
            self._host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._host.copy_(gathered, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = gathered.cpu()

    @property
    def arrived(self) -> bool:
        """Whether it can be read without waiting."""
        return self._event is None or self._event.query()

    def result(self) -> Measured:
        """The numbers, on the host; waits for them if need be.

        Raises: InvalidValueError if another process has stopped measuring.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._host[:, 0].any():
            raise InvalidValueError("the monitor of another process of this run has switched itself off")
        ranks = [self._unpacked(row) for row in self._host]
        stats = ranks[0][0]
        for other, _ in ranks[1:]:
            stats = {site: merge(s, other[site]) for site, s in stats.items()}
        numbers = {key: torch.stack([n[key] for _, n in ranks]).mean(0) for key in ranks[0][1]}
        return Measured(stats=stats, numbers=numbers)

    def _unpacked(self, row: Tensor) -> tuple[dict[str, LogitStats], dict[tuple[str, str], Tensor]]:
        start, found = 1, {}
        for site, name, shape in self.layout:
            size = math.prod(shape)
            found[site, name] = row[start : start + size].view(shape)
            start += size
        stats = {
            site: LogitStats(**{f: _counted(f, found.pop((site, f))) for f in FIELDS})  # type: ignore[arg-type]
            for site in self.sites
        }
        return stats, found


def _counted(field: str, value: Tensor) -> Tensor:
    return value.to(torch.int64) if field.startswith("n_") else value


def _device(measured: Measured) -> torch.device:
    for stats in measured.stats.values():
        return stats.max_logit.device
    return next((x.device for x in measured.numbers.values()), torch.device("cpu"))


def agree(layout: Layout | None) -> bool:
    """Whether all processes are about to send the same names and shapes; None says that this one has nothing to send.

    One small gather, made once at the first step that is measured.
    """
    digest = 0 if layout is None else zlib.crc32(repr(layout).encode()) + 1
    answers = dist.gather(torch.tensor([float(digest)], dtype=torch.float64, device=dist.collective_device()))
    return bool((answers == answers[0]).all()) and digest != 0


def say_off(layout: Layout) -> None:
    """Take part in a gather with nothing but the word that this process has switched itself off."""
    size = 1 + sum(math.prod(shape) for _, _, shape in layout)
    vector = torch.zeros(size, dtype=torch.float64, device=dist.collective_device())
    vector[0] = 1.0
    dist.gather(vector)
