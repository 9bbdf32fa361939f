"""The processes of a run that measure one model: how they find each other, and which numbers they reduce in a step."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeVar, final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.capture.calls import ScoreBlock, SiteStats
from qkeel.dist.agreement import PATIENCE, all_posted, post_message, publish, published, try_gather_messages
from qkeel.dist.sharding import Layout, head_axes
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.functional.class_statistics import MERGES as _CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.norms import widest
from qkeel.functional.statistics import MERGES, TENSORS, LogitStats, of_key_heads
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.monitor.gather import (
    ALIKE,
    WHOLE_MODEL,
    Arrived,
    Measurement,
    MeasurementForm,
    NumberKey,
    PartialValue,
    Stats,
    Transfer,
    on_device,
    on_host,
)
from qkeel.monitor.record import site_facts
from qkeel.patching.modes import running_stage
from qkeel.records import MONITOR_EXTREMES, MONITOR_FIELDS
from qkeel.sites.find import within

# The processes of a run, and the layers and heads of their model.

V = TypeVar("V")

_STOPPED, _WELL, _UNFIT, _OWN = range(4)  # the first entries of the maxima; those about monitors start at _OWN
_FLAGS = _OWN + len(MONITOR_EXTREMES)

UNLIKE = (
    "the processes of this run do not see the same attention, so nothing can be merged. Pipeline stages that torch "
    "did not create, and other splits that are not visible in the weights, must be passed: qkeel.watch(..., "
    "layout=Layout.of_mesh(mesh, layers=...)), with Layout from qkeel.monitor"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One process of a run.

    Args:
        layout: the role of the process.
        keys_seen: the number of keys that its queries saw in the first measured step.
        form: the form of its measurements; () if it had no measurements when the processes were introduced.
        split: for each site, whether its query heads and its key heads are split across processes.
        about: its part of the description of the model.
        stages: if there are several models, the pipeline stage of each, keyed by the name with which the names of its
            sites begin.
        extent: which statistics its first measured step contained.
    """

    layout: Layout
    keys_seen: int = 0
    form: MeasurementForm = ()
    split: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    extent: Extent | None = None

    def words(self) -> tuple[str, str]:
        """Returns two JSON strings: the layout and `keys_seen` of the process, and everything else, which is the same
        for many processes."""
        own = dataclasses.asdict(self)
        return json.dumps([own.pop("layout"), own.pop("keys_seen")]), json.dumps([*own.values()])

    @classmethod
    def of(cls, place: str, text: str) -> Self:
        """Returns the process described by these strings."""
        form, split, about, stages, extent = json.loads(text)
        layout, keys_seen = json.loads(place)
        return cls(
            layout=Layout(**layout),
            keys_seen=keys_seen,
            form=tuple((site, name, tuple(shape), how) for site, name, shape, how in form),
            split={site: (heads, keys) for site, (heads, keys) in split.items()},
            about=about,
            stages=stages,
            extent=None if extent is None else Extent(**{**extent, "fields": tuple(extent["fields"])}),
        )

    def parts(self) -> list[tuple[_ModelPart, Self]]:
        """Returns each of its stages as a separate process; the numbers of the whole model belong to the last stage."""
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
        """Returns the pipeline stage, or 0 if there is no pipeline."""
        return self.layout.stage or 0

    @property
    def place(self) -> tuple[int, ...]:
        """Returns all stages of the process."""
        return tuple(sorted(self.stages.values())) or (self.stage,)

    def heads(self, site: str, name: str = "max_logit") -> int:
        """Returns the number of query heads of a site that this process has, or of key heads for name="key_norm"."""
        return next(shape[0] for at, known, shape, _ in self.form if (at, known) == (site, name))

    @property
    def sites(self) -> list[str]:
        """Returns the names of the sites in this process."""
        return [site for site, name, _, _ in self.form if name == "max_logit"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _ModelPart:
    """One of the models of a process, named "" if there is only one; the `last` has the numbers of the whole model."""

    model: str
    last: bool

    def own(self, site: str) -> str | None:
        """Returns the name of a site inside this model; None for sites of other models."""
        if not site or not self.model:
            return site if self.last else None
        rest = site.removeprefix(self.model)
        inside = rest != site and (not rest or rest[0] in ".#")
        return rest.removeprefix(".") if inside else None

    def only(self, by_site: Mapping[str, V]) -> dict[str, V]:
        """Returns the values of this model's sites, keyed by their names inside it."""
        return {own: x for site, x in by_site.items() if (own := self.own(site)) is not None}


# What a step's exchange contains: which statistics, and at which precision.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The statistics that the processes of a run exchange.

    It is determined by the first measured step, and every later step is checked against it on the device. A step that
    needs more is dropped on every process, and the following steps exchange everything.

    Args:
        fields: the names of the fields of LogitStats that are exchanged; all other fields have their neutral values on
            every process.
        even: True if the heads of each layer have equal counts, so that a count is exchanged once per layer.
        double: True if some statistics are float64; all are then exchanged in that dtype.
    """

    fields: tuple[str, ...] = TENSORS
    even: bool = False
    double: bool = True

    @classmethod
    def of(cls, stats: Stats) -> Self:
        """Returns the extent of what one process measured; waits for the device."""
        fields: dict[str, None] = {}
        even = True
        for s in on_host(stats).values():
            values = s.tensors()
            for name, rule in MERGES.items():
                # An average over some data may be 0 by chance, but a norm that is 0 everywhere was not measured.
                by_chance = rule.how == "mean" and name != "query_norm" and bool(values[rule.count].any())
                if by_chance or bool((values[name] != rule.neutral).any()):
                    fields |= dict.fromkeys((name, rule.count) if rule.count else (name,))
                if rule.how == "sum":
                    even = even and bool((values[name] == values[name][:1]).all())
        double = any(s.max_logit.dtype == torch.float64 for s in stats.values())
        return cls(fields=tuple(name for name in TENSORS if name in fields), even=even, double=double)

    @classmethod
    def union(cls, extents: Sequence[Self]) -> Self:
        """Returns the extent that covers the statistics of all processes; it covers everything if no process has
        measured any."""
        if not extents:
            return cls()
        fields = {name for one in extents for name in one.fields}
        return cls(
            fields=tuple(name for name in TENSORS if name in fields),
            even=all(one.even for one in extents),
            double=any(one.double for one in extents),
        )

    def named(self, *hows: str, keys: bool) -> tuple[str, ...]:
        """Returns the exchanged fields with certain merge rules, for query heads or for key heads."""
        return tuple(name for name in self.fields if MERGES[name].how in hows and of_key_heads(name) == keys)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Where the tensor of one number is stored in the exchanged vectors.

    Args:
        how: as in PartialValue, or "alike"; for statistics by token class, the rule that merges them.
        shape: the shape of the tensor for the whole model.
        first: the index of its first entry in the vector. The values of a weighted mean are followed by the weights.
        vector: 0 for maxima, 1 for sums in the dtype of the statistics, 2 for exact sums.
        of_class: True if it is a field of the statistics by token class.
        of_weights: True if each process knows the number for its own part of the weights.
    """

    how: str
    shape: tuple[int, ...]
    first: int
    vector: int
    of_class: bool
    of_weights: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def weighted(self) -> bool:
        return self.how in ("mean", "root", "root_mean") and not self.of_class


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor of a process is stored, and which range of all heads it covers."""

    slot: _Slot
    span: HeadSpan | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the heads that a process contributes, and their indices among the heads of the whole model.

    `layer` is the first row of each row's layer. `first` is the first row of each contributed layer, and `layers` its
    index in the whole model.
    """

    rows: Tensor
    places: Tensor
    layer: Tensor
    first: Tensor
    layers: Tensor


@final
class Members:
    """The processes of one model: its layers and heads over all of them, and the vectors that they exchange.

    Layers of pipeline stages keep their own names if all of these differ, and are otherwise named "stages.1.NAME". A
    process that had nothing to send when the processes were introduced is assumed to be like the other processes of its
    stage.

    A process sends maxima, and sums in the dtype of the statistics and in float64. Every number has one place in these
    vectors, whichever process measured it, so they are as long for a thousand processes as for two.
    """

    def __init__(self, members: Sequence[RankInfo], rank: int) -> None:
        """Raises: InvalidValueError if the members are not the processes of one model."""
        known = {m.place: m for m in reversed(members) if m.form}
        self._complete = all(m.form for m in members)
        self.extent = Extent.union([m.extent for m in members if m.form and m.extent is not None])
        members = [
            m if m.form else dataclasses.replace(known.get(m.place, m), layout=m.layout, keys_seen=m.keys_seen)
            for m in members
        ]
        self.own_form = members[rank].form
        # Each stage of a process counts as a separate process, with its own index among all of them.
        every = [(i, *part) for i, m in enumerate(members) for part in m.parts()]
        self.all = [m for _, _, m in every]
        self._own = [(n, part) for n, (of, part, _) in enumerate(every) if of == rank]
        first = {m.stage: m for m in reversed(self.all) if m.form}
        self._stages = sorted(first)
        for m in self.all:
            alike = first.get(m.stage, m)
            if _outline(m) != _outline(alike):
                raise InvalidValueError(UNLIKE)
        names = [site for stage in self._stages for site in first[stage].sites]
        twice = len(set(names)) < len(names)
        self._first, self._n = first, len(members)
        self._names = {
            (stage, site): within(f"stages.{stage}", site) if twice else site
            for stage in self._stages
            for site in first[stage].sites
        }
        # Only one other process of each stage is examined, because there may be thousands.
        self._leads = {stage: next(n for n, m in enumerate(self.all) if m.stage == stage) for stage in self._stages}
        self._spans = {
            (n, site): (self._span(m, site, "max_logit", 0), self._span(m, site, "key_norm", 1))
            for n in {*self._leads.values(), *(n for n, _ in self._own)}
            for m in [self.all[n]]
            for site in m.sites
        }
        if any(any(split) for m in self.all for split in m.split.values()):
            self.extent = dataclasses.replace(self.extent, even=False)  # the parts' counts are not compared
        self._counted = {(n, site): self._counts(n, site) for n, _ in self._own for site in self.all[n].sites}
        self._starts: tuple[list[int], list[int]] = [0], [0]  # first query head and key head of each layer, and the end
        for stage, site in self._names:
            for starts, span in zip(self._starts, self._spans[self._leads[stage], site]):
                starts.append(starts[-1] + span[2])
        self._layer = {of: i for i, of in enumerate(self._names)}
        self._rows: dict[tuple[str, ...], tuple[_Rows, _Rows]] = {}
        self._alike = len(self._stages) > 1 or not self._complete
        self._slots, self._sources = self._slot_table()

    @property
    def sites(self) -> list[str]:
        """Returns the names of all sites, in the order of the model."""
        return [*self._names.values()]

    def about(self) -> dict[str, object]:
        """Returns the description of the whole model: the sites and the size of each stage."""
        sites, size = [], 0
        for stage in self._stages:
            m = self._first[stage]
            size += sum(m.about["parameters"].values())  # type: ignore[attr-defined]
            known = {site["name"]: site for site in m.about["sites"]}  # type: ignore[attr-defined]
            for site in m.sites:
                heads, keys = self._spans[self._leads[stage], site]
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
        """Returns the statistics of this process alone, under the names of the whole model and with an entry for each
        of its heads."""
        return {
            self._names[self.all[n].stage, site]: placed(s, *self._spans[n, site])
            for n, part in self._own
            for site, s in part.only(stats).items()
        }

    def widen(self) -> None:
        """Exchanges everything from now on; called on every process after the same step."""
        if self.extent != Extent():
            self.extent = Extent()
            self._slots, self._sources = self._slot_table()

    # Which process contributes which numbers.

    def _counts(self, n: int, site: str) -> tuple[bool, bool]:
        """Returns whether the statistics of a process's queries at a site are used, and whether those of its keys are.

        If several processes compute the same statistics, those of the first process are used. If several processes have
        the same keys, the statistics of the process whose queries saw most of them in the first step are used.
        """
        m = self.all[n]
        peers = [(i, x) for i, x in enumerate(self.all) if x.stage == m.stage]

        def queries(x: RankInfo) -> object:
            return x.layout.data, x.layout.context, x.split[site][0] and x.layout.head_part

        def keys(x: RankInfo) -> object:
            return x.layout.data, x.split[site][1] and x.layout.head_part

        first = next(i for i, x in peers if queries(x) == queries(m))
        most = max(((x.keys_seen, -i) for i, x in peers if keys(x) == keys(m)))
        return first == n, -most[1] == n

    def _slot_table(self) -> tuple[dict[NumberKey, _Slot], dict[NumberKey, list[_Source]]]:
        """Returns the slot of every number, which is the same on all processes, and where this process's numbers are
        stored."""
        leads = [(n, self.all[n]) for n in self._leads.values()]
        # For each number of the whole model, the last stage that knows it.
        last = {name: m.stage for _, m in leads for site, name, _, _ in m.form if not site}
        ends = [_FLAGS, 0, 1]
        for vector, rows, names in self._groups():
            ends[vector] += rows * len(names)
        slots: dict[NumberKey, _Slot] = {}
        for n, m in leads:
            for site, name, shape, form in m.form:
                of_class, how, of = "\t" in name, form, ""
                if (form == ALIKE and not self._alike) or not (form or of_class or name == "entropy_error"):
                    continue
                if not form:
                    how = _CLASS_MERGES[name.partition("\t")[0]].how if of_class else "mean"
                elif form != ALIKE:
                    how, of, _ = form.split()
                span, key = self._split_span(n, site, name, shape, form), self._key(m.stage, (site, name))
                whole = shape if span is None else (span[2], *shape[1:])
                if key not in slots:
                    vector = 0 if how in ("max", ALIKE) else 2 if how == "sum" or not shape else 1
                    slots[key] = _Slot(how, whole, ends[vector], vector, not form and of_class, of == "weights")
                    ends[vector] += math.prod(whole) * (2 if slots[key].weighted else 1)
        self._ends = ends
        mine: dict[NumberKey, list[_Source]] = {}
        holds = {n: self._holds_shard(n) for n, _ in self._own}
        for site, name, shape, form in self.own_form:
            for n, part in self._own:
                own = part.own(site)
                slot = None if own is None else slots.get(self._key(self.all[n].stage, (own, name)))
                if own is None or slot is None or (not own and self.all[n].stage != last[name]):
                    continue
                counts = form or self._counted[n, own][of_key_heads(name)]
                if counts and (holds[n] or not slot.of_weights):
                    mine.setdefault((site, name), []).append(_Source(slot, self._split_span(n, own, name, shape, form)))
        return slots, mine

    def _split_span(self, n: int, site: str, name: str, shape: tuple[int, ...], form: str) -> HeadSpan | None:
        """Returns the range of a process's heads among all heads if each process has the number for its own heads only,
        else None."""
        if not form:
            return self._spans[n, site][of_key_heads(name)]
        own = site and form.endswith(" own") and shape[:1] == (self._spans[n, site][0][1],)
        return self._spans[n, site][0] if own else None

    def _holds_shard(self, n: int) -> bool:
        """Returns whether a process is the first of the processes that hold the same part of the weights."""
        own = self.all[n].layout
        same = (i for i, m in enumerate(self.all) if (m.layout.stage, m.layout.shard) == (own.stage, own.shard))
        return n == next(same)

    def _groups(self) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """Yields the groups of statistics fields that are stored together: the index of the vector, the number of rows,
        the fields."""
        for vector, hows in enumerate((("max", "min"), ("mean", "root"), ("sum",))):
            for keys in (False, True):
                rows = len(self._layer) if vector == 2 and self.extent.even else self._starts[keys][-1]
                yield vector, rows, self.extent.named(*hows, keys=keys)

    def _places(self, blocks: Sequence[ScoreBlock], device: torch.device) -> tuple[_Rows, _Rows]:
        """Returns the positions of the query heads and of the key heads of this process's sites among all heads."""
        names = tuple(name for block in blocks for name in block.names)
        if names not in self._rows:
            found: tuple[list[list[int]], list[list[int]]] = ([[], [], [], [], []], [[], [], [], [], []])
            for name in names:
                n, site = next((n, own) for n, part in self._own if (own := part.own(name)) is not None)
                layer = self._layer[self.all[n].stage, site]
                for keys, (rows, places, layers, first, of) in enumerate(found):
                    begin, count, _ = self._spans[n, site][keys]
                    row = len(layers)
                    if self._counted[n, site][keys]:
                        rows += range(row, row + count)
                        places += range(self._starts[keys][layer] + begin, self._starts[keys][layer] + begin + count)
                        first.append(row)
                        of.append(layer)
                    layers += [row] * count
            queries, of_keys = (
                _Rows(*(torch.tensor(x, dtype=torch.long, device=device) for x in side)) for side in found
            )
            self._rows[names] = queries, of_keys
        return self._rows[names]

    def pack(
        self, measured: Measurement | None, monitor: Mapping[str, float], *, stopped: bool = False
    ) -> list[Tensor]:
        """Returns this process's vectors: one to be reduced to maxima, and two to be reduced to sums.

        measured: the measurement, or None if this process has no numbers in this step. monitor: the statistics on its
        own monitor, keyed by the names in records.MONITOR_FIELDS, or {} if they are unknown. stopped: whether the
        process has stopped measuring.
        """
        device = dist.collective_device()
        single = torch.float64 if self.extent.double else torch.float32
        dtypes = single, single, torch.float64
        if widest(device) is torch.float32:
            dtypes = torch.float32, torch.float32, torch.float32
        neutral = -torch.inf, 0.0, 0.0
        vectors = [torch.full((n,), x, dtype=t, device=device) for n, x, t in zip(self._ends, neutral, dtypes)]
        largest, sums, exact = vectors
        largest[_STOPPED] = float(stopped)
        if monitor:
            own = torch.tensor([[-monitor[name], monitor[name]] for name in MONITOR_FIELDS], dtype=largest.dtype)
            own = own.pin_memory() if device.type == "cuda" else own  # so that the copy does not block
            largest[_OWN:_FLAGS].copy_(own.flatten(), non_blocking=True)
        if measured is not None:
            largest[_WELL], exact[0] = 1.0, 1.0
            largest[_UNFIT] = self._pack_statistics(SiteStats.of(measured.stats).blocks, vectors)
            self._pack_numbers(measured, vectors)
        return [largest, torch.cat([sums, exact])] if sums.dtype == exact.dtype else vectors

    def _pack_statistics(self, blocks: Sequence[ScoreBlock], vectors: Sequence[Tensor]) -> Tensor:
        """Writes the fields of the statistics; returns 1 if they exceed the agreed extent, else 0."""
        device = vectors[0].device
        every = [block.joint.tensors() for block in blocks]
        joint = {name: torch.cat([x[name] for x in every]).to(device) for name in TENSORS}
        places = self._places(blocks, device)
        ends = [_FLAGS, 0, 1]
        for vector, n_rows, names in self._groups():
            if not names:
                continue
            of, to = places[of_key_heads(names[0])], vectors[vector]
            columns = torch.cat([_column(name, joint, to.dtype) for name in names], 1)
            by_layer = vector == 2 and self.extent.even
            rows, at = (of.first, of.layers) if by_layer else (of.rows, of.places)
            size = n_rows * columns.shape[1]
            to[ends[vector] :][:size].view(n_rows, -1).index_copy_(0, at, columns[rows])
            ends[vector] += size
        return self._unfit(joint, places).to(vectors[0].dtype)

    def _unfit(self, joint: Mapping[str, Tensor], places: tuple[_Rows, _Rows]) -> Tensor:
        extent = self.extent
        narrow = not extent.double and joint["max_logit"].dtype == torch.float64
        found = [torch.tensor(narrow, device=joint["max_logit"].device)]
        found += [(joint[name] != MERGES[name].neutral).any() for name in TENSORS if name not in extent.fields]
        if extent.even:
            for name in extent.named("sum", keys=False) + extent.named("sum", keys=True):
                found.append((joint[name] != joint[name][places[of_key_heads(name)].layer]).any())
        return torch.stack(found).any()

    def _pack_numbers(self, measured: Measurement, vectors: Sequence[Tensor]) -> None:
        """Writes the statistics by token class, and the numbers that are not statistics of attention."""
        for site, stats in measured.stats.items():
            if stats.entropy_error is not None:
                error = PartialValue(value=stats.entropy_error, weight=stats.n_queries)
                self._pack_number((site, "entropy_error"), error, vectors)
            if (classes := stats.classes) is not None:
                values = classes.tensors()
                for name, rule in _CLASS_MERGES.items():
                    x = values[name]
                    count = values[rule.count] if rule.count else None
                    if count is not None:
                        count = count if count.ndim == x.ndim else count[..., None]
                        x = torch.where(count > 0, x * count, 0.0)
                    self._pack_number((site, "\t".join((name, *classes.names))), x, vectors)
        for key, x in measured.numbers.items():
            self._pack_number(key, x, vectors)

    def _pack_number(self, key: NumberKey, x: Tensor | PartialValue, vectors: Sequence[Tensor]) -> None:
        for source in self._sources.get(key, ()):
            slot, span = source.slot, source.span
            to = vectors[slot.vector]
            value, weight = (x.value, x.weight) if isinstance(x, PartialValue) else (x, None)
            value = on_device(to.device, to.dtype, value.detach()).to(to.dtype)
            parts = [value]
            if weight is not None:
                weight = on_device(to.device, to.dtype, weight).to(to.dtype)
                power = value if slot.how == "mean" else value.square()
                if slot.how != "max":
                    parts = [torch.where(weight > 0, power if slot.how == "root" else weight * power, 0.0), weight]
                else:
                    parts = [value.masked_fill(~(weight > 0), -torch.inf)]
            if slot.vector == 0:
                parts = [_ordered(parts[0])]
            at = slot.first
            for part in parts:
                width = len(part) // span[1] if span else 1
                here = to[at : at + slot.size][span[0] * width :][: len(part)] if span else to[at : at + slot.size]
                here.copy_(torch.maximum(here, part) if slot.vector == 0 else here + part)
                at += slot.size

    def unpack(self, vectors: Sequence[Tensor]) -> Measurement:
        """Returns the measurement of the whole model, read from the reduced vectors on the host."""
        largest, sums, *exact = (x.double() for x in vectors)
        if not exact:  # float64 throughout
            sums, exact = sums[: self._ends[1]], [sums[self._ends[1] :]]
        reduced = [largest, sums, exact[0]]
        if largest[_WELL] != 1:
            return Measurement(stats={}, numbers={})
        if largest[_UNFIT] == 1:
            self.widen()
            caution(
                "the attention statistics of this step need more space than those of the first measured step, for "
                "example because heads of one layer begin to see different keys. This step is not recorded; later "
                "steps are"
            )
            return Measurement(stats={}, numbers={})
        numbers, by_class = self._unpack_numbers(reduced)
        own = [x if i % 2 else 0.0 - x for i, x in enumerate(largest[_OWN:_FLAGS].tolist())]
        monitor = {name: x for name, x in zip(MONITOR_EXTREMES, own) if math.isfinite(x)}
        return Measurement(stats=self._unpack_statistics(reduced, numbers, by_class), numbers=numbers, monitor=monitor)

    def _unpack_statistics(
        self, vectors: Sequence[Tensor], numbers: dict[NumberKey, Tensor], by_class: Mapping[str, ClassStats]
    ) -> Stats:
        n = [starts[-1] for starts in self._starts]
        sizes = [torch.tensor(starts).diff() for starts in self._starts]
        found = {
            name: torch.full((n[of_key_heads(name)],), rule.neutral, dtype=torch.float64)
            for name, rule in MERGES.items()
        }
        ends = [_FLAGS, 0, 1]
        for vector, rows, names in self._groups():
            part = vectors[vector][ends[vector] :][: rows * len(names)].view(rows, len(names))
            ends[vector] += part.numel()
            if vector == 2 and self.extent.even and names:
                part = part.repeat_interleave(sizes[of_key_heads(names[0])], 0)
            for name, x in zip(names, part.unbind(1)):
                found[name].copy_(x)
        fields: dict[str, Tensor] = {}
        for name, rule in MERGES.items():
            x = found[name]
            if name in self.extent.fields:
                if rule.how in ("max", "min"):
                    x = _plain(x) if rule.how == "max" else -_plain(x)
                elif rule.how == "root":
                    x = x.sqrt()
                elif rule.how == "mean":
                    x = x / found[rule.count].clamp_min(1)
            fields[name] = x.to(torch.int64) if rule.how == "sum" else x
        parts = {name: x.split(sizes[of_key_heads(name)].tolist()) for name, x in fields.items()}
        stats = {}
        for i, site in enumerate(self.sites):
            error = numbers.pop((site, "entropy_error"), None)
            own = {name: x[i] for name, x in parts.items()}
            stats[site] = LogitStats(**own, classes=by_class.get(site), entropy_error=error)  # type: ignore[arg-type]
        return stats

    def _unpack_numbers(self, vectors: Sequence[Tensor]) -> tuple[dict[NumberKey, Tensor], dict[str, ClassStats]]:
        all_well = float(vectors[2][0]) == self._n
        numbers: dict[NumberKey, Tensor] = {}
        classes: dict[str, dict[str, Tensor]] = {}
        for (site, name), slot in self._slots.items():
            parts = vectors[slot.vector][slot.first :].split(slot.size)
            x = parts[0].view(slot.shape)
            if slot.vector == 0:
                x = _plain(x)
            if slot.of_class:
                classes.setdefault(site, {})[name] = x.to(torch.int64) if slot.how == "sum" else x
                continue
            if slot.weighted:
                weight = parts[1].view(slot.shape)
                x = x if slot.how == "root" else x / weight
                x = (x if slot.how == "mean" else x.sqrt()).masked_fill(weight == 0, torch.nan)
            else:
                x = x.masked_fill(x == -torch.inf, torch.nan)
            # A process without numbers has not contributed its part of the weights.
            numbers[site, name] = x if all_well or not slot.of_weights else torch.full_like(x, torch.nan)
        return numbers, {site: _of_classes(found) for site, found in classes.items()}

    def alike(self, measured: Measurement | None) -> dict[NumberKey, Tensor]:
        """Returns the numbers that every process knows without an exchange, keyed by their names in the whole model."""
        if measured is None or self._alike:
            return {}
        stage = self._stages[0]
        return {self._key(stage, key): x for key, x in measured.numbers.items() if isinstance(x, Tensor)}

    def _key(self, stage: int, key: NumberKey) -> NumberKey:
        return key if key[1] in WHOLE_MODEL else (self._names.get((stage, key[0]), key[0]), key[1])

    def _span(self, m: RankInfo, site: str, name: str, which: int) -> HeadSpan:
        """Returns the range of a process's heads among all heads of a site."""
        n = m.heads(site, name)
        if not m.split[site][which]:
            return 0, n, n
        parts = {other.layout.head_part: other.heads(site, name) for other in self.all if other.stage == m.stage}
        at = m.layout.head_part
        return sum(parts[i] for i in range(at)), n, sum(parts.values())


def _column(name: str, joint: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a field in the form in which it is reduced, [heads 1]: maxima, means times their counts, squares, or
    counts."""
    rule = MERGES[name]
    x = joint[name].detach().to(dtype)[:, None]
    if rule.how in ("max", "min"):
        return _ordered(x if rule.how == "max" else -x)
    if rule.how == "root":
        return x.square()
    if rule.how == "mean":
        count = joint[rule.count].to(dtype)[:, None]
        return torch.where(count > 0, x * count, 0.0)
    return x


def _ordered(x: Tensor) -> Tensor:
    """Maps NaN to the largest value, because reductions to maxima are not guaranteed to propagate NaN."""
    return x.nan_to_num(torch.inf, torch.finfo(x.dtype).max, -torch.inf)


def _plain(x: Tensor) -> Tensor:
    """Undoes `_ordered` for either dtype that may have been reduced."""
    infinite = (x == torch.finfo(torch.float32).max) | (x == torch.finfo(torch.float64).max)
    return torch.where(x == torch.inf, torch.nan, torch.where(infinite, torch.inf, x))


def _of_classes(found: Mapping[str, Tensor]) -> ClassStats:
    """Returns the statistics of one site by token class, computed from sums."""
    names = next(iter(found)).split("\t")[1:]
    values = {name.partition("\t")[0]: x for name, x in found.items()}
    for name, rule in _CLASS_MERGES.items():
        if rule.count:
            count = values[rule.count]
            values[name] = values[name] / (count if count.ndim == values[name].ndim else count[..., None]).clamp_min(1)
    return ClassStats(names=tuple(names), **values)


def _outline(m: RankInfo) -> object:
    """Returns what must be equal for all processes of a stage."""
    if any(heads for heads, _ in m.split.values()):
        return [(site, name, how) for site, name, _, how in m.form]
    return m.form


HeadSpan = tuple[int, int, int]  # the first head, the number of heads, and the total number of heads


def placed(stats: LogitStats, heads: HeadSpan, keys: HeadSpan) -> LogitStats:
    """Returns the statistics with an entry for every head of the whole model, with neutral values for the heads of
    other processes."""
    if heads[1] == heads[2] and keys[1] == keys[2]:
        return stats

    def put(name: str, value: Tensor, neutral: float) -> Tensor:
        first, n, total = keys if of_key_heads(name) else heads
        out = value.new_full((total, *value.shape[1:]), neutral)
        out[first : first + n] = value
        return out

    neutral = {name: rule.neutral for name, rule in MERGES.items()} | {"entropy_error": 0.0}
    fields = {name: put(name, value, neutral[name]) for name, value in stats.tensors().items()}
    classes = stats.classes
    if classes is not None:
        parts = {n: put(n, x, -torch.inf if n == "max_logit" else 0.0) for n, x in classes.tensors().items()}
        classes = ClassStats(names=classes.names, **parts)
    return LogitStats(**fields, classes=classes)  # type: ignore[arg-type]


# How a process introduces itself to the others.


@final
class Handshake:
    """Creates a process's RankInfo from its model; the role of the process is read from the weights unless a layout was
    given.

    Attributes:
        stages: the pipeline stage of each model, as seen in its first pass, keyed by the name of the model ("" if there
            is only one).
    """

    def __init__(self, model: nn.Module, sites: Callable[[], Sequence[AttentionSite]], layout: Layout | None) -> None:
        """sites: returns the sites once they are known."""
        self.stages: dict[str, int | None] = {}
        self._model, self._sites, self._layout = model, sites, layout

    def __call__(self, measured: Measurement | None) -> RankInfo:
        """Raises: RefusedError if the weights are split in an unrecognised way, or if some but not all of several
        models are pipeline stages."""
        sites, form = self._sites(), () if measured is None else measured.form()
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
        seen = {} if measured is None else measured.stats
        return RankInfo(
            layout=layout,
            keys_seen=sum(int(s.n_keys.sum()) for s in on_host(seen).values()),
            form=form,
            split=split,
            about=about,
            stages=stages,
            extent=Extent.of(seen) if seen else None,
        )

    def _known_stages(self) -> dict[str, int]:
        """The pipeline stages of several models; {} if they are not stages, or if there is only one model."""
        models = [name for name, _ in self._model.named_children()] if "" not in self.stages else []
        known = {name: stage for name in models if (stage := self.stages.get(name)) is not None}
        if known and len(known) < len(models):
            raise RefusedError(
                f"expected either all models or none to be stages of a pipeline, got stages {known} among "
                f"{', '.join(models)}: watch the other models separately"
            )
        return known

    def _split(self, module: nn.Module, site: AttentionSite | None) -> tuple[bool, bool]:
        """Returns whether the query heads of a site, and its key heads, are split across processes."""
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
    """Returns the module of a site, or its nearest parent module that has weights."""
    path = site.partition("#")[0].split(".") if site else []
    while path:
        module = model.get_submodule(".".join(path))
        if next(module.parameters(), None) is not None:
            return module
        path.pop()
    return model


# The processes of a run that measure jointly: what they exchange in a measured step without ever waiting forever.

_NO_NUMBERS, _OFF = "nothing", "off"
_GONE = "the monitor of another process of this run has switched itself off"


@final
class ProcessGroup:
    """The group of processes in a run that measure jointly, as seen from one of them.

    Before any collective operation, the processes make sure that all of them watch, and before the first exchange, they
    introduce themselves, because a reduction never ends if vectors have different sizes or a process is missing. Later,
    a process that stops reports this in the exchange in which the others wait.
    """

    def __init__(self, introduced: Handshake, apart: Callable[[], str], exchange: dist.StepExchange) -> None:
        """introduced: how this process introduces itself. apart: returns the reason why it must measure alone, or "" if
        it does not have to. exchange: the exchange at the end of a step."""
        self._introduced, self._apart, self._step_exchange = introduced, apart, exchange
        self.exchanges = 0  # the number of exchanges begun
        self.records_alone = False  # each process records only what it sees, as it does without an optimizer
        self.stopped = False  # this process has stopped measuring, and the others may not know it yet
        self.over = False  # all processes know that measuring has ended
        self.unseen: QkeelError | None = None  # why this process has no attention; other processes may have some
        self._alone = False
        self._name = ""
        self._watching = False  # it is known that all processes watch
        self._late = False  # another process was late to the current step
        self._passes = self._rounds = 0
        self.members: Members | None = None
        self._under_way: Transfer | None = None  # the last exchange
        self.here()

    def here(self) -> None:
        """Announces to the other processes, as soon as there are any, that this process watches the model."""
        if not self._name and dist.world() > 1:
            self._name = f"monitor {dist.ordinal('monitor')}"
            post_message(f"{self._name} watches", "yes")

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
        """Begins the first measured pass of a model in a step, before anything that all processes must do together.

        Args:
            model: the name of the model.
            gathers: True if a pass of the model needs all processes, because its weights are split.

        Returns:
            Whether the pass is measured. No pass of a step is measured if another process was late to the step.

        Raises:
            InvalidValueError: the monitor of another process has already switched itself off.
        """
        self._introduced.stages[model] = running_stage()
        if self._late:
            return False
        if gathers:
            late = not self._all_come()
            self._late = late and not self.records_alone
            return not late
        return True

    def about(self) -> dict[str, object]:
        """Returns the description of the whole model, or {} if it is not known to be split across processes."""
        return {} if self.members is None else self.members.about()

    def stay_alone(self, why: str) -> None:
        """Measures only this process's part from now on."""
        self._alone = True
        caution(f"{why}: only what this process sees is recorded")

    def all_watch(self) -> bool:
        """Returns whether all processes watch the model; waits for them once, at most 8 seconds."""
        if dist.world() == 1:
            return False
        if self._unmet():
            self._wait_for_all("watches", PATIENCE)
        return self.several

    def _unmet(self) -> bool:
        """Returns whether other processes may take part but have not all announced that they watch."""
        self.here()
        if self.several and self._apart():
            self.stay_alone(self._apart())
        return self.several and not self._watching

    def _all_come(self) -> bool:
        """Returns False if a process is 8 seconds late to the first pass that needs all of them.

        The model itself waits for that process. A process that has not announced itself by the next pass is not
        watching.
        """
        if not self._unmet():
            return True
        if not self._passes:
            self._passes = 1
            self._wait_for_all("pass 0", PATIENCE, again=True)
            return self._watching
        self._wait_for_all("pass 1", PATIENCE if all_posted(f"{self._name} pass 0") else 0.01)
        return True

    def _wait_for_all(self, at: str, patience: float, *, again: bool = False) -> None:
        """Waits for a message from every process; if one is missing, this process measures alone from then on, unless
        it is to try again."""
        words = try_gather_messages(f"{self._name} {at}", "yes", patience)
        if words is not None and _OFF in words:
            self.over = True
            raise InvalidValueError(_GONE)
        self._watching = words is not None
        if words is None and again:
            caution(
                f"another process of this run has not reached the first measured pass within {patience:g} seconds: "
                "this step is not measured; the next one will be if that process watches the model too"
            )
        elif words is None:
            self.stay_alone("not every process of this run watches the model")

    def send(self, measured: Measurement | None, monitor: Mapping[str, float], *, alone: bool) -> Transfer | None:
        """Starts the exchange of a step.

        Args:
            measured: the numbers of this process; None if it has none.
            monitor: the statistics on its own monitor, keyed by the names in records.MONITOR_FIELDS.
            alone: only this process records the step.

        Returns:
            The transfer of the numbers, or None if no process has any.

        Raises:
            InvalidValueError: the measurements of the processes cannot be merged.
        """
        if self._late and not alone:
            self._late = False
            return None
        if not alone and self.all_watch() and self.members is None:
            self._meet(measured)
        members = self.members
        if alone or members is None or not self.several:
            return None if measured is None else Transfer.alone(measured)
        if measured is not None and measured.form() != members.own_form:
            self.leave(known=False)
            raise InvalidValueError(
                "this process no longer measures what it measured at first (perhaps some layers run only in some "
                "steps), so the numbers of the processes of this run can't be merged"
            )
        return self._exchange(measured, members, monitor)

    def placed(self, stats: Stats) -> Stats:
        """Returns the statistics of this process alone, keyed by the whole model's names and heads once these are
        known."""
        return stats if self.members is None else self.members.placed(stats)

    def leave(self, *, known: bool) -> None:
        """Reports to the others that this process has switched itself off; they do the same.

        Args:
            known: True if another process has already reported this, so that no process waits.
        """
        self.over = True
        if known or not dist.world() > 1 or not self._name:
            return
        if self.members is None:
            for at in (self._round(), f"{self._name} pass {self._passes}"):
                post_message(at, _OFF)
        else:
            self._exchange(None, self.members, {}, stopped=True)

    def _exchange(
        self, measured: Measurement | None, members: Members, monitor: Mapping[str, float], *, stopped: bool = False
    ) -> Transfer:
        device = dist.collective_device()
        if self._under_way is not None and float(self._under_way.vectors[0][_UNFIT]) == 1:
            members.widen()  # as every other process has already done
        largest, *sums = members.pack(measured, monitor, stopped=stopped)
        self.exchanges += 1  # from here on, the other processes do not wait for another exchange of this step
        reduced = self._step_exchange.reduce(self._name, largest, sums)
        own = members.alike(measured)
        known = [on_device(device, widest(device), x.detach()).to(widest(device)) for x in own.values()]

        def read(vectors: list[Tensor]) -> Arrived:
            found = members.unpack(vectors[: len(reduced)])
            if found.stats and own:
                parts = vectors[-1].split([x.numel() for x in own.values()])
                alike = {key: x.view(like.shape) for (key, like), x in zip(own.items(), parts)}
                found = dataclasses.replace(found, numbers={**alike, **found.numbers})
            return Arrived.of(found)

        vectors = [*reduced, *([torch.cat(known)] if known else [])]
        self._under_way = Transfer(vectors, read, lambda v: float(v[0][_STOPPED]) == 1)
        return self._under_way

    def _meet(self, measured: Measurement | None) -> None:
        place, text = self._introduced(measured).words()
        print_of = str(zlib.crc32(text.encode()))
        publish(f"{self._name} {print_of}", text)
        nothing, count = _NO_NUMBERS if measured is None else "", self._step_exchange.count
        words = try_gather_messages(self._round(), f"{nothing}|{count}|{print_of}|{place}", None)
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
        self._step_exchange.agree(self._name, {count for _, count, *_ in said})

    def _round(self) -> str:
        return f"{self._name} round {self._rounds}"
