"""Models and largest logits that several processes share."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.heads.site import AttentionSite
from qkeel.patching.modes import joined, running_stage
from qkeel.patching.optimizers import go_first, in_real_steps, is_last
from qkeel.remedies.base import Target, where
from qkeel.remedies.head_weights import innermost

# Remedies on a model that several processes train: which are refused, and the handle of a change that all made.

WHAT = "qkeel.apply"


def check_wrapper(model: nn.Module) -> None:
    """Raise RefusedError for a model whose parameters FullyShardedDataParallel has flattened: between two passes there
    is nothing, or a part of one vector, behind their names."""
    if any(map(dist.is_flat, dist.wrappers(model))):
        raise RefusedError(
            "this model is wrapped in FullyShardedDataParallel, which flattens its parameters, so the weights of heads "
            "cannot be known. Use torch.distributed.fsdp.fully_shard, or apply the remedy before wrapping"
        )


def check_added(remedy: str, target: Target, before: Mapping[str, Tensor], handle: Handle) -> Handle:
    """Raise RefusedError if a remedy has added parameters whose gradients are not summed over processes.

    A wrapper knows only the parameters that a model had at the time, and tensor parallelism of heads, which may come
    later, leaves each process with the gradient of its own heads. Each pass checks for this until the returned handle
    of the remedy is removed.
    """
    old, model = {id(p) for p in before.values()}, target.model
    several = dist.world() > 1
    added = [n for n, p in model.named_parameters() if n not in before and id(p) not in old] if several else []
    if not added:
        return handle
    wrapper = dist.wrapped_by(model)
    if wrapper:
        more = f" and {len(added) - 1} more" if len(added) > 1 else ""
        raise RefusedError(
            f"{remedy} adds parameters ({added[0]}{more}) to a model that {wrapper} has spread over processes already: "
            "their gradients would not be averaged, and the processes would part. Apply it before the model is wrapped "
            "or split, and make the optimizer after that"
        )

    def look(*_: object) -> None:
        held = [p for site in target.sites for p in site.module.parameters()]
        if not any(map(dist.is_split, held)):
            return
        if dist.head_axes(model, held):
            raise RefusedError(
                f"{remedy} has added parameters ({added[0]}) that all heads share, and tensor parallelism has split "
                "the heads over processes since: each would learn from its own heads only. Use fully_shard or "
                "DistributedDataParallel, or a remedy without parameters"
            )
        hook.remove()

    hook = model.register_forward_pre_hook(look)

    def undo() -> None:
        hook.remove()
        handle.remove()

    return Handle(undo, state=handle.state, load=handle.load)


def check_mates(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Raise ApartError unless processes that run the same layers see the same attention. The stages of a pipeline have
    layers of their own, and nothing to compare."""
    if dist.world() == 1:
        return
    own = ", ".join(f"{where(site)} of {site.n_heads} heads" for site in sites) or "no attention"
    mates = dist.mates(model)
    words = dist.words_of_all(WHAT, f"{' '.join(map(str, mates))}|{own}")
    for other, word in enumerate(words):
        group, _, seen = word.partition("|")
        for mate in map(int, group.split()):
            theirs = words[mate].partition("|")[2]
            if theirs != seen:
                raise dist.ApartError(
                    f"{WHAT}: the processes of one model hold different attention layers. Process {other} has {seen}; "
                    f"process {mate} has {theirs}"
                )


def refuse_late_stage(model: nn.Module, remedy: str) -> Handle:
    """Makes the first optimizer step raise RefusedError if the passes before it show that a model is a stage whose
    PipelineStage was made after the remedy. All stages know it then, so no process waits for another."""
    if dist.world() == 1 or dist.stage_of(model) is not None:
        return Handle(lambda: None)
    late: list[bool] = []

    def look(*_: object) -> None:
        passes.remove()
        late.append(running_stage() is not None)

    def refuse(*_: object) -> None:
        if any(late):
            raise RefusedError(
                f"{remedy} was applied before the PipelineStage of this model was made, and could not know of which "
                "stage the model is: the step was not taken. Make every PipelineStage before qkeel.apply"
            )

    passes, steps = model.register_forward_pre_hook(look), register_optimizer_step_pre_hook(in_real_steps(refuse))
    return compose(map(Handle, (passes.remove, steps.remove)))


