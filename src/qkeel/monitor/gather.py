"""How the numbers of a step travel between processes: partial values and their gather."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, final

import torch
from torch import Tensor

from qkeel import dist
from qkeel.capture.calls import SiteStats
from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.norms import widest
from qkeel.functional.statistics import TENSORS, LogitStats, merge

# The share that each process has in a number, and the number that all shares make.

NumberKey = tuple[str, str]  # the site, "" for the whole model, and the name of the number
WHOLE_MODEL = ("lr", "train_loss", "final_hidden_norm")  # of no site
Reduction = Literal["mean", "root_mean", "root", "max"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialValue:
    """The value of a number on one process, over its data or over its part of a weight, which a reduction combines.

    mean: Σ weight · value / Σ weight; root_mean: √(Σ weight · value² / Σ weight); root: √Σ value²; max: the largest.
    A process with weight 0 contributes nothing.

    Args:
        value, weight: of the same shape.
        of: "data" combines all processes, "weights" those that hold different parts of the weights.
        own: the values are of the heads that this process computes, not of all heads.
    """

    value: Tensor
    weight: Tensor
    how: Reduction = "mean"
    of: Literal["data", "weights"] = "data"
    own: bool = False


GivenNumbers = Mapping[
    NumberKey, Tensor | PartialValue
]  # a tensor is known alike to all processes that hold the same weights
Numbers = Mapping[NumberKey, Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentRow:
    """One number for many sites: one value per head, or one per site.

    Args:
        name: of the number.
        sites: their names.
        counts: how many heads each has; () for one number of each site.
        values: [heads of all sites], or [sites].
        weight: the number of tokens or other data behind each mean; None for what all processes know alike. how: how
        the values of several processes are combined, see PartialValue.
    """

    name: str
    sites: tuple[str, ...]
    counts: tuple[int, ...]
    values: Tensor
    weight: int | None = None
    how: Reduction = "mean"

    def split(self) -> Iterator[tuple[NumberKey, Tensor | PartialValue]]:
        """The numbers of each site."""
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
    """Numbers by site and name. Numbers that all sites have are kept as rows; those of one site are extracted on
    request."""

    def __init__(self, rows: Iterable[SentRow] = (), single: GivenNumbers | None = None) -> None:
        """Takes rows, and numbers that are of none; of several with one key the last counts."""
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
        """These and others."""
        if isinstance(other, SiteNumbers):
            return SiteNumbers((*self.rows, *other.rows), {**self.single, **other.single})
        return SiteNumbers(self.rows, {**self.single, **other})

    def each(self, change: Callable[[str, Tensor], Tensor]) -> SiteNumbers:
        """Returns a copy with all numbers changed; `change` also gets their names. Weights of partial values stay."""
        rows = [dataclasses.replace(row, values=change(row.name, row.values)) for row in self.rows]
        single: dict[NumberKey, Tensor | PartialValue] = {}
        for key, x in self.single.items():
            share = isinstance(x, PartialValue)
            single[key] = dataclasses.replace(x, value=change(key[1], x.value)) if share else change(key[1], x)
        return SiteNumbers(rows, single)

    def only(self, wanted: Callable[[str], bool]) -> SiteNumbers:
        """Returns the numbers with these names."""
        single = {key: x for key, x in self.single.items() if wanted(key[1])}
        return SiteNumbers([row for row in self.rows if wanted(row.name)], single)

    def renamed(self, rename: Callable[[str, str], str]) -> SiteNumbers:
        """Returns a copy with other names of sites: `rename` gets a site and the name of a number."""
        rows = [dataclasses.replace(r, sites=tuple([rename(site, r.name) for site in r.sites])) for r in self.rows]
        return SiteNumbers(rows, {(rename(site, name), name): x for (site, name), x in self.single.items()})


def combined(how: Reduction, values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Combines the values of several processes; NaN if none of them has any."""
    known = [w > 0 for w in weights]
    if len(values) == 1:
        return values[0].masked_fill(~known[0], torch.nan)
    x, w = torch.stack([v.masked_fill(~k, 0.0) for v, k in zip(values, known)]), torch.stack(list(weights))
    if how == "max":
        out = x.masked_fill(w == 0, -torch.inf).amax(0)
    elif how == "mean":
        out = (w * x).sum(0) / w.sum(0)
    else:
        top = x.abs().amax(0).nan_to_num(1.0, 1.0).clamp_min(torch.finfo(x.dtype).tiny)  # squares stay finite
        total = ((x / top).square() * (w if how == "root_mean" else 1.0)).sum(0)
        out = top * (total / w.sum(0) if how == "root_mean" else total).sqrt()
    return out.masked_fill(w.sum(0) == 0, torch.nan)


