"""The processes of a run that watch one model: how they introduce themselves, and their exchange in a measured step."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import final

import numpy as np
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.distributed.agree import (
    PATIENCE,
    OwnGroup,
    absent,
    announce,
    time_limit,
    withdraw,
)
from qkeel.distributed.layout import (
    Layout,
    fingerprint,
    groups_of_models,
    head_axes,
    peer_ranks,
)
from qkeel.distributed.reduce import Member, SharedTable
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.monitor.gather import (
    StepRecord,
    Transfer,
    flatten,
    on_host,
    vector_of,
)
from qkeel.monitor.numbers import Numbers, Stats
from qkeel.monitor.record import site_facts
from qkeel.patching.modes import process_store, running_stage
from qkeel.records import MONITOR_EXTREMES, MONITOR_FIELDS
from qkeel.sites.site import AttentionSite, HeadSlice

# How a process introduces itself.


@final
class Handshake:
    """Describes a process by its model; the role of the process is read from the weights unless a layout is passed.

    Attributes:
        stages: the pipeline stage of each model, as seen in its first pass, keyed by the name of the model ("" if there
            is only one).
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Callable[[], Sequence[AttentionSite]],
        layout: Layout | None,
    ) -> None:
        """sites: returns the sites once they are known."""
        self.stages: dict[str, int | None] = {}
        self._model, self._sites, self._layout = model, sites, layout

    def __call__(self, stats: Stats, numbers: Numbers) -> Member:
        """Returns the description of this process, which has measured this.

        Raises: RefusedError if the weights are split in an unrecognised way, or if some but not all of several models
            are pipeline stages.
        """
        sites = {site.name: site for site in self._sites()}
        modules = {name: _with_weights(self._model, name) for name in stats}
        if self._layout is not None:
            layout, stages = self._layout, {}
            splits = dict.fromkeys(
                stats, (layout.head_parts > 1, layout.head_parts > 1)
            )
        else:
            layout = Layout.of_model(self._model, modules.values(), self.stages.get(""))
            stages = self._known_stages()
            splits = {
                name: self._split(module, sites.get(name))
                for name, module in modules.items()
            }
        parameters = {}
        for name in stages or ("",):
            parameters[name] = sum(
                p.numel() for p in self._model.get_submodule(name).parameters()
            )
        return Member(
            layout=layout,
            keys_seen=sum(
                int(of_site.n_keys.sum()) for of_site in on_host(stats).values()
            ),
            form=flatten(stats, numbers)[0].form if stats else (),
            splits=splits,
            sites={
                str(facts["name"]): facts for facts in site_facts(list(sites.values()))
            },
            parameters=parameters,
            stages=stages,
        )

    def evidence(self, *, has_numbers: bool) -> tuple[tuple[int, ...], str]:
        """Returns what shows which processes run this model: their ranks, and a checksum of the weights."""
        if self._layout is not None or any(
            stage is not None for stage in self.stages.values()
        ):
            return tuple(range(dist.world())), ""
        peers = peer_ranks(self._model)
        if len(peers) > 1 or not has_numbers:
            return peers, ""
        names = [name for name, _ in self._model.named_parameters()]
        # Replicas are equal in all of them, other models hardly in any.
        some = names[:: max(1, len(names) // 8)]
        return peers, fingerprint(self._model, some)

    def _known_stages(self) -> dict[str, int]:
        """The pipeline stages of several models; {} if they are not stages, or if there is only one model."""
        models = (
            [name for name, _ in self._model.named_children()]
            if "" not in self.stages
            else []
        )
        stages = {}
        for name in models:
            stage = self.stages.get(name)
            if stage is not None:
                stages[name] = stage
        if stages and len(stages) < len(models):
            raise RefusedError(
                f"expected either all models or none to be stages of a pipeline, got stages {stages} among "
                f"{', '.join(models)}: watch the other models separately"
            )
        return stages

    def _split(
        self, module: nn.Module, site: AttentionSite | None
    ) -> tuple[bool, bool]:
        """Returns whether the query heads of a site, and its key heads, are split across processes."""
        if not head_axes(self._model, module.parameters()):
            return False, False
        if site is None or not site.terms:
            return True, True
        queries = self._any_split(term.query for term in site.terms)
        return queries, self._any_split(term.key for term in site.terms)

    def _any_split(self, chains: Iterable[Sequence[HeadSlice]]) -> bool:
        weights = [
            self._model.get_parameter(chain[-1].parameter)
            for chain in chains
            if chain[-1].n > 1
        ]
        return bool(head_axes(self._model, weights))


def _with_weights(model: nn.Module, site: str) -> nn.Module:
    """Returns the module of a site, or its nearest parent module that has weights."""
    path = site.partition("#")[0].split(".") if site else []
    while path:
        module = model.get_submodule(".".join(path))
        if any(True for _ in module.parameters()):
            return module
        path.pop()
    return model


# The exchange.

_GONE = "the monitor of another process of this run has switched itself off, or was closed there"
_APART = (
    "the processes of this run train several models, so each model is recorded for itself: this one by {}. If they "
    "are parts of one model, pass their places: qkeel.watch(..., layout=Layout.of_mesh(mesh, ...)), with Layout from "
    "qkeel.monitor"
)


@final
class ProcessGroup:
    """The processes of a run that watch one model together, as seen from one of them.

    They have a gloo group of their own, which is made at the end of the first measured step, once all of them have
    begun to watch. A process that stops leaves the group, and so does one that ends: the next exchange is an error on
    the others, whose monitors then switch themselves off. The groups of the training are not used.
    """

    def __init__(self, introduced: Handshake, apart: Callable[[], str]) -> None:
        """introduced: how this process introduces itself. apart: returns the reason why it must measure alone, or "" if
        it does not have to."""
        self._introduced, self._apart = introduced, apart
        # Each process records only what it sees, as it does without an optimizer.
        self.records_alone = False
        # This process has stopped measuring.
        self.stopped = False
        self.unseen: QkeelError | None = (
            None  # why this process has no attention; other processes may have some
        )
        # Whether this process warns and writes for all that run its model.
        self.leads = dist.rank() == 0
        self._alone = False
        self._name = ""
        # It is known that all processes watch.
        self._watching = False
        self._group: OwnGroup | None = None
        self.members: SharedTable | None = None
        self.here()

    def here(self) -> None:
        """Announces to the other processes, as soon as there are any, that this process watches the model."""
        if not self._name and dist.world() > 1:
            number = process_store().add(f"qkeel/monitors/{dist.rank()}", 1)
            self._name = f"monitor {number}"
            announce(f"{self._name} watches")

    @property
    def several(self) -> bool:
        """Returns whether other processes take part."""
        return not self._alone and not self.stopped and dist.world() > 1

    @property
    def records_jointly(self) -> bool:
        """Returns whether the records cover several processes."""
        return self.several and not self.records_alone

    def begin(self, model: str, *, gathers: bool) -> None:
        """Begins the first measured pass of a model, before anything that all processes must do together.

        Args:
            model: the name of the model.
            gathers: True if the pass needs all processes, because the model's weights are split.

        Raises: InvalidValueError if another process has stopped measuring.
        """
        # Only while a schedule runs does torch know which stage a module is.
        self._introduced.stages[model] = running_stage()
        if (
            gathers
            and self.all_watch()
            and absent(f"{self._name} begins", time_limit(), "the monitor")
        ):
            raise InvalidValueError(_GONE)

    def about(self) -> dict[str, object]:
        """Returns the description of the whole model, or {} if it is not known to be split across processes."""
        return {} if self.members is None else self.members.about()

    def stay_alone(self, reason: str) -> None:
        """Measures only this process's part from now on."""
        self._alone = True
        self._group = None
        caution(f"{reason}: only what this process sees is recorded")

    def all_watch(self) -> bool:
        """Returns whether all processes watch the model; waits for them once, at most 8 seconds."""
        if dist.world() == 1:
            return False
        self.here()
        if self.several and self._apart():
            self.stay_alone(self._apart())
        if self.several and not self._watching:
            missing = absent(f"{self._name} watches", PATIENCE)
            self._watching = not missing
            if missing:
                self.stay_alone("not every process of this run watches the model")
        return self.several

    def send(
        self,
        stats: Stats,
        numbers: Numbers,
        monitor: Mapping[str, float],
        *,
        alone: bool,
    ) -> Transfer | None:
        """Starts the exchange of a step.

        Args:
            stats, numbers: what this process has measured; without statistics, nothing.
            monitor: the statistics on its own monitor, keyed by the names in records.MONITOR_FIELDS.
            alone: only this process records the step.

        Returns:
            The transfer of the numbers, or None if no process has any.

        Raises:
            InvalidValueError: the measurements of the processes cannot be merged, or another process has stopped.
        """
        if not alone and self.all_watch() and self.members is None:
            self._meet(stats, numbers)
        members, group = self.members, self._group
        if alone or members is None or group is None or not self.several:
            return Transfer.alone(stats, numbers) if stats else None
        vector = None
        if stats:
            table, tensors = flatten(stats, numbers)
            # The places in the shared vector were agreed on in the first measured step.
            if table is not members.own_table and table.form != members.own_table.form:
                raise InvalidValueError(
                    "this process no longer measures what it measured at first (perhaps some layers run only in some "
                    "steps), so the numbers of the processes of this run can't be merged"
                )
            vector = vector_of(tensors)
        # A smallest value travels as the largest of its negatives, so one reduction serves both.
        extremes: list[float] = []
        for name in MONITOR_FIELDS:
            value = monitor.get(name, -np.inf)
            extremes += [-value if name in monitor else value, value]

        def exchange(vectors: list[Tensor]) -> None:
            try:
                group.reduce_(vectors[0], "max")
                group.reduce_(vectors[1], "sum")
            except RuntimeError as error:
                raise InvalidValueError(_GONE) from error

        def read(vectors: list[np.ndarray]) -> StepRecord | None:
            merged = members.join(vectors[0], vectors[1], len(extremes))
            if merged is None:
                return None
            of_all = {}
            for name, value in zip(
                MONITOR_EXTREMES, vectors[0][: len(extremes)].tolist()
            ):
                if np.isfinite(value):
                    of_all[name] = 0.0 - value if name.endswith("_min") else value
            return StepRecord(members.table, merged, of_all)

        return Transfer(members.split(vector, extremes), read, exchange)

    def leave(self) -> None:
        """Leaves the group: the other processes learn it in their next exchange."""
        self.stopped = True
        if self._group is not None:
            self._group.close()
        elif self._name and not self._alone:
            # The store may have ended with the process that hosts it.
            with suppress(RuntimeError):
                for point in ("begins", "meets"):
                    withdraw(f"{self._name} {point}")

    def _meet(self, stats: Stats, numbers: Numbers) -> None:
        if self._group is None:
            if absent(f"{self._name} meets", time_limit(), "the monitor"):
                raise InvalidValueError(_GONE)
            self._group = OwnGroup(self._name)
        try:
            infos = self._introduce(self._group, self._introduced(stats, numbers))
        except RuntimeError as error:
            raise InvalidValueError(_GONE) from error
        if not any(info.form for info in infos):
            if self.unseen is not None:
                raise self.unseen
            return
        ranks = self._of_this_model(self._group, infos)
        self.leads = dist.rank() == ranks[0]
        if len(ranks) == 1:
            self._alone = True
        else:
            self.members = SharedTable(
                [infos[other] for other in ranks], ranks.index(dist.rank())
            )
        if len(ranks) < len(infos):
            caution(_APART.format(f"{len(ranks)} of {len(infos)} processes"))
            self._group.close()
            self._group = (
                OwnGroup(f"{self._name} of a model", ranks) if len(ranks) > 1 else None
            )

    def _introduce(self, group: OwnGroup, own: Member) -> list[Member]:
        """Returns what all processes say of themselves. A description that several share is sent by the first only."""
        # Replicas describe themselves alike, and a description of many layers is long.
        shared = dataclasses.replace(own, layout=Layout(), keys_seen=0)
        checksum = zlib.crc32(repr(shared).encode())
        infos = group.gather((checksum, own.layout, own.keys_seen), "the monitor")
        checksums = [key for key, _, _ in infos]
        sends = checksums.index(checksum) == dist.rank()
        descriptions = group.gather(shared if sends else None)
        members = []
        for key, layout, keys_seen in infos:
            description = descriptions[checksums.index(key)]
            assert description is not None
            members.append(
                dataclasses.replace(description, layout=layout, keys_seen=keys_seen)
            )
        return members

    def _of_this_model(self, group: OwnGroup, infos: Sequence[Member]) -> list[int]:
        """Returns the ranks of the processes that run the same model as this one."""
        # One process group may train several models, as in a search over settings.
        has_numbers = bool(infos[dist.rank()].form)
        evidence = self._introduced.evidence(has_numbers=has_numbers)
        everyones = group.gather(evidence)
        with_numbers = [rank for rank, info in enumerate(infos) if info.form]
        peers = []
        for rank, (ranks, _) in enumerate(everyones):
            # Nothing shows where it belongs.
            if ranks == (rank,) and not infos[rank].form:
                ranks = (rank, with_numbers[0])
            peers.append(ranks)
        groups = groups_of_models(peers, [checksum for _, checksum in everyones])
        return [
            rank for rank, first in enumerate(groups) if first == groups[dist.rank()]
        ]
