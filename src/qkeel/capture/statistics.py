"""The per-head statistics of attention calls that were seen: of one call, and of a pass, all of its sites in one tensor
per field."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from qkeel.capture.calls import FlexCall, ScoresCall, cat_heads, find_score_rows, scores_maxima
from qkeel.functional.statistics.class_stats import ClassStats
from qkeel.functional.statistics.logit_stats import LogitStats, merge
from qkeel.kernels.stats.found import Found, FoundStats, only_extremes
from qkeel.kernels.stats.per_head import find_extremes, find_rows
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.spec import AttentionCall

Seen = AttentionCall | ScoresCall
WAITING = 1 << 22  # numbers of calls that wait to be reduced together: 16 MB in float32


def statistics(call: Seen, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Exact statistics of a seen call, in its own precision even under autocast."""
    with torch.no_grad():
        return find(call, threshold).with_others(())


def find(call: Seen, threshold: float = ALARM_THRESHOLD) -> Found:
    """What `statistics` makes statistics of."""
    with torch.no_grad(), torch.autocast(_device(call), enabled=False):
        return find_score_rows(call, threshold) if isinstance(call, ScoresCall) else find_rows(call, threshold)


def maxima(call: Seen) -> LogitStats:
    """The max_logit and min_logit of `statistics`, the rest as if nothing was seen: for less than half its cost. Where
    flex_attention returned the largest logits, they are all that is found, for one operation."""
    with torch.no_grad():
        return find_maxima(call).with_others(())


def find_maxima(call: Seen) -> Found:
    """What `maxima` makes statistics of."""
    with torch.no_grad(), torch.autocast(_device(call), enabled=False):
        if isinstance(call, FlexCall) and call.largest is not None and call.query_mask is None:
            return FoundStats(only_extremes(call.largest.amax((0, 2))))
        if isinstance(call, ScoresCall):
            return FoundStats(only_extremes(*scores_maxima(call)))
        return find_extremes(call)


def _device(call: Seen) -> str:
    return (call.logits if isinstance(call, ScoresCall) else call.q).device.type