def _smaller_over_eps(query: Tensor, key: Tensor, eps: Tensor) -> Tensor:
    return torch.minimum(query, key) / eps


def _product(query: Tensor, key: Tensor) -> Tensor:
    return query * key


def _spread(mean: Tensor, square: Tensor) -> Tensor:
    """The population standard deviation, of a mean and a mean square."""
    return (square - mean.square()).clamp_min(0).sqrt()


# Numbers that are made of merged ones: from which, whether those are only for this, and how.
MADE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., Tensor]]] = {
    "grad_over_eps": (("query_grad_rms", "key_grad_rms", "eps"), ("eps",), _smaller_over_eps),
    "lse_std": (("lse_mean", "lse_square"), ("lse_square",), _spread),
    "gate_std": (("gate_mean", "gate_square"), ("gate_square",), _spread),
    "gain_bound": (("query_bound", "key_bound"), ("query_bound", "key_bound"), _product),
}


_LAST = frozenset(parts[-1] for parts, _, _ in MADE.values())


def with_made(numbers: Numbers) -> Numbers:
    """Returns the numbers, and those derived from them."""
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


# From the device to the host, and from every process to every process, in one piece.

Stats = Mapping[str, LogitStats]
# Of each tensor that is sent: the site, the name, the shape, and how shares make one number ("" of statistics).
GatherForm = tuple[tuple[str, str, tuple[int, ...], str], ...]
_WEIGHT = "weight of "


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one step: statistics by site, and other numbers by (site, name), "" for the whole model; and
    the numbers about this process's monitor, by records.MONITOR_FIELDS, which are not sent."""

    stats: Mapping[str, LogitStats]
    numbers: GivenNumbers
    monitor: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def form(self) -> GatherForm:
        """The form of the vector: its parts in the order in which they are packed."""
        return tuple((site, name, tuple(x.shape), how) for site, name, x, how in self._tensors())

    def pack(self, device: torch.device) -> Tensor:
        """Packs everything into one vector, with a Flag in front."""
        dtype = widest(device)  # exact for counts under 2^53
        parts = [torch.full((1,), Flag.WELL, dtype=dtype, device=device)]
        for _, alike in itertools.groupby(self._tensors(), lambda tensor: tensor[2].dtype):
            parts.append(torch.cat([_on(device, dtype, x.detach()) for _, _, x, _ in alike]).to(dtype))
        return torch.cat(parts)

    def each(self, change: Callable[[list[Tensor]], list[Tensor]]) -> Measurement:
        """Returns a copy with other tensors, and numbers in place of partial values; `change` gets some at a time,
        always in the same order."""
        stats = SiteStats.of(self.stats).each(change)
        numbers = self.numbers if type(self.numbers) is SiteNumbers else SiteNumbers((), self.numbers)
        rows, single = numbers.rows, numbers.single
        values = change([row.values for row in rows])
        known = change([x.value if isinstance(x, PartialValue) else x for x in single.values()])
        shares = {key: x for key, x in single.items() if isinstance(x, PartialValue)}
        weights = dict(zip(shares, change([x.weight for x in shares.values()])))
        found: dict[NumberKey, Tensor | PartialValue] = {
            key: combined(shares[key].how, [x], [weights[key]]) if key in shares else x for key, x in zip(single, known)
        }
        kept = [
            SentRow(name=row.name, sites=row.sites, counts=row.counts, values=x, weight=None)
            for row, x in zip(rows, values)
        ]
        return Measurement(stats=stats, numbers=SiteNumbers(kept, found))

    def parts(self) -> list[Tensor]:
        """All tensors, in the order in which `each` gets them."""
        found: list[Tensor] = []
        for block in SiteStats.of(self.stats).blocks:
            if block.joint.classes is not None:
                found += block.joint.classes.tensors().values()
            found += block.joint.tensors().values()
        numbers = self.numbers if type(self.numbers) is SiteNumbers else SiteNumbers((), self.numbers)
        found += [row.values for row in numbers.rows]
        found += [x.value if isinstance(x, PartialValue) else x for x in numbers.single.values()]
        return found + [x.weight for x in numbers.single.values() if isinstance(x, PartialValue)]

    def _tensors(self) -> list[tuple[str, str, Tensor, str]]:
        """By dtype: where dtypes differ, a GPU joins tensors one by one."""
        return sorted(self._named(), key=lambda tensor: str(tensor[2].dtype))

    def _named(self) -> Iterable[tuple[str, str, Tensor, str]]:
        for site, stats in self.stats.items():
            yield from ((site, name, x, "") for name, x in _tensors(stats))
        for (site, name), x in self.numbers.items():
            if isinstance(x, PartialValue):
                yield site, _WEIGHT + name, x.weight, ""
            yield (site, name, x.value, _how(x)) if isinstance(x, PartialValue) else (site, name, x, "alike")


