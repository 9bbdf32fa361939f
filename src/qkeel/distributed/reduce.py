"""The numbers of a step as one vector, how two such vectors are merged, and how those of all processes become one.

`monitor.processes` exchanges the vectors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, final

import numpy as np

from qkeel.distributed.layout import Layout
from qkeel.errors import InvalidValueError

MergeRule = Literal["max", "min", "sum", "mean", "root", "root_mean"]
Axis = Literal["", "query", "key"]
_AXES: tuple[Axis, ...] = ("query", "key")


class Column(NamedTuple):
    """A number of several sites in the vector of a step, and how the numbers of several data sets are merged.

    The rules: max, min and sum; mean: Σ weight · value / Σ weight; root_mean: √(Σ weight · value² / Σ weight); root:
    √Σ value². Data with weight 0 contribute nothing.

    Args:
        sites: the attention sites, one row each; ("",) for the whole model.
        name: the name of the number.
        shape: the shape of one row.
        rule: how it is merged.
        weight: the name of the column of the same sites that has the weights, or "".
        axis: "query" or "key" if the first dimension has only the query or key heads that this process computes.
        by_weights: True if each process knows the number for its part of the weights, rather than for its data.
        blank: the value where there are no data, or None for NaN.
        classes: the names of the token classes by which the last dimensions are split.
    """

    sites: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    rule: MergeRule
    weight: str = ""
    axis: Axis = ""
    by_weights: bool = False
    # Not NaN, because forms are compared.
    blank: float | None = None
    classes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.sites) * math.prod(self.shape)


Form = tuple[Column, ...]
# Numbers that do not belong to a site.
WHOLE_MODEL = ("lr", "train_loss")
# Stands for infinity where infinity stands for NaN.
_MOST = np.finfo(np.float64).max


@final
class StepTable:
    """Where each number of a step lies in a vector [n], and how such vectors are merged.

    A vector is merged through two others [n]: `largest`, whose maxima over all data are taken, and `sums`, which are
    added up. Each number is in one of them.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        sizes = np.array([column.size for column in form], np.intp)
        self.size = int(sizes.sum())
        keys = [(column.sites, column.name) for column in form]
        self._firsts = dict(zip(keys, (np.cumsum(sizes) - sizes).tolist()))
        rules = [column.rule for column in form]
        # Of extremes: 1 for maxima and -1 for minima, which are negative maxima.
        signs = [{"max": 1.0, "min": -1.0}.get(rule, 0.0) for rule in rules]
        self._signs = np.repeat(signs, sizes)
        blanks = [np.nan if x.blank is None else x.blank for x in form]
        self._blanks = np.repeat(blanks, sizes)
        self._squared = np.repeat([x in ("root", "root_mean") for x in rules], sizes)
        self._divided = np.repeat([x in ("mean", "root_mean") for x in rules], sizes)
        # The value behind the last one is 1.
        self._weight_of = np.full(self.size, self.size)
        columns = dict(zip(keys, form))
        for column in form:
            if column.weight:
                indices = self.indices(column)
                of_weights = self.indices(columns[column.sites, column.weight])
                # Weights may lack the last dimensions.
                missing = (1,) * (indices.ndim - of_weights.ndim)
                self._weight_of[indices] = of_weights.reshape(
                    of_weights.shape + missing
                )

    def indices(self, column: Column) -> np.ndarray:
        """Returns the index of each value of a column [sites, *shape]."""
        first = self._firsts[column.sites, column.name]
        shape = len(column.sites), *column.shape
        return np.arange(first, first + column.size).reshape(shape)

    def known(self, vector: np.ndarray) -> np.ndarray:
        """Returns the vector with NaN where there were no data, and one more NaN behind it."""
        known = np.full(self.size + 1, np.nan)
        known[:-1] = vector
        weights = known.copy()
        weights[-1] = 1.0
        known[:-1][~(weights[self._weight_of] > 0)] = np.nan
        return known

    def split(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns `largest` and `sums` of a vector."""
        weights = np.append(vector, 1.0)[self._weight_of]
        has_data = weights > 0
        is_extreme = self._signs != 0
        with np.errstate(invalid="ignore", over="ignore"):
            # No reduction to maxima is guaranteed to keep NaN: it is sent as infinity, and infinity as the largest
            # number.
            tops = np.nan_to_num(
                vector * self._signs, nan=np.inf, posinf=_MOST, neginf=-np.inf
            )
            # Roots and means do not add up; squares and weighted sums do.
            powers = np.where(self._squared, np.square(vector), vector)
            shares = np.where(self._divided, weights * powers, powers)
        largest = np.where(is_extreme & has_data, tops, -np.inf)
        return largest, np.where(~is_extreme & has_data, shares, 0.0)

    def join(self, largest: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Returns the vector of the merged data, from the maxima and the sums over all data."""
        weights = np.append(sums, 1.0)[self._weight_of]
        tops = np.where(largest == _MOST, np.inf, largest)
        tops = np.where(largest == np.inf, np.nan, tops)
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
        largest, sums = zip(*map(self.split, vectors))
        return self.join(np.max(largest, axis=0), np.sum(sums, axis=0))


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
        peers: the ranks that wrappers and meshes name as those of the model.
        fingerprint: a checksum of its weights, if that alone shows which processes run it, or "".
    """

    layout: Layout
    keys_seen: int = 0
    form: Form = ()
    splits: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    sites: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    peers: tuple[int, ...] = ()
    fingerprint: str = ""

    @property
    def models(self) -> dict[int, str]:
        """The name of the model at each pipeline stage of the process, in order."""
        by_stage = {stage: name for name, stage in self.stages.items()}
        return dict(sorted(by_stage.items())) or {self.layout.stage or 0: ""}


@final
class _Part:
    """One pipeline stage on one process.

    Attributes:
        cells: by the name of the site inside the stage's model and the name of the number: its column, and its row in
            this. The numbers of the whole model belong to the last stage of a process.
    """

    def __init__(self, member: Member, stage: int, model: str) -> None:
        self.member, self.layout, self.stage, self.model = (
            member,
            member.layout,
            stage,
            model,
        )
        self.cells: dict[tuple[str, str], tuple[Column, int]] = {}
        for column in member.form:
            for row, name in enumerate(column.sites):
                site = name.removeprefix(model)
                if name and model:
                    # The rest of another model's name may begin like this one's.
                    is_inside = site != name and site[:1] in ("", ".", "#")
                else:
                    is_inside = stage == max(member.models)
                if is_inside:
                    self.cells[site.removeprefix("."), column.name] = column, row
        self.sites = [site for site, name in self.cells if name == "max_logit"]

    def name_of(self, site: str) -> str:
        """Returns the name of a site in the vector of the process."""
        column, row = self.cells[site, "max_logit"]
        return column.sites[row]

    def splits(self, site: str, axis: Axis) -> bool:
        """Whether the query or key heads of a site are split across processes."""
        return self.member.splits.get(self.name_of(site), (False, False))[axis == "key"]

    def n_heads(self, site: str, axis: Axis) -> int:
        """Returns the number of query or key heads of a site that the process computes."""
        name = "key_norm" if axis == "key" else "max_logit"
        return self.cells[site, name][0].shape[0]

    def outline(self) -> list[object]:
        """Returns what must be equal for all processes of a stage."""
        some_split = any(queries for queries, _ in self.member.splits.values())
        return [
            (key, column.rule, () if some_split else column.shape)
            for key, (column, _) in self.cells.items()
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
        alike = {tuple(x.models): x for x in reversed(members) if x.form}
        complete = []
        for member in members:
            if not member.form and tuple(member.models) in alike:
                member = dataclasses.replace(
                    alike[tuple(member.models)],
                    layout=member.layout,
                    keys_seen=member.keys_seen,
                )
            complete.append(member)
        self.own_table = step_table(complete[index].form)
        self._n_processes = len(complete)
        parts = [[_Part(x, *model) for model in x.models.items()] for x in complete]
        self._own, self._parts = parts[index], [*itertools.chain(*parts)]
        # A stage without attention has no numbers on any process.
        with_numbers = sorted(self._parts, key=lambda part: not part.cells)
        leads = {part.stage: part for part in reversed(with_numbers)}
        self._leads = {stage: leads[stage] for stage in sorted(leads)}
        if any(x.outline() != leads[x.stage].outline() for x in self._parts):
            raise InvalidValueError(UNLIKE)
        names = [site for lead in self._leads.values() for site in lead.sites]
        self._repeats = len(set(names)) < len(names)
        # Numbers without a site are those of the last stage.
        columns: dict[tuple[str, str], Column] = {}
        for lead in self._leads.values():
            for (site, name), (column, _) in lead.cells.items():
                shape, whole_name = column.shape, self._name(lead, site, name)
                if column.axis and site in lead.sites:
                    shape = self._span(lead, site, column.axis)[1], *shape[1:]
                columns[whole_name, name] = column._replace(
                    sites=(whole_name,), shape=shape
                )
        self.table = step_table(tuple(columns.values()))
        self._indices = self._contributions(columns)

    def _name(self, part: _Part, site: str, name: str) -> str:
        """Returns the name in the whole model of the site of a number."""
        is_of_model = not site and "" not in part.sites
        if not self._repeats or name in WHOLE_MODEL or is_of_model:
            return site
        return f"stages.{part.stage}{'.' if site and site[0] != '#' else ''}{site}"

    def _span(self, part: _Part, site: str, axis: Axis) -> tuple[int, int]:
        """Returns the first of a process's heads among all heads of a site, and the number of all."""
        if not part.splits(site, axis):
            return 0, part.n_heads(site, axis)
        sizes = {
            other.layout.head_part: other.n_heads(site, axis)
            for other in self._parts
            if other.stage == part.stage
        }
        before = [sizes[i] for i in range(part.layout.head_part)]
        return sum(before), sum(sizes.values())

    def _contributions(
        self, columns: Mapping[tuple[str, str], Column]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the values that this process contributes, in its vector and in the whole model's."""
        last_stage = {}
        for stage, lead in self._leads.items():
            last_stage |= {name: stage for site, name in lead.cells if not site}
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
                    first_head, _ = self._span(part, site, axis)
                    spans[site, axis] = self._counts(part, site, axis), first_head
            for (site, name), (column, row) in part.cells.items():
                counts, first_head = True, 0
                if column.axis:
                    counts, first_head = spans[site, column.axis]
                if column.by_weights:
                    counts = counts and shards[0] is part
                if not site:
                    counts = counts and part.stage == last_stage[name]
                if counts:
                    source = self.own_table.indices(column)[row]
                    in_whole = columns[self._name(part, site, name), name]
                    target = self.table.indices(in_whole)[0]
                    if column.axis:
                        target = target[first_head : first_head + len(source)]
                    sources.append(source.ravel())
                    targets.append(target.ravel())
        return np.concatenate(sources), np.concatenate(targets)

    def _counts(self, part: _Part, site: str, axis: Axis) -> bool:
        """Whether the statistics of a process's queries, or of its keys, are used.

        Where several processes have the same, those of the process whose queries saw most keys in the first step are
        used.
        """

        def role(of: _Part) -> object:
            head_part = of.layout.head_part if of.splits(site, axis) else 0
            # Processes with different queries may have the same keys.
            context = 0 if axis == "key" else of.layout.context
            return of.layout.data, context, head_part

        of_stage = [peer for peer in self._parts if peer.stage == part.stage]
        peers = [peer for peer in of_stage if role(peer) == role(part)]
        return max(peers, key=lambda peer: peer.member.keys_seen) is part

    def split(self, vector: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the two vectors of this process, one to be reduced to maxima and one to sums.

        vector: this process's numbers, or None if it has none in this step.
        """
        largest = np.full(self.table.size, -np.inf)
        # The first sum counts the processes that have numbers.
        sums = np.zeros(1 + self.table.size)
        if vector is not None:
            source, target = self._indices
            own_largest, own_sums = self.own_table.split(vector)
            largest[target] = own_largest[source]
            sums[1 + target] = own_sums[source]
            sums[0] = 1.0
        return largest, sums

    def join(self, largest: np.ndarray, sums: np.ndarray) -> np.ndarray | None:
        """Returns the whole model's vector, or None if no process has numbers.

        Numbers of split weights are NaN if a process has not contributed its part.
        """
        if not sums[0]:
            return None
        vector = self.table.join(largest, sums[1:])
        if sums[0] < self._n_processes:
            for column in self.table.form:
                if column.by_weights:
                    vector[self.table.indices(column)] = np.nan
        return vector

    def about(self) -> dict[str, object]:
        """Returns the description of the whole model: the sites and the number of weights of all stages."""
        sites, parameters = [], 0
        for lead in self._leads.values():
            models = [lead.model] if lead.model else list(lead.member.parameters)
            parameters += sum(lead.member.parameters[model] for model in models)
            for site in lead.sites:
                facts = {"head_dim": 0, "weights": "unknown"}
                facts |= lead.member.sites.get(lead.name_of(site), {})
                facts["name"] = self._name(lead, site, "max_logit")
                facts["n_heads"] = self._span(lead, site, "query")[1]
                facts["n_kv_heads"] = self._span(lead, site, "key")[1]
                sites.append(facts)
        return {"sites": sites, "parameters": parameters}