class Block(NamedTuple):
    """The statistics of some sites as one: their heads one after the other.

    Args:
        names: of the sites.
        heads, kv_heads: how many each has.
        joint: of all of their heads.
    """

    names: tuple[str, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    joint: LogitStats

    @property
    def layout(self) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
        """What two blocks have in common whose heads are those of the same sites."""
        return self.names, self.heads, self.kv_heads

    def split(self) -> Iterator[tuple[str, LogitStats]]:
        """The statistics of each site."""
        if len(self.names) == 1:
            yield self.names[0], self.joint
            return
        parts = {
            name: x.split(self.kv_heads if name.startswith(("key_", "n_keys")) else self.heads)
            for name, x in self.joint.tensors().items()
        }
        for i, site in enumerate(self.names):
            yield site, LogitStats(**{name: x[i] for name, x in parts.items()})  # type: ignore[arg-type]


@final
class SiteStats(Mapping[str, LogitStats]):
    """Statistics by site. They are kept in blocks of sites, each as one; a site's own are taken out when it is asked
    for."""

    def __init__(self, blocks: Iterable[Block] = (), order: Iterable[str] | None = None) -> None:
        """Takes the blocks, and the order of the sites where it is another than theirs."""
        self.blocks = tuple(blocks)
        known = itertools.chain.from_iterable([block.names for block in self.blocks])
        self.names = tuple(known if order is None else order)

    @classmethod
    def of(cls, sites: Mapping[str, LogitStats]) -> SiteStats:
        """The same of statistics by site."""
        if type(sites) is SiteStats:
            return sites
        return cls(Block((n,), (len(s.max_logit),), (len(s.key_norm),), s) for n, s in sites.items())

    @functools.cached_property
    def _by_site(self) -> dict[str, LogitStats]:
        return dict(itertools.chain.from_iterable(block.split() for block in self.blocks))

    def __getitem__(self, name: str) -> LogitStats:
        return self._by_site[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def field(self, name: str) -> dict[str, Tensor]:
        """One field of each site, of query heads."""
        found: dict[str, Tensor] = {}
        for block in self.blocks:
            found |= zip(block.names, block.joint.tensors()[name].split(block.heads))
        return found

    def merged(self, other: SiteStats) -> SiteStats:
        """The statistics of both data sets."""
        if not self.blocks or not other.blocks:
            return self if self.blocks else other
        if [block.layout for block in self.blocks] == [block.layout for block in other.blocks]:
            pairs = zip(self.blocks, other.blocks)
            return SiteStats([a._replace(joint=merge(a.joint, b.joint)) for a, b in pairs], self.names)
        if set(self.names).isdisjoint(other.names):
            return SiteStats((*self.blocks, *other.blocks), (*self.names, *other.names))
        found = dict(self)
        for name, stats in other.items():
            found[name] = merge(found[name], stats) if name in found else stats
        return SiteStats.of(found)

    def each(self, change: Callable[[list[Tensor]], list[Tensor]]) -> SiteStats:
        """The same with other tensors: `change` gets those of a block, in the same order each time."""
        return SiteStats([block._replace(joint=_changed(block.joint, change)) for block in self.blocks], self.names)

    def renamed(self, rename: Callable[[str], str]) -> SiteStats:
        """The same under other names."""
        blocks = [block._replace(names=tuple(map(rename, block.names))) for block in self.blocks]
        return SiteStats(blocks, map(rename, self.names))


def _changed(stats: LogitStats, change: Callable[[list[Tensor]], list[Tensor]]) -> LogitStats:
    classes, fields = stats.classes, stats.tensors()
    if classes is not None:
        own = classes.tensors()
        classes = ClassStats(names=classes.names, **dict(zip(own, change([*own.values()]))))
    return LogitStats(**dict(zip(fields, change([*fields.values()]))), classes=classes)  # type: ignore[arg-type]


@final
class SiteStatistics:
    """Collects what is found of calls, by site, and which of the sites are single heads of one."""

    def __init__(self) -> None:
        self.heads: dict[str, list[str]] = {}
        self._stats = SiteStats()
        self._waiting: dict[tuple[object, ...], dict[str, Found]] = {}  # by what is alike
        self._order: dict[str, None] = {}  # of those that wait
        self._size = 0

    def add(self, name: str, new: Found | LogitStats, part_of: str | None) -> None:
        """Adds what was found of a call; `part_of` names the site of which it is a single head."""
        found = new if isinstance(new, Found) else FoundStats(new)
        group = self._waiting.setdefault(found.alike or (name,), {})
        if name in group:  # a layer that is called again
            self._reduce()
            group = self._waiting.setdefault(found.alike or (name,), {})
        group[name] = found
        self._order[name] = None
        self._size += found.size
        if self._size > WAITING:
            self._reduce()
        if part_of is not None and name not in self.heads.setdefault(part_of, []):
            self.heads[part_of].append(name)

    def _reduce(self) -> None:
        """Makes statistics of all that waits."""
        if self._waiting:
            self._stats = self._stats.merged(SiteStats([_reduced(g) for g in self._waiting.values()], self._order))
            self._waiting, self._order, self._size = {}, {}, 0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._stats.blocks)

    def update(self, other: SiteStatistics) -> None:
        """Adds the statistics of another pass."""
        other._reduce()
        self._reduce()
        self._stats = self._stats.merged(other._stats)
        for whole, parts in other.heads.items():
            mine = self.heads.setdefault(whole, [])
            mine += [part for part in parts if part not in mine]

    def joined(self) -> SiteStats:
        """Per site; heads that were computed one by one as one site."""
        self._reduce()
        if not self.heads:
            return self._stats
        stats = dict(self._stats)
        for name, parts in self.heads.items():
            whole = cat_heads([stats.pop(part) for part in parts])
            stats[name if name not in stats else parts[0]] = whole
        return SiteStats.of(stats)


@torch.no_grad()
def _reduced(group: Mapping[str, Found]) -> Block:
    first, *others = group.values()
    heads = [one.heads for one in group.values()]
    return Block(tuple(group), tuple([h for h, _ in heads]), tuple([g for _, g in heads]), first.with_others(others))
