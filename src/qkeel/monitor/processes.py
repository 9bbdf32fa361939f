"""The processes that watch one run, and the numbers of a step that they merge."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeVar, final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.dist.agreement import leave_word, left_by_all, publish, published, words_under
from qkeel.dist.sharding import Layout, head_axes
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import MERGES, LogitStats, merge
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.monitor.gather import (
    WHOLE_MODEL,
    AsyncGather,
    Flag,
    GatherForm,
    Measurement,
    MergedNumbers,
    NumberKey,
    Numbers,
    PartialValue,
    Sent,
    Stats,
    shared,
    word,
)
from qkeel.monitor.record import site_facts
from qkeel.patching.modes import running_stage
from qkeel.sites.find import within

# The processes of a run as they introduced themselves, and what they measured as that of one model.

V = TypeVar("V")

UNLIKE = (
    "the processes of this run do not see the same attention, so nothing can be merged. Stages of a pipeline that are "
    "not torch's, and other splits that do not show in the weights, must be given: qkeel.watch(..., "
    "layout=Layout.of_mesh(mesh, layers=...)), Layout from qkeel.monitor"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One process: its place, what it sends, which sites have split heads and key heads, and its part of the
    description.

    `stages` are those of its models, by their names, with which the names of their sites begin; {} for one model.
    """

    layout: Layout
    form: GatherForm = ()
    split: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def words(self) -> tuple[str, str]:
        """Returns its place, and what many processes share, as texts."""
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

    def parts(self) -> list[tuple[_ModelPart, Self]]:
        """Returns each of its stages as if it were a process by itself; numbers of the whole model are those of the
        last."""
        stages = sorted(self.stages, key=lambda name: self.stages[name])
        found = [_ModelPart(name, name == stages[-1]) for name in stages]
        return [(part, self._of(part)) for part in found] or [(_ModelPart("", True), self)]

    def _of(self, part: _ModelPart) -> Self:
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
        """The stage of a pipeline; 0 if there is none."""
        return self.layout.stage or 0

    @property
    def place(self) -> tuple[int, ...]:
        """All stages that it has."""
        return tuple(sorted(self.stages.values())) or (self.stage,)

    def heads(self, site: str, name: str = "max_logit") -> int:
        """The number of a site's query heads on this process; for "key_norm", of its key heads."""
        return next(shape[0] for at, known, shape, _ in self.form if (at, known) == (site, name))

    @property
    def sites(self) -> list[str]:
        """The names of the sites, as this process knows them."""
        return [site for site, name, _, _ in self.form if name == "max_logit"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _ModelPart:
    """One of the models of a process, "" for the only one; `last`: what it says of the whole model is this one's."""

    model: str
    last: bool

    def own(self, site: str) -> str | None:
        """The name of a site inside the model; None for other models' sites."""
        if not site or not self.model:
            return site if self.last else None
        rest = site.removeprefix(self.model)
        inside = rest != site and (not rest or rest[0] in ".#")
        return rest.removeprefix(".") if inside else None

    def only(self, by_site: Mapping[str, V]) -> dict[str, V]:
        """Returns those of the model's sites, under its own names."""
        return {own: x for site, x in by_site.items() if (own := self.own(site)) is not None}

    def keys(self, by_key: Mapping[NumberKey, V]) -> dict[NumberKey, V]:
        """Like `only`, for numbers by site and name."""
        return {(own, name): x for (site, name), x in by_key.items() if (own := self.own(site)) is not None}


@final
class Members:
    """All processes; numbers layers and heads over all of them.

    Layers of stages have their own names where these differ, and else "stages.1.NAME". A process with no data at the
    first exchange is assumed to be like the others of its stage.
    """

    def __init__(self, members: Sequence[RankInfo], rank: int) -> None:
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

    def merge(self, sent: Mapping[int, Sent]) -> MergedNumbers:
        """Merges what every process sent into the numbers of one model."""
        sent = {
            n: (part.only(stats), part.keys(numbers), part.keys(shares))
            for rank, (stats, numbers, shares) in sent.items()
            for n, part in self._parts[rank]
        }
        stats: Stats = {}
        alike: Numbers = {}
        shares: list[dict[NumberKey, PartialValue]] = []
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

    def _shares(
        self, stage: int, rank: int, shares: Mapping[NumberKey, PartialValue], first: bool
    ) -> dict[NumberKey, PartialValue]:
        """The partial values that count, by the names and heads of the whole model."""
        found = {}
        for key, x in shares.items():
            if x.of == "data" or first:
                if x.own and key[0] and len(x.value) == self._spans[rank, key[0]][0][1]:
                    span = self._spans[rank, key[0]][0]
                    value, weight = (put_in_place(of, span, 0.0) for of in (x.value, x.weight))
                    x = dataclasses.replace(x, value=value, weight=weight)
                found[self._key(stage, key)] = x
        return found

    def _key(self, stage: int, key: NumberKey) -> NumberKey:
        return key if key[1] in WHOLE_MODEL else (self._names.get((stage, key[0]), key[0]), key[1])

    def _span(self, m: RankInfo, site: str, name: str, which: int) -> HeadSpan:
        """The place of a process's heads among all heads of a site."""
        n = m.heads(site, name)
        if not m.split[site][which]:
            return 0, n, n
        parts = {other.layout.head_part: other.heads(site, name) for other in self.all if other.stage == m.stage}
        at = m.layout.head_part
        return sum(parts[i] for i in range(at)), n, sum(parts.values())


def _outline(m: RankInfo) -> object:
    """The part of a member that must be the same for all processes of a stage."""
    if any(heads for heads, _ in m.split.values()):
        return [(site, name, how) for site, name, _, how in m.form]
    return m.form


HeadSpan = tuple[int, int, int]  # the first head, how many, of how many


def placed(stats: LogitStats, heads: HeadSpan, keys: HeadSpan, *, count_keys: bool = True) -> LogitStats:
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


def put_in_place(value: Tensor, at: HeadSpan, nothing: float, *, blank: bool = False) -> Tensor:
    """Returns the numbers of all heads, given those of some; the others, or with `blank` all of them, are `nothing`."""
    first, n, total = at
    out = value.new_full((total, *value.shape[1:]), nothing)
    if not blank:
        out[first : first + n] = value
    return out


# The introduction of a process to the others that measure with it.


@final
class Handshake:
    """Makes a process's Member from its model: the place is read from the weights, unless it was given.

    `stages` gets, by the name of each of several models, "" for one, the pipeline stage that the first pass shows the
    model to be.
    """

    def __init__(self, model: nn.Module, sites: Callable[[], Sequence[AttentionSite]], layout: Layout | None) -> None:
        """`sites` gives them once they are known."""
        self.stages: dict[str, int | None] = {}
        self._model, self._sites, self._layout = model, sites, layout

    def __call__(self, form: GatherForm) -> RankInfo:
        """Raises: RefusedError if the weights are split in a way that is not known, or only some of several models are
        stages of a pipeline."""
        sites = self._sites()
        known = {site.name: site for site in sites}
        names = [site for site, name, _, _ in form if name == "max_logit"]
        modules = {name: _with_weights(self._model, name) for name in names}
        layout = self._layout or Layout.of_model(self._model, modules.values(), self.stages.get(""))
        if self._layout is not None:
            by_hand = layout.head_parts > 1
            split = dict.fromkeys(names, (by_hand, by_hand))
        else:
            split = {name: self._split(module, known.get(name)) for name, module in modules.items()}
        stages = {} if self._layout is not None else self._known_stages()
        sizes = {name: sum(p.numel() for p in self._model.get_submodule(name).parameters()) for name in stages or ("",)}
        about = {"sites": site_facts(sites), "parameters": sizes}
        return RankInfo(layout=layout, form=form, split=split, about=about, stages=stages)

    def _known_stages(self) -> dict[str, int]:
        """The stages that several models are; {} where they are none, and of one model."""
        models = [name for name, _ in self._model.named_children()] if "" not in self.stages else []
        known = {name: stage for name in models if (stage := self.stages.get(name)) is not None}
        if known and len(known) < len(models):
            raise RefusedError(
                f"expected models that are all stages of a pipeline, or none of them, got stages {known} among "
                f"{', '.join(models)}: watch the others by themselves"
            )
        return known

    def _split(self, module: nn.Module, site: AttentionSite | None) -> tuple[bool, bool]:
        """Returns whether the query heads of a site, and its key heads, are split over processes."""
        if not head_axes(self._model, module.parameters()):
            return False, False
        if site is None or not site.terms:
            return True, True
        ways = ([term.query for term in site.terms], [term.key for term in site.terms])
        heads, keys = (self._any_split(way) for way in ways)
        return heads, keys

    def _any_split(self, chains: Iterable[Sequence[HeadSlice]]) -> bool:
        weights = [self._model.get_parameter(chain[-1].parameter) for chain in chains if chain[-1].n > 1]
        return bool(head_axes(self._model, weights))


def _with_weights(model: nn.Module, site: str) -> nn.Module:
    """The module of a site, or the nearest around it that has weights."""
    path = site.partition("#")[0].split(".") if site else []
    while path:
        module = model.get_submodule(".".join(path))
        if next(module.parameters(), None) is not None:
            return module
        path.pop()
    return model


# The processes of a run measuring as one: one packed gather per measured step, and no process waits for ever.

PATIENCE = 8.0  # seconds that a process waits for another that may not watch at all
LONGEST = 60.0  # seconds that it waits, once, for one that watches to end its first measured step
_NO_NUMBERS, _OFF = "nothing", "off"
_GONE = "the monitor of another process of this run has switched itself off"


@final
class ProcessGroup:
    """The processes of a run that measure as one, as one of them sees it.

    Before any collective the processes make sure that all of them watch, and before the first gather they introduce
    themselves, since a gather of unlike sizes, or without one of them, never ends. Later, a process that stops
    announces it in the gather that the others wait for.
    """

    def __init__(self, introduced: Handshake, apart: Callable[[], str], gather: dist.StepGather) -> None:
        """Takes how this process introduces itself, what tells why it must measure alone, "" if it need not, and the
        gather that ends a step."""
        self._introduced, self._apart, self._step_gather = introduced, apart, gather
        self.gathers = 0  # that were begun
        self.records_alone = False  # each process records what it sees, as without an optimizer
        self.stopped = False  # this process measures no more, and the others may not know it yet
        self.over = False  # all processes know that it is over
        self.unseen: QkeelError | None = None  # why this process has no attention; others may have some
        self._alone = False
        self._name = ""
        self._watching = False  # that all processes watch is known
        self._late = False  # another process was late to the step under way
        self._passes = self._rounds = 0
        self._form: GatherForm = ()
        self.members: Members | None = None
        self.here()

    def here(self) -> None:
        """Tells the others, once there are any, that this process watches."""
        if not self._name and dist.world() > 1:
            self._name = f"monitor {dist.ordinal('monitor')}"
            leave_word(f"{self._name} watches", "yes")

    @property
    def several(self) -> bool:
        """Returns whether other processes take part."""
        return not self._alone and not self.over and dist.world() > 1

    @property
    def waited_for(self) -> bool:
        """Returns whether others will wait for this process at the next measured step."""
        return self.several and self.members is not None

    @property
    def records_jointly(self) -> bool:
        """Returns whether the records cover several processes."""
        return self.several and not self.records_alone

    def begin(self, model: str, *, gathers: bool) -> bool:
        """Called in the first pass of a model that is to be measured, before anything that involves all processes.

        Returns whether it is measured; nothing of this step is if another process was late to it.

        gathers: whether a pass of the model involves all processes.

        Raises: InvalidValueError if the monitor of another process has switched itself off before it.
        """
        self._introduced.stages[model] = running_stage()
        if self._late:
            return False
        if gathers:
            late = not self._all_come()
            self._late = late and not self.records_alone
            return not late
        if not self.records_alone:
            self.all_watch()
        return True

    def about(self) -> dict[str, object]:
        """The description of the whole model, where several processes have parts of it."""
        return {} if self.members is None else self.members.about()

    def stay_alone(self, why: str) -> None:
        """Measure this process's part only."""
        self._alone = True
        caution(f"{why}: what is recorded is what this process sees")

    def all_watch(self) -> bool:
        """Returns whether all processes watch the model; waits at most once, for up to 8 seconds."""
        if dist.world() == 1:
            return False
        if self._unmet():
            self._hear("watches", PATIENCE)
        return self.several

    def _unmet(self) -> bool:
        """Returns whether other processes may take part, of which it is not known whether all watch the model."""
        self.here()
        if self.several and self._apart():
            self.stay_alone(self._apart())
        return self.several and not self._watching

    def _all_come(self) -> bool:
        """Returns False where a process is 8 seconds late to the first pass that waits for all of them. The model waits
        for it in that pass: if it has not come until the next one, it does not watch."""
        if not self._unmet():
            return True
        if not self._passes:
            self._passes = 1
            self._hear("pass 0", PATIENCE, again=True)
            return self._watching
        self._hear("pass 1", PATIENCE if left_by_all(f"{self._name} pass 0") else 0.01)
        return True

    def _hear(self, at: str, patience: float, *, again: bool = False) -> None:
        """Waits for a word of all processes; without one this process stays alone, unless it is to try again."""
        words = words_under(f"{self._name} {at}", "yes", patience)
        if words is not None and _OFF in words:
            self.over = True
            raise InvalidValueError(_GONE)
        self._watching = words is not None
        if words is None and again:
            caution(
                f"another process of this run has not reached the first measured pass within {patience:g} seconds: "
                "this step is not measured, and the next one is if that process watches the model too"
            )
        elif words is None:
            self.stay_alone("not every process of this run watches the model")

    def send(self, measured: Measurement | None, *, alone: bool) -> AsyncGather | None:
        """Starts the gather of a step; None means that this process or, as the result, every process has no numbers.

        alone: only this process records the step.

        Raises: InvalidValueError if the processes can't be merged.
        """
        if self._late and not alone:
            self._late = False
            return None
        if not alone and self.all_watch() and self.members is None:
            self._meet(measured)
        members = self.members
        if alone or members is None or not self.several:
            return None if measured is None else AsyncGather.alone(measured)
        if measured is None:
            return self._gather(word(Flag.NOTHING, self._form), members)
        if measured.form() != members.own_form:
            self.leave(known=False)
            raise InvalidValueError(
                "what this process measures is not what it measured at first, as with layers that run in some steps "
                "only, so the processes of this run can't be merged"
            )
        return self._gather(measured.pack(dist.collective_device()), members)

    def placed(self, stats: Stats) -> Stats:
        """Statistics of this process alone, by the names and heads of the whole model once these are known."""
        return stats if self.members is None else self.members.placed(stats)

    def leave(self, *, known: bool) -> None:
        """Reports to the others that this process has switched itself off; they do the same.

        known: another process has reported the same about itself, so that nobody waits.
        """
        self.over = True
        if known or not dist.world() > 1 or not self._name:
            return
        if self.members is None:
            for at in (self._round(), f"{self._name} pass {self._passes}"):
                leave_word(at, _OFF)
        else:
            self._gather(word(Flag.OFF, self._form), self.members)

    def _gather(self, packed: Tensor, members: Members) -> AsyncGather:
        self.gathers += 1
        gather = functools.partial(self._step_gather.gather, self._name)
        return AsyncGather(packed, members.forms, members.merge, gather)

    def _meet(self, measured: Measurement | None) -> None:
        self._form = () if measured is None else measured.form()
        place, text = self._introduced(self._form).words()
        print_of = str(zlib.crc32(text.encode()))
        publish(f"{self._name} {print_of}", text)
        nothing, count = "" if self._form else _NO_NUMBERS, self._step_gather.count
        words = words_under(self._round(), f"{nothing}|{count}|{print_of}|{place}", LONGEST)
        self._rounds += 1
        if words is None:
            self.stay_alone("not every process of this run reached the end of its first measured step")
            return
        if _OFF in words:
            self.over = True
            raise InvalidValueError(_GONE)
        said = [one.split("|", 3) for one in words]
        if all(nothing for nothing, *_ in said):
            if self.unseen is not None:
                self.over = True
                raise self.unseen
            return
        texts = {of: published(f"{self._name} {of}") for of in {of for *_, of, _ in said}}
        try:
            self.members = Members([RankInfo.of(place, texts[of]) for *_, of, place in said], dist.rank())
        except InvalidValueError:
            self.over = True
            raise
        self._form = self.members.own_form
        self._step_gather.agree(self._name, {count for _, count, *_ in said})

    def _round(self) -> str:
        return f"{self._name} round {self._rounds}"