def _on(device: torch.device, dtype: torch.dtype, x: Tensor) -> Tensor:
    """A tensor as a vector on a device; a number of the host is filled in there, since a copy would wait for it."""
    if x.device == device:
        return x.reshape(-1)
    return torch.full((1,), float(x), dtype=dtype, device=device) if x.numel() == 1 else x.reshape(-1).to(device, dtype)


def _how(share: PartialValue) -> str:
    return f"{share.how} {share.of} {'own' if share.own else 'all'}"


class Flag(enum.IntEnum):
    """The state that a process reports before its numbers: some, none this time, or switched off."""

    WELL = 0
    NOTHING = 1
    OFF = 2


# What a process sent: statistics by site, tensors that are known alike, shares.
Sent = tuple[Stats, Numbers, dict[NumberKey, PartialValue]]
MergedNumbers = tuple[Stats, Numbers]


@final
class AsyncGather:
    """A vector on its way: gathered from all processes and copied to the host without waiting for it. `merge` combines
    what they sent, so that every process ends with the same numbers.
    """

    def __init__(
        self,
        packed: Tensor,
        forms: Sequence[GatherForm],
        merge: Callable[[Mapping[int, Sent]], MergedNumbers] | Callable[[Tensor], Measurement],
        gather: Callable[[Tensor], Tensor] = dist.gather,
    ) -> None:
        """`forms`: of each process; of one alone, nothing is gathered, and `merge` gets its row as it is."""
        self.forms, self._merge = forms, merge
        if len(forms) > 1:
            packed = gather(torch.nn.functional.pad(packed, (0, max(map(_size, forms)) - len(packed))))
        else:
            packed = packed[None]
        self._event: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = packed.cpu()

    @classmethod
    def alone(cls, measured: Measurement) -> AsyncGather:
        """Sends what this process measured to its host, without the other processes."""
        given = measured.parts()
        device = _device(measured)
        dtype = widest(device)  # exact for counts under 2^53
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, x in enumerate(given):
            by_dtype.setdefault(x.dtype, []).append(i)
        order = [i for of in by_dtype.values() for i in of]
        parts = [torch.full((1,), Flag.WELL, dtype=dtype, device=device)]
        for of in by_dtype.values():
            own = [given[i].detach() for i in of]
            flat = [(x if x.ndim == 1 else x.reshape(-1)) if x.device == device else _on(device, dtype, x) for x in own]
            parts.append(torch.cat(flat).to(dtype))
        sizes = [1, *[given[i].numel() for i in order]]

        def merge(row: Tensor) -> Measurement:
            _, *values = row.split_with_sizes(sizes)
            each = dict(zip(order, values))
            at = itertools.count()

            def come(tensors: list[Tensor]) -> list[Tensor]:
                numbers = [each[next(at)].view(x.shape) for x in tensors]
                return [n if x.is_floating_point() else n.to(x.dtype) for n, x in zip(numbers, tensors)]

            return measured.each(come)

        return cls(torch.cat(parts), [()], merge)

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
            raise InvalidValueError(
                "the monitor of another process of this run has switched itself off, or was closed there"
            )
        if len(self.forms) == 1:
            alone = self._merge(self._host[0])  # type: ignore[arg-type]
            assert isinstance(alone, Measurement)
            return dataclasses.replace(alone, numbers=with_made(alone.numbers))  # type: ignore[arg-type]
        rows = zip(self.forms, self._host, strict=True)
        sent = {rank: _unpacked(form, row) for rank, (form, row) in enumerate(rows) if row[0] == Flag.WELL}
        stats, numbers = self._merge(sent) if sent else ({}, {})  # type: ignore[arg-type,misc]
        return Measurement(stats=stats, numbers=with_made(numbers))


