"""The processes of a run that watch one model: how they introduce themselves, and their exchange in a measured step.

`distributed.reduce` merges the numbers that they exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import numpy as np
import torch
from torch import nn

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
from qkeel.monitor.numbers import Numbers, StatsBySite
from qkeel.monitor.sample import site_facts
from qkeel.monitor.step_vector import StepVector, flatten, vector_of
from qkeel.patching.sharded_models import process_store, running_stage
from qkeel.sites.site import AttentionSite

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

    Attributes:
        stages: the pipeline stage of each model, as seen in its first pass, keyed by the name of the model ("" if there
            is only one).
        records_alone: each process records only what it sees, as it does without an optimizer.
        stopped: this process has stopped measuring.
        unseen: why this process has no attention; other processes may have some.
        leads: whether this process warns and writes for all that run its model.
        members: the table of the whole model, if several processes measure it.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Callable[[], Sequence[AttentionSite]],
        layout: Layout | None,
        apart: Callable[[], str],
    ) -> None:
        """sites: returns the sites once they are known. layout: the role of this process; None to read it from the
        weights. apart: returns the reason why it must measure alone, or "" if it does not have to."""
        self._model, self._sites, self._layout = model, sites, layout
        self._apart = apart
        self.stages: dict[str, int | None] = {}
        self.records_alone = self.stopped = False
        self.unseen: QkeelError | None = None
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
            # Every process makes its monitors in the same order, so a monitor has the same number on all of them.
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

    def begin(self, model: str) -> None:
        """Begins the first measured pass of a model."""
        # Only while a schedule runs does torch know which stage a module is.
        self.stages[model] = running_stage()

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
        # torch.distributed may have been initialised after the monitor was made.
        self.here()
        if self.several and (reason := self._apart()):
            self.stay_alone(reason)
        if self.several and not self._watching:
            self._watching = not absent(f"{self._name} watches", PATIENCE)
            if not self._watching:
                self.stay_alone("not every process of this run watches the model")
        return self.several

    def send(
        self,
        stats: StatsBySite,
        numbers: Numbers,
        *,
        alone: bool,
    ) -> StepVector | None:
        """Starts the exchange of a step.

        Args:
            stats, numbers: what this process has measured; without statistics, nothing.
            alone: only this process records the step.

        Returns:
            The numbers on their way, or None if no process has any.

        Raises:
            InvalidValueError: the measurements of the processes cannot be merged, or another process has stopped.
        """
        if not alone and self.all_watch() and self.members is None:
            self._meet(stats, numbers)
        members, group = self.members, self._group
        if alone or members is None or group is None or not self.several:
            return StepVector.alone(stats, numbers) if stats else None
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

        def exchange(
            vector: np.ndarray | None,
        ) -> tuple[np.ndarray | None, float]:
            largest, sums = members.split(vector)
            try:
                group.reduce_(torch.from_numpy(largest), "max")
                group.reduce_(torch.from_numpy(sums), "sum")
            except RuntimeError as error:
                raise InvalidValueError(_GONE) from error
            return members.join(largest, sums), float(sums[0])

        return StepVector(members.table, vector, exchange)

    def leave(self) -> None:
        """Leaves the group: the other processes learn it in their next exchange."""
        self.stopped = True
        if self._group is not None:
            self._group.close()
        elif self._name and not self._alone:
            # The store may have ended with the process that hosts it.
            with suppress(RuntimeError):
                withdraw(f"{self._name} meets")

    def _meet(self, stats: StatsBySite, numbers: Numbers) -> None:
        """Lets all processes introduce themselves, and finds those that run the same model as this one."""
        if self._group is None:
            if absent(f"{self._name} meets", time_limit(), "the monitor"):
                raise InvalidValueError(_GONE)
            self._group = OwnGroup(self._name)
        try:
            infos = self._group.gather(self._introduced(stats, numbers), "the monitor")
        except RuntimeError as error:
            raise InvalidValueError(_GONE) from error
        with_numbers = [rank for rank, info in enumerate(infos) if info.form]
        if not with_numbers:
            if self.unseen is not None:
                raise self.unseen
            return
        # One process group may train several models, as in a search over settings.
        peers = []
        for rank, info in enumerate(infos):
            # Nothing shows where a process without numbers and peers belongs.
            is_lost = info.peers == (rank,) and not info.form
            peers.append((rank, with_numbers[0]) if is_lost else info.peers)
        groups = groups_of_models(peers, [info.fingerprint for info in infos])
        own_group = groups[dist.rank()]
        ranks = [rank for rank, group in enumerate(groups) if group == own_group]
        self.leads = dist.rank() == ranks[0]
        self._alone = len(ranks) == 1
        if not self._alone:
            members = [infos[other] for other in ranks]
            self.members = SharedTable(members, ranks.index(dist.rank()))
        if len(ranks) < len(infos):
            caution(_APART.format(f"{len(ranks)} of {len(infos)} processes"))
            self._group.close()
            name = f"{self._name} of a model"
            self._group = None if self._alone else OwnGroup(name, ranks)

    def _introduced(self, stats: StatsBySite, numbers: Numbers) -> Member:
        """Returns the description of this process, which has measured this.

        Raises: RefusedError if the weights are split in an unrecognised way, or if some but not all of several models
            are pipeline stages.
        """
        model, layout, stages = self._model, self._layout, dict[str, int]()
        sites = {site.name: site for site in self._sites()}
        if layout is None:
            modules = {name: _with_weights(model, name) for name in stats}
            layout = Layout.of_model(model, modules.values(), self.stages.get(""))
            stages = self._known_stages()
            splits = {
                name: self._split(module, sites.get(name))
                for name, module in modules.items()
            }
        else:
            is_split = layout.head_parts > 1
            splits = dict.fromkeys(stats, (is_split, is_split))
        peers, print_of_model = tuple(range(dist.world())), ""
        if self._layout is None and not any(
            x is not None for x in self.stages.values()
        ):
            peers = peer_ranks(model)
            if len(peers) == 1 and stats:
                names = [name for name, _ in model.named_parameters()]
                # Replicas are equal in all of them, other models hardly in any.
                some = names[:: max(1, len(names) // 8)]
                print_of_model = fingerprint(model, some)
        facts = site_facts(list(sites.values()))
        return Member(
            layout=layout,
            keys_seen=sum([int(x.n_keys.sum()) for x in stats.values()]),
            form=flatten(stats, numbers)[0].form if stats else (),
            splits=splits,
            sites={str(of_site["name"]): of_site for of_site in facts},
            parameters={
                name: sum(p.numel() for p in model.get_submodule(name).parameters())
                for name in stages or ("",)
            },
            stages=stages,
            peers=peers,
            fingerprint=print_of_model,
        )

    def _known_stages(self) -> dict[str, int]:
        """The pipeline stages of several models; {} if they are not stages, or if there is only one model."""
        if "" in self.stages:
            return {}
        names = [name for name, _ in self._model.named_children()]
        stages = {x: stage for x, stage in self.stages.items() if stage is not None}
        if stages and len(stages) < len(names):
            raise RefusedError(
                f"expected either all models or none to be stages of a pipeline, got stages {stages} among "
                f"{', '.join(names)}: watch the other models separately"
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
        lasts = [(term.query[-1], term.key[-1]) for term in site.terms]
        queries, keys = (
            [self._model.get_parameter(x.parameter) for x in side if x.n > 1]
            for side in zip(*lasts)
        )
        return bool(head_axes(self._model, queries)), bool(head_axes(self._model, keys))


def _with_weights(model: nn.Module, site: str) -> nn.Module:
    """Returns the module of a site, or its nearest parent module that has weights."""
    path = site.partition("#")[0].split(".") if site else []
    while path:
        module = model.get_submodule(".".join(path))
        if any(True for _ in module.parameters()):
            return module
        path.pop()
    return model
