"""The numbers of a step as one vector, how two such vectors are merged, and how those of all processes become one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from qkeel.distributed.layout import Layout
from qkeel.errors import InvalidValueError
from qkeel.functional.norms import widest

Rule = Literal["max", "min", "sum", "mean", "root", "root_mean"]
Axis = Literal["", "query", "key"]
_AXES: tuple[Axis, ...] = ("query", "key")


class Entry(NamedTuple):
    """One tensor in the vector of a step, and how the tensors of several data sets are merged.

    The rules: max, min and sum; mean: Σ weight · value / Σ weight; root_mean: √(Σ weight · value² / Σ weight); root:
    √Σ value². Data with weight 0 contribute nothing.

    Args:
        site: the attention site, or "" for the whole model.
        name: the name of the number; names of statistics by token class continue with the names of the classes.
        shape: the shape of the tensor.
        rule: how it is merged.
        weight: the name of the entry of the same site that has the weights, or "".
        axis: "query" or "key" if the first dimension has only the query or key heads that this process computes.
        by_weights: True if each process knows the number for its part of the weights, rather than for its data.
        blank: the value where there are no data, or None for NaN.
    """

    site: str
    name: str
    shape: tuple[int, ...]
    rule: Rule
    weight: str = ""
    axis: Axis = ""
    by_weights: bool = False
    # Not NaN, because forms are compared.
    blank: float | None = None

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


Form = tuple[Entry, ...]
# The site, "" for the whole model, and the name of the number.
EntryKey = tuple[str, str]
# Numbers that do not belong to a site.
WHOLE_MODEL = (
    "lr",
    "train_loss",
    "final_hidden_norm",
)


@final
class StepTable:
    """Where each number of a step lies in a vector [n], and how such vectors are merged.

    A vector is merged through two others [n]: `largest`, whose maxima over all data are taken, and `sums`, which are
    added up. Each number is in one of them.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.entries = {(entry.site, entry.name): entry for entry in form}
        self.firsts: dict[EntryKey, int] = {}
        self.size = 0
        for entry in form:
            self.firsts[entry.site, entry.name] = self.size
            self.size += entry.size
        # Of extremes: 1 for maxima and -1 for minima, which are negative maxima.
        self._signs = np.zeros(self.size)
        # The value behind the last one is 1.
        self._weight_of = np.full(self.size, self.size)
        self._blanks = np.full(self.size, np.nan)
        self._squared = np.zeros(self.size, dtype=bool)
        self._divided = np.zeros(self.size, dtype=bool)
        for entry in form:
            indices = self.indices(entry)
            if entry.weight:
                of_weights = self.indices(self.entries[entry.site, entry.weight])
                # Weights may lack the last dimensions.
                missing = len(entry.shape) - of_weights.ndim
                self._weight_of[indices] = of_weights.reshape(
                    of_weights.shape + (1,) * missing
                )
            if entry.blank is not None:
                self._blanks[indices] = entry.blank
            self._signs[indices] = {"max": 1.0, "min": -1.0}.get(entry.rule, 0.0)
            self._squared[indices] = entry.rule in ("root", "root_mean")
            self._divided[indices] = entry.rule in ("mean", "root_mean")
        self._on_device: dict[torch.device, list[Tensor]] = {}

    def indices(self, entry: Entry) -> np.ndarray:
        """Returns the index of each value of an entry, in its shape."""
        first = self.firsts[entry.site, entry.name]
        return np.arange(first, first + entry.size).reshape(entry.shape)

    def read(self, vector: np.ndarray, entry: Entry) -> Tensor:
        """Returns the tensor of an entry in float64, or in int64 for counts."""
        first = self.firsts[entry.site, entry.name]
        values = torch.from_numpy(vector[first : first + entry.size]).view(entry.shape)
        return (
            values.to(torch.int64)
            if entry.rule == "sum" and entry.name.startswith("n_")
            else values
        )

    def blank(self, vector: np.ndarray) -> np.ndarray:
        """Returns a vector of one data set with NaN in place of numbers that are NaN without data and have weight 0."""
        weights = np.append(vector, 1.0)[self._weight_of]
        return np.where((weights > 0) | ~np.isnan(self._blanks), vector, np.nan)

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `largest` and `sums` of a vector, on its device."""
        device = vector.device
        if device not in self._on_device:
            signs = torch.from_numpy(self._signs).to(device, vector.dtype)
            arrays = (self._weight_of, self._squared, self._divided)
            self._on_device[device] = [
                signs,
                *(torch.from_numpy(array).to(device) for array in arrays),
            ]
        signs, weight_of, squared, divided = self._on_device[device]
        weights = torch.cat([vector, vector.new_ones(1)])[weight_of]
        has_data = weights > 0
        # No reduction to maxima is guaranteed to keep NaN: it is sent as infinity, and infinity as the largest number.
        tops = (vector * signs).nan_to_num(
            torch.inf, torch.finfo(vector.dtype).max, -torch.inf
        )
        # Roots and means do not add up; squares and weighted sums do.
        powers = torch.where(squared, vector.square(), vector)
        shares = torch.where(divided, weights * powers, powers)
        is_extreme = signs != 0
        return torch.where(is_extreme & has_data, tops, -torch.inf), torch.where(
            ~is_extreme & has_data, shares, 0.0
        )

    def join(self, largest: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Returns the vector of the merged data, from the maxima and the sums over all data."""
        weights = np.append(sums, 1.0)[self._weight_of]
        # The numbers may have been split in float32, on a device that has no float64.
        is_infinite = (largest == np.finfo(np.float32).max) | (
            largest == np.finfo(np.float64).max
        )
        tops = np.where(
            largest == np.inf, np.nan, np.where(is_infinite, np.inf, largest)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.where(self._divided, sums / weights, sums)
            means = np.where(self._squared, np.sqrt(means), means)
            is_extreme = self._signs != 0
            merged = np.where(is_extreme, self._signs * tops, means)
        has_data = np.where(is_extreme, largest != -np.inf, weights > 0)
        return np.where(has_data, merged, self._blanks)

    def merge(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the vector of the merged data of several steps."""
        if len(vectors) == 1:
            return vectors[0]
        halves = [self.split(torch.from_numpy(vector)) for vector in vectors]
        largest = torch.stack([half[0] for half in halves]).amax(0)
        sums = torch.stack([half[1] for half in halves]).sum(0)
        return self.join(largest.numpy(), sums.numpy())


step_table = functools.lru_cache(maxsize=64)(StepTable)


# The processes of one model, which reduce their vectors to one.

UNLIKE = (
    "the processes of this run do not see the same attention, so nothing can be merged. Pipeline stages that torch "
    "did not create, and other splits that are not visible in the weights, must be passed: qkeel.watch(..., "
    "layout=Layout.of_mesh(mesh, layers=...)), with Layout from qkeel.monitor"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a model, as it introduces itself to the others.

    Args:
        layout: the role of the process.
        keys_seen: the number of keys that its queries saw in the first measured step.
        form: the form of its vector; () if it had no numbers when the processes were introduced.
        splits: for each site, whether its query heads and its key heads are split across processes.
        sites: what is known of each site, for the description of the model.
        parameters: the number of weights of each model.
        stages: if there are several models, the pipeline stage of each, keyed by the name with which the names of its
            sites begin.
    """

    layout: Layout
    keys_seen: int = 0
    form: Form = ()
    splits: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    sites: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def position(self) -> tuple[int, ...]:
        """All pipeline stages of the process."""
        return tuple(sorted(self.stages.values())) or (self.layout.stage or 0,)

    def parts(self) -> list[_Part]:
        """Returns each of the process's stages; the numbers of the whole model belong to the last one."""
        by_stage = {stage: name for name, stage in self.stages.items()}
        by_stage = by_stage or {self.layout.stage or 0: ""}
        parts = []
        for stage in sorted(by_stage):
            part = _Part(self, stage, by_stage[stage])
            for entry in self.form:
                site = entry.site.removeprefix(part.model)
                if entry.site and part.model:
                    # The rest of another model's name may begin like this one's.
                    is_inside = site != entry.site and site[:1] in ("", ".", "#")
                else:
                    is_inside = stage == max(by_stage)
                if is_inside:
                    part.entries[site.removeprefix("."), entry.name] = entry
            parts.append(part)
        return parts


# The first head, the number of heads, and the total number of heads.
HeadSpan = tuple[int, int, int]


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One pipeline stage on one process.

    Args:
        member: the process.
        stage: the number of the stage.
        model: the name with which the names of its sites begin; "" if there is only one model.
        entries: by the name of the site inside the stage's model, and the name of the number.
    """

    member: Member
    stage: int
    model: str
    entries: dict[EntryKey, Entry] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The role of the process."""
        return self.member.layout

    @property
    def sites(self) -> list[str]:
        """The names of the attention sites inside the stage's model."""
        return [site for site, name in self.entries if name == "max_logit"]

    def splits(self, site: str, axis: Axis) -> bool:
        """Whether the query or key heads of a site are split across processes."""
        entry = self.entries.get((site, "max_logit"))
        splits = self.member.splits.get("" if entry is None else entry.site)
        return splits is not None and splits[axis == "key"]

    def heads(self, site: str, axis: Axis) -> int:
        """Returns the number of query or key heads of a site that the process computes."""
        return self.entries[site, "key_norm" if axis == "key" else "max_logit"].shape[0]

    def outline(self) -> list[object]:
        """Returns what must be equal for all processes of a stage."""
        some_split = any(queries for queries, _ in self.member.splits.values())
        return [
            (key, entry.rule, () if some_split else entry.shape)
            for key, entry in self.entries.items()
        ]


@final
class SharedTable:
    """The table of the whole model's sites × heads, and where the numbers of this process belong in it.

    Layers of pipeline stages keep their own names if all of these differ, and are otherwise named "stages.1.NAME". A
    process that had no numbers when the processes were introduced is assumed to be like the others of its stage.
    """

    def __init__(self, members: Sequence[Member], index: int) -> None:
        """Takes all processes of the model, and the index of this one.

        Raises: InvalidValueError if they are not the processes of one model.
        """
        models = {
            member.position: member for member in reversed(members) if member.form
        }
        complete = []
        for member in members:
            if not member.form:
                member = dataclasses.replace(
                    models.get(member.position, member),
                    layout=member.layout,
                    keys_seen=member.keys_seen,
                )
            complete.append(member)
        self.own_table = step_table(complete[index].form)
        self._n_processes = len(complete)
        parts = [member.parts() for member in complete]
        self._own, self._parts = parts[index], [part for own in parts for part in own]
        # A stage without attention has no entries on any process.
        with_entries = sorted(self._parts, key=lambda part: not part.entries)
        leads = {part.stage: part for part in reversed(with_entries)}
        self._leads = {stage: leads[stage] for stage in sorted(leads)}
        for part in self._parts:
            if part.outline() != self._leads[part.stage].outline():
                raise InvalidValueError(UNLIKE)
        names = [site for lead in self._leads.values() for site in lead.sites]
        self._repeats = len(set(names)) < len(names)
        self.table = step_table(self._whole_form())
        self._indices = self._contributions()
        self._on_device: dict[torch.device, list[Tensor]] = {}

    def _whole_key(self, stage: int, site: str, name: str) -> EntryKey:
        """Returns the site and name in the whole model of a number of a stage."""
        has_site = bool(site) or (site, "max_logit") in self._leads[stage].entries
        if not self._repeats or name in WHOLE_MODEL or not has_site:
            return site, name
        dot = "." if site and site[0] != "#" else ""
        return f"stages.{stage}{dot}{site}", name

    def _span(self, part: _Part, site: str, axis: Axis) -> HeadSpan:
        """Returns the range of a process's heads among all heads of a site."""
        n = part.heads(site, axis)
        if not part.splits(site, axis):
            return 0, n, n
        sizes = {
            other.layout.head_part: other.heads(site, axis)
            for other in self._parts
            if other.stage == part.stage
        }
        return (
            sum(sizes[i] for i in range(part.layout.head_part)),
            n,
            sum(sizes.values()),
        )

    def _whole_form(self) -> Form:
        """Returns the form of the whole model's vector. Numbers without a site are those of the last stage."""
        entries: dict[EntryKey, Entry] = {}
        for stage, lead in self._leads.items():
            sites = set(lead.sites)
            for (site, name), entry in lead.entries.items():
                key, shape = self._whole_key(stage, site, name), entry.shape
                if entry.axis and site in sites:
                    shape = (self._span(lead, site, entry.axis)[2], *shape[1:])
                entries[key] = entry._replace(site=key[0], shape=shape)
        return tuple(entries.values())

    def _contributions(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the values that this process contributes, in its vector and in the whole model's."""
        last_stage = {}
        for stage, lead in self._leads.items():
            last_stage |= {name: stage for site, name in lead.entries if not site}
        sources, targets = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)]
        for part in self._own:
            shards = [
                other
                for other in self._parts
                if (other.stage, other.layout.shard) == (part.stage, part.layout.shard)
            ]
            spans: dict[tuple[str, Axis], tuple[bool, int]] = {}
            for site in part.sites:
                for axis in _AXES:
                    counts = self._counts(part, site, axis)
                    spans[site, axis] = counts, self._span(part, site, axis)[0]
            for (site, name), entry in part.entries.items():
                counts, first_head = (
                    spans[site, entry.axis] if entry.axis else (True, 0)
                )
                if entry.by_weights:
                    counts = counts and shards[0] is part
                if not site:
                    counts = counts and part.stage == last_stage[name]
                if counts:
                    first = self.table.firsts[self._whole_key(part.stage, site, name)]
                    first += first_head * math.prod(entry.shape[1:])
                    sources.append(self.own_table.indices(entry).ravel())
                    targets.append(np.arange(first, first + entry.size))
        return np.concatenate(sources), np.concatenate(targets)

    def _counts(self, part: _Part, site: str, axis: Axis) -> bool:
        """Whether the statistics of a process's queries, or of its keys, are used.

        Where several processes have the same, those of the process whose queries saw most keys in the first step are
        used.
        """

        def role(other: _Part) -> object:
            head_part = other.layout.head_part if other.splits(site, axis) else 0
            # Processes with different queries may have the same keys.
            context = 0 if axis == "key" else other.layout.context
            return other.stage, other.layout.data, context, head_part

        peers = [other for other in self._parts if role(other) == role(part)]
        return max(peers, key=lambda other: other.member.keys_seen) is part

    def split(
        self, vector: Tensor | None, extremes: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Returns the two vectors of this process, one to be reduced to maxima and one to sums.

        Args:
            vector: this process's numbers, or None if it has none in this step.
            extremes: further numbers whose maxima over all processes are taken; -inf for unknown ones.
        """
        device = torch.device("cpu") if vector is None else vector.device
        further = torch.tensor(extremes, dtype=widest(device))
        if device.type == "cuda":
            # So that the copy does not block.
            further = further.pin_memory()
        like = {"dtype": further.dtype, "device": device}
        n, size = len(extremes), self.table.size
        largest = torch.full((n + size,), -torch.inf, **like)
        sums = torch.zeros(1 + size, **like)
        largest[:n].copy_(further, non_blocking=True)
        if vector is not None:
            if device not in self._on_device:
                self._on_device[device] = [
                    torch.from_numpy(indices).to(device) for indices in self._indices
                ]
            source, target = self._on_device[device]
            own_largest, own_sums = self.own_table.split(vector)
            largest[n:].index_copy_(0, target, own_largest[source])
            sums[1:].index_copy_(0, target, own_sums[source])
            sums[:1].fill_(1.0)
        return largest, sums

    def join(
        self, largest: np.ndarray, sums: np.ndarray, n_extremes: int
    ) -> np.ndarray | None:
        """Returns the whole model's vector, or None if no process has numbers.

        Numbers of split weights are NaN if a process has not contributed its part.
        """
        if not sums[0]:
            return None
        vector = self.table.join(largest[n_extremes:], sums[1:])
        if sums[0] < self._n_processes:
            for entry in self.table.form:
                if entry.by_weights:
                    vector[self.table.indices(entry)] = np.nan
        return vector

    def about(self) -> dict[str, object]:
        """Returns the description of the whole model: the sites and the number of weights of all stages."""
        sites, parameters = [], 0
        for stage, lead in self._leads.items():
            models = [lead.model] if lead.model else list(lead.member.parameters)
            parameters += sum(lead.member.parameters[model] for model in models)
            for site in lead.sites:
                facts = {"head_dim": 0, "weights": "unknown"}
                facts |= lead.member.sites.get(lead.entries[site, "max_logit"].site, {})
                facts["name"] = self._whole_key(stage, site, "max_logit")[0]
                facts["n_heads"] = self._span(lead, site, "query")[2]
                facts["n_kv_heads"] = self._span(lead, site, "key")[2]
                sites.append(facts)
        return {"sites": sites, "parameters": parameters}

    def placements(self) -> dict[str, tuple[str, HeadSpan, HeadSpan]]:
        """Returns, by the names of this process's sites, the name in the whole model and the ranges of heads."""
        places = {}
        for part in self._own:
            for site in part.sites:
                name = self._whole_key(part.stage, site, "max_logit")[0]
                spans = [self._span(part, site, axis) for axis in _AXES]
                places[part.entries[site, "max_logit"].site] = (name, *spans)
        return places