def word(flag: Flag, form: GatherForm) -> Tensor:
    """Returns a vector of this form that contains only a flag."""
    vector = torch.zeros(_size(form), dtype=torch.float64)
    vector[0] = flag
    return vector.to(dist.collective_device())


def merged_alike(sent: Sequence[Sent]) -> MergedNumbers:
    """Merges the numbers of processes that each have all heads and layers, and the same weights."""
    stats: Stats
    stats, numbers, _ = sent[0]
    for other, _, _ in sent[1:]:
        stats = {site: merge(s, other[site]) for site, s in stats.items()}
    return stats, {**numbers, **shared([shares for _, _, shares in sent])}


def shared(sent: Sequence[Mapping[NumberKey, PartialValue]]) -> dict[NumberKey, Tensor]:
    """Combines several partial values of each number."""
    found: dict[NumberKey, list[PartialValue]] = {}
    for shares in sent:
        for key, share in shares.items():
            found.setdefault(key, []).append(share)
    return {key: combined(s[0].how, [x.value for x in s], [x.weight for x in s]) for key, s in found.items()}


def _size(form: GatherForm) -> int:
    return 1 + sum(math.prod(shape) for _, _, shape, _ in form)


def _unpacked(form: GatherForm, row: Tensor) -> Sent:
    found, parts, numbers = {}, {}, {}
    sizes = [1, *(math.prod(shape) for _, _, shape, _ in form)]
    _, *values = row[: sum(sizes)].split_with_sizes(sizes)
    for (site, name, shape, how), value in zip(form, values):
        value = value if len(shape) == 1 else value.view(shape)
        if how == "alike":
            numbers[site, name] = value
        elif how:
            parts[site, name] = value, how.split()
        else:
            found[site, name] = value
    shares = {
        (site, name): PartialValue(
            value=x, weight=found.pop((site, _WEIGHT + name)), how=rule, of=of, own=heads == "own"
        )
        for (site, name), (x, (rule, of, heads)) in parts.items()
    }
    sites = dict.fromkeys(site for site, name, _, _ in form if name == TENSORS[0])
    stats = {
        site: LogitStats(
            **{f: _counted(f, found.pop((site, f))) for f in TENSORS},  # type: ignore[arg-type]
            classes=_classes(site, found),
            entropy_error=found.pop((site, "entropy_error"), None),
        )
        for site in sites
    }
    return stats, numbers, shares


def _tensors(stats: LogitStats) -> list[tuple[str, Tensor]]:
    """Every tensor of a site's statistics; those by class carry the names of the classes."""
    found = [*stats.tensors().items()]
    classes = stats.classes
    if classes is not None:
        found += [("\t".join((name, *classes.names)), value) for name, value in classes.tensors().items()]
    return found


def _classes(site: str, found: dict[NumberKey, Tensor]) -> ClassStats | None:
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
    for block in SiteStats.of(measured.stats).blocks:
        return block.joint.max_logit.device
    values = (x.value if isinstance(x, PartialValue) else x for x in measured.numbers.values())
    return next((x.device for x in values), torch.device("cpu"))


def merged(parts: Iterable[Stats]) -> SiteStats:
    """Returns statistics by site, with those of the same site merged."""
    return functools.reduce(SiteStats.merged, map(SiteStats.of, parts), SiteStats())


def on_host(stats: Stats) -> SiteStats:
    """Returns the statistics on the CPU, in float64."""
    if not stats:
        return SiteStats()
    return SiteStats.of(AsyncGather.alone(Measurement(stats=stats, numbers={})).result().stats)
