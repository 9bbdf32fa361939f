"""The processes of a run as they introduced themselves, and what they measured as that of one model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeVar, final

import torch
from torch import Tensor

from qkeel.dist.layout import Layout
from qkeel.errors import InvalidValueError
from qkeel.functional.statistics.class_stats import ClassStats
from qkeel.functional.statistics.logit_stats import MERGES, LogitStats, merge
from qkeel.monitor.processes.share import WHOLE_MODEL, Key, Numbers, Share
from qkeel.monitor.processes.transfer import Form, Merged, Sent, Stats, shared
from qkeel.sites.named_models import within

V = TypeVar("V")

UNLIKE = (
    "the processes of this run do not see the same attention, so nothing can be merged. Stages of a pipeline that are "
    "not torch's, and other splits that do not show in the weights, must be given: qkeel.watch(..., "
    "layout=Layout.of_mesh(mesh, layers=...)), Layout from qkeel.monitor"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process: its place, what it sends, whose heads and key heads are split, and its part of the description.

    `stages` are those of its models, by their names, with which the names of their sites begin; {} of one model.
    """

    layout: Layout
    form: Form = ()
    split: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def words(self) -> tuple[str, str]:
        """Its place, and what is the same for many processes, as texts."""
        own = dataclasses.asdict(self)
        return json.dumps(own.pop("layout")), json.dumps([*own.values()])

    @classmethod
    def of(cls, place: str, text: str) -> Self:
        """The member that these texts describe."""
        form, split, about, stages = json.loads(text)
        return cls(
            layout=Layout(**json.loads(place)),
            form=tuple((site, name, tuple(shape), how) for site, name, shape, how in form),
            split={site: (heads, keys) for site, (heads, keys) in split.items()},
            about=about,
            stages=stages,
        )

    def parts(self) -> list[tuple[_Part, Self]]:
        """Each of its stages as if a process of its own had it; numbers of the whole model are those of the last."""
        stages = sorted(self.stages, key=lambda name: self.stages[name])
        found = [_Part(name, name == stages[-1]) for name in stages]
        return [(part, self._of(part)) for part in found] or [(_Part("", True), self)]

    def _of(self, part: _Part) -> Self:
        sites = {site["name"]: site for site in self.about["sites"]}  # type: ignore[attr-defined]
        size = self.about["parameters"][part.model]  # type: ignore[index]
        return dataclasses.replace(
            self,
            layout=dataclasses.replace(self.layout, stage=self.stages[part.model]),
            form=tuple((own, *more) for site, *more in self.form if (own := part.own(site)) is not None),
            split=part.only(self.split),
            about={
                "sites": [{**site, "name": own} for own, site in part.only(sites).items()],
                "parameters": {part.model: size},
            },
        )

    @property
    def stage(self) -> int:
        """The stage of a pipeline; 0 where there is none."""
        return self.layout.stage or 0

    @property
    def place(self) -> tuple[int, ...]:
        """All stages that it has."""
        return tuple(sorted(self.stages.values())) or (self.stage,)

    def heads(self, site: str, name: str = "max_logit") -> int:
        """The number of query heads of a site that it has, of "key_norm" of key heads."""
        return next(shape[0] for at, known, shape, _ in self.form if (at, known) == (site, name))

    @property
    def sites(self) -> list[str]:
        """The names of the sites, as this process knows them."""
        return [site for site, name, _, _ in self.form if name == "max_logit"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One of the models of a process, "" for the only one; `last`: what it says of the whole model is this one's."""

    model: str
    last: bool

    def own(self, site: str) -> str | None:
        """The name of a site inside the model; None of other models' sites."""
        if not site or not self.model:
            return site if self.last else None
        rest = site.removeprefix(self.model)
        inside = rest != site and (not rest or rest[0] in ".#")
        return rest.removeprefix(".") if inside else None

    def only(self, by_site: Mapping[str, V]) -> dict[str, V]:
        """Those by site that belong to the model, by its own names."""
        return {own: x for site, x in by_site.items() if (own := self.own(site)) is not None}

    def keys(self, by_key: Mapping[Key, V]) -> dict[Key, V]:
        """The same of numbers by site and name."""
        return {(own, name): x for (site, name), x in by_key.items() if (own := self.own(site)) is not None}


@final
class Members:
    """All processes; numbers layers and heads over all of them.

    Layers of stages have their own names where these differ, and else "stages.1.NAME". A process that had nothing to
    send when they met is taken to be like the others of its stage.
    """

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        """Raises: InvalidValueError if they are not the processes of one model."""
        known = {m.place: m for m in reversed(members) if m.form}
        members = [m if m.form else dataclasses.replace(known.get(m.place, m), layout=m.layout) for m in members]
        self.forms = [m.form for m in members]
        self.own_form = self.forms[rank]
        # Each stage of a process is counted like a process of its own: by its number among all of them.
        every = [(i, *part) for i, m in enumerate(members) for part in m.parts()]
        self.all = [m for _, _, m in every]
        self._parts = [[(n, part) for n, (of, part, _) in enumerate(every) if of == i] for i in range(len(members))]
        self._own = self._parts[rank]
        first = {m.stage: m for m in reversed(self.all) if m.form}
        self._stages = sorted(first)
        for m in self.all:
            alike = first.get(m.stage, m)
            if _outline(m) != _outline(alike):
                raise InvalidValueError(UNLIKE)
        names = [site for stage in self._stages for site in first[stage].sites]
        twice = len(set(names)) < len(names)
        self._first = first
        self._names = {
            (stage, site): within(f"stages.{stage}", site) if twice else site
            for stage in self._stages
            for site in first[stage].sites
        }
        self._spans = {
            (rank, site): (self._span(m, site, "max_logit", 0), self._span(m, site, "key_norm", 1))
            for rank, m in enumerate(self.all)
            for site in m.sites
        }

    @property
    def sites(self) -> list[str]:
        """The names of all sites, in the order of the model."""
        return [*self._names.values()]

    def about(self) -> dict[str, object]:
        """The description of the whole model: what each stage says of its sites and of its size."""
        sites, size = [], 0
        for stage in self._stages:
            m = self._first[stage]
            rank = self.all.index(m)
            size += sum(m.about["parameters"].values())  # type: ignore[attr-defined]
            known = {site["name"]: site for site in m.about["sites"]}  # type: ignore[attr-defined]
            for site in m.sites:
                heads, keys = self._spans[rank, site]
                sites.append(
                    {
                        **known.get(site, {"head_dim": 0, "weights": "unknown"}),
                        "name": self._names[stage, site],
                        "n_heads": heads[2],
                        "n_kv_heads": keys[2],
                    }
                )
        return {"sites": sites, "parameters": size}

    def placed(self, stats: Stats) -> Stats:
        """Statistics of this process alone, by the names and heads of the whole model."""
        return {
            self._names[self.all[n].stage, site]: self._placed(n, site, s)
            for n, part in self._own
            for site, s in part.only(stats).items()
        }

    def merge(self, sent: Mapping[int, Sent]) -> Merged:
        """The merged numbers of one model, of what each process sent."""
        sent = {
            n: (part.only(stats), part.keys(numbers), part.keys(shares))
            for rank, (stats, numbers, shares) in sent.items()
            for n, part in self._parts[rank]
        }
        stats: Stats = {}
        alike: Numbers = {}
        shares: list[dict[Key, Share]] = []
        for stage in self._stages:
            ranks = [rank for rank in sent if self.all[rank].stage == stage]
            for site in self._first[stage].sites:
                name, of = self._names[stage, site], {rank: sent[rank][0][site] for rank in ranks}
                counted = self._with_keys(of, site)
                for rank in self._unlike_data(ranks, site):
                    part = self._placed(rank, site, of[rank], count_keys=rank in counted)
                    stats[name] = merge(stats[name], part) if name in stats else part
            for rank in ranks[:1]:
                alike |= {self._key(stage, key): x for key, x in sent[rank][1].items()}
            found = [self._shares(stage, rank, sent[rank][2], first) for rank, first in self._unlike_weights(ranks)]
            above = {key for part in found for key in part if not key[0]}  # of the whole model: its last stage's
            shares = [{key: x for key, x in part.items() if key not in above} for part in shares] + found
        return stats, {**alike, **shared(shares)}

    def _placed(self, rank: int, site: str, stats: LogitStats, *, count_keys: bool = True) -> LogitStats:
        heads, keys = self._spans[rank, site]
        return placed(stats, heads, keys, count_keys=count_keys)

    def _with_keys(self, of: Mapping[int, LogitStats], site: str) -> set[int]:
        """Of processes whose keys are the same, the one whose queries see most of them."""
        found: dict[object, int] = {}
        for rank, stats in of.items():
            m = self.all[rank]
            same = m.layout.data, m.split[site][1] and m.layout.head_part
            if same not in found or int(stats.n_keys.sum()) > int(of[found[same]].n_keys.sum()):
                found[same] = rank
        return {*found.values()}

    def _unlike_data(self, ranks: Sequence[int], site: str) -> Iterator[int]:
        """Those of these processes whose statistics of a site count: of those that compute the same, the first."""
        seen = set()
        for rank in ranks:
            m = self.all[rank]
            place = m.layout.data, m.layout.context, m.split[site][0] and m.layout.head_part
            if place not in seen:
                seen.add(place)
                yield rank

    def _unlike_weights(self, ranks: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """These processes, and whether each is the first that holds its part of the weights."""
        seen = set()
        for rank in ranks:
            shard = self.all[rank].layout.shard
            yield rank, shard not in seen
            seen.add(shard)

    def _shares(self, stage: int, rank: int, shares: Mapping[Key, Share], first: bool) -> dict[Key, Share]:
        """Those that count, by the names and heads of the whole model."""
        found = {}
        for key, x in shares.items():
            if x.of == "data" or first:
                if x.own and key[0] and len(x.value) == self._spans[rank, key[0]][0][1]:
                    span = self._spans[rank, key[0]][0]
                    value, weight = (put_in_place(of, span, 0.0) for of in (x.value, x.weight))
                    x = dataclasses.replace(x, value=value, weight=weight)
                found[self._key(stage, key)] = x
        return found

    def _key(self, stage: int, key: Key) -> Key:
        return key if key[1] in WHOLE_MODEL else (self._names.get((stage, key[0]), key[0]), key[1])

    def _span(self, m: Member, site: str, name: str, which: int) -> Span:
        """The place of a process's heads among all heads of a site."""
        n = m.heads(site, name)
        if not m.split[site][which]:
            return 0, n, n
        parts = {other.layout.head_part: other.heads(site, name) for other in self.all if other.stage == m.stage}
        at = m.layout.head_part
        return sum(parts[i] for i in range(at)), n, sum(parts.values())


def _outline(m: Member) -> object:
    """The part of a member that must be the same for all processes of a stage."""
    if any(heads for heads, _ in m.split.values()):
        return [(site, name, how) for site, name, _, how in m.form]
    return m.form


Span = tuple[int, int, int]  # the first head, how many, of how many


def placed(stats: LogitStats, heads: Span, keys: Span, *, count_keys: bool = True) -> LogitStats:
    """The statistics with a place for every head, for `merge`.

    Args:
        stats: of some heads.
        heads: which of the query heads these are.
        keys: which of the key heads.
        count_keys: whether the keys count; not where another process counts the same ones.
    """
    if heads[1] == heads[2] and keys[1] == keys[2] and count_keys:
        return stats

    def put(name: str, value: Tensor, nothing: float) -> Tensor:
        of_keys = name.startswith(("key_", "n_keys"))
        return put_in_place(value, keys if of_keys else heads, nothing, blank=of_keys and not count_keys)

    neutral = {name: rule.neutral for name, rule in MERGES.items()} | {"entropy_error": 0.0}
    fields = {name: put(name, value, neutral[name]) for name, value in stats.tensors().items()}
    classes = stats.classes
    if classes is not None:
        parts = {n: put(n, x, -torch.inf if n == "max_logit" else 0.0) for n, x in classes.tensors().items()}
        classes = ClassStats(names=classes.names, **parts)
    return LogitStats(**fields, classes=classes)  # type: ignore[arg-type]


def put_in_place(value: Tensor, at: Span, nothing: float, *, blank: bool = False) -> Tensor:
    """The numbers of some heads among those of all, the others `nothing`; with `blank` all of them are."""
    first, n, total = at
    out = value.new_full((total, *value.shape[1:]), nothing)
    if not blank:
        out[first : first + n] = value
    return out