def on_all_processes(handle: Handle, name: str, optimizer: Optimizer | None) -> Handle:
    """The handle of a change that all processes have made. If only one of them removes it, each raises an error before
    the next step of the optimizer, which is not taken."""
    if dist.world() == 1 or optimizer is None:
        return handle
    member = dist.Membership(name)
    left: list[bool] = []

    def before(*_: object) -> None:
        if not left and not member.step():
            left.append(True)
            if is_last(hook):  # otherwise it stays, idle
                hook.remove()

    hook = innermost(optimizer).register_step_pre_hook(in_real_steps(before))
    go_first(hook)  # before any other hook waits for the other processes

    def undo() -> None:
        handle.remove()
        member.leave()

    return Handle(undo, state=handle.state, load=handle.load)


# The largest logits of heads over all processes that run their layers.


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, the same on all processes that run them, by one collective per step:
    the gather of a monitor of the same optimizer if that measures the step, else a separate one.

    Replicas of a model see other sequences, and tensor parallel processes other heads of the same layer. Pipeline
    stages run different layers, whatever their names, and each has its own place in what is reduced.
    """

    def __init__(
        self, target: Target, optimizer: Optimizer, maxima: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        """`maxima`: gives those that this process saw since the last step."""
        self._sites, self._maxima, self._gather = target.sites, maxima, dist.StepGather.of(optimizer)
        self._counts = [site.n_heads for site in target.sites]
        self._nothing = torch.full((sum(self._counts),), -torch.inf)
        self._first: dict[str, int] = {}  # of this process's heads of a site, where it has a part of them
        self._before = self._behind = 0  # numbers of other layers around this process's in the row of all
        self._over_all: dist.StepMaxima | None = None
        self._late: Handle | None = None
        self._model = target.model
        self._around: list[nn.Module] | None = None  # the wrappers of the model, once a step has come
        if dist.world() > 1:
            self._place_heads(target)
            self._meet(target)

    @property
    def several(self) -> bool:
        """Returns whether other processes run the same layers."""
        return self._over_all is not None

    def check_step(self) -> None:
        """Raise RefusedError for a step inside torch's Join: a process that has run out of data takes none, and the
        others would wait for its maxima."""
        if self._over_all is None:
            return
        if self._around is None:
            self._around = dist.wrappers(self._model)
        if any(map(joined, self._around)):
            raise RefusedError(
                "qk_clip needs the largest logits of all processes after each step, and inside "
                "torch.distributed.algorithms.Join a process whose data is over takes no steps: the step was not "
                "taken. Give every process as many batches, or use a remedy whose steps need no other process, such "
                "as lalr. torch leaves a model in that mode when the context ends: wrap it again"
            )

    def remove(self) -> None:
        """Ends the reductions: no step needs them any longer."""
        if self._over_all is not None:
            self._gather.maxima.remove(self._over_all)
        if self._late is not None:
            self._late.remove()

    def _meet(self, target: Target) -> None:
        own = {
            "mates": dist.mates(target.model),
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": _fingerprint(target),
            "gather": self._gather.agreed,
        }
        words = [json.loads(word) for word in dist.words_of_all(WHAT, json.dumps(own))]
        groups = _same_layers(words)
        lengths = {group: sum(n for _, n in words[group]["sites"]) for group in sorted(set(groups))}
        mine = groups[dist.rank()]
        self._before = sum(n for group, n in lengths.items() if group < mine)
        self._behind = sum(n for group, n in lengths.items() if group > mine)
        if any(word["weights"] and groups.count(group) > 1 for word, group in zip(words, groups)):
            self._late = refuse_late_stage(target.model, "qk_clip")  # equal stages would be taken for replicas
        if len(set(groups)) < len(groups):
            gathers = {word["gather"] for word in words}
            self._over_all = dist.StepMaxima(self._sent, gathers.pop() if len(gathers) == 1 else "")
            self._gather.maxima.append(self._over_all)

    def row(self, maxima: Mapping[str, Tensor]) -> Tensor:
        """The maxima of all sites, one after the other, on one device; -inf for heads that this process did not see."""
        if not maxima:
            return self._nothing
        device = next(iter(maxima.values())).device
        self._nothing = self._nothing.to(device)
        nothing = self._nothing.split(self._counts)
        return torch.cat([self._placed(site, maxima, none) for site, none in zip(self._sites, nothing)])

    def _placed(self, site: AttentionSite, maxima: Mapping[str, Tensor], nothing: Tensor) -> Tensor:
        top = maxima.get(site.name)
        if top is None:
            return nothing
        if len(top) == site.n_heads:
            return top.to(nothing.device)
        first = self._first[site.name]
        return F.pad(top.to(nothing.device), (first, site.n_heads - first - len(top)), value=-torch.inf)

    def _place_heads(self, target: Target) -> None:
        """Find out which heads of each site tensor parallelism has left to this process. What fully_shard has split it
        gathers for each pass, so a head may be stored in parts."""
        gathered = dist.fully_sharded(target.model)
        for site in target.sites:
            for s in site.terms[0].query[-1:]:
                p = target.parameter(s.parameter)
                part = dist.shard(s.parameter, p, gathered.get(id(p), 0))
                if part is None:
                    continue
                first, last = part.in_pass[s.axis]
                here = ((s.index >= first) & (s.index < last)).all(1)
                some = ((s.index >= first) & (s.index < last)).any(1)
                if not torch.equal(here, some):
                    raise RefusedError(
                        f"qk_clip at {where(site)}: {s.parameter} is split in the middle of a head, so no process sees "
                        "the logits of that head; split it at whole heads"
                    )
                self._first[site.name] = int(here.int().argmax())

    def over_all(self) -> Tensor:
        """The largest of each head over all processes."""
        row = self.row(self._maxima())
        if self._over_all is None:
            return row
        found = self._gather.largest(self._over_all)
        return found[self._before : len(found) - self._behind].to(row)

    def _sent(self) -> Tensor:
        """This process's maxima among those of all layers."""
        row = self.row(self._maxima()).double()
        # No reduction keeps NaN for sure; infinity, which never clips either, is passed on.
        return F.pad(row.masked_fill(row.isnan(), torch.inf), (self._before, self._behind), value=-torch.inf)


def _same_layers(words: Sequence[Mapping[str, object]]) -> list[int]:
    """For each process the first of those that run the same layers: processes of one wrapper or mesh, and others with
    the same attention and weights."""
    group = list(range(len(words)))
    for i, word in enumerate(words):
        own = (word["sites"], word["weights"])
        alike = [j for j, other in enumerate(words) if word["weights"] and own == (other["sites"], other["weights"])]
        for mate in (*word["mates"], *alike):  # type: ignore[misc]
            old, new = sorted((group[i], group[mate]), reverse=True)
            group = [new if g == old else g for g in group]
    return group


def _fingerprint(target: Target) -> str:
    """A number that tells the weights of two layers apart; "" where a wrapper says which processes run the same."""
    if len(dist.mates(target.model)) > 1:
        return ""
    parts = [f"{name}{tuple(p.shape)}" for name, p in target.model.named_parameters()]
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = dist.local(target.parameter(name)).detach().double()  # all of it: no other process is in its mesh
        parts += [repr(x) for x in torch.stack([p.sum(), p.abs().sum(), p.flatten()[0]]).tolist()]
    return str(zlib.crc32("".join([*parts, repr(dist.stage_of(target.model))]).encode()))
